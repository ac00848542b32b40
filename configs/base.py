"""The defaults of all fields, from which the other configs start.

`gtpo_jax/config/sections.py` documents each field.
"""

from gtpo_jax.config import default_config


def get_config():
  return default_config()
