"""A run's state on disk: saving, restoring, integrity, provenance and the working directory."""

from gtpo_jax.storage.paths import accept_unknown_owners

accept_unknown_owners()
