"""Lets `python -m gtpo_jax` run the command line `gtpo`."""

import sys

from gtpo_jax.cli import main

if __name__ == "__main__":
  sys.exit(main())
