"""The command line `gtpo`.

Exit status: 0 on success; 2 if the user's input is wrong, with one line on stderr that says what to
fix; 130 or 143 after Ctrl-C or SIGTERM; 1 after any other failure.
"""

from gtpo_jax.cli.entry import main
from gtpo_jax.cli.parser import COMMANDS, parse

__all__ = ["COMMANDS", "main", "parse"]
