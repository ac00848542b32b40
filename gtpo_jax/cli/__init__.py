"""The command line `gtpo`.

Exit status: 0 done; 2 the user's input is wrong, and one line says what; 130 or 143 stopped by
Ctrl-C or SIGTERM; 1 any other failure.
"""

from gtpo_jax.cli.entry import main
from gtpo_jax.cli.parser import COMMANDS, parse

__all__ = ["COMMANDS", "main", "parse"]
