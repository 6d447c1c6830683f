"""Room: reward."""
