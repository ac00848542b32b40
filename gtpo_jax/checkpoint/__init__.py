"""A run's state on disk: saving, restoring, integrity, provenance and the working directory."""
