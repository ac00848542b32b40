"""Every field at its default; other configs start from it.

`gtpo_jax/config/sections.py` documents each field.
"""

from gtpo_jax.config import default_config


def get_config():
  return default_config()
