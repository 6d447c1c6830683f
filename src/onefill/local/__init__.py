"""Room: local."""
