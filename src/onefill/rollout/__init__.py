"""Room: rollout."""
