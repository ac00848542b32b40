"""Every field at its default. Other configs start here; `gtpo_jax/config/sections.py` says what each field means."""

from gtpo_jax.config import default_config


def get_config():
  return default_config()
