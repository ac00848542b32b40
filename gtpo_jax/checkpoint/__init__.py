"""A run's state on disk: saving, integrity, the working directory."""
