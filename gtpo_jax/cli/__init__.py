"""The command line `gtpo`.

Exit status: 0 on success; 2 if the user's input is wrong, with one line on stderr that says what to
fix; 130 or 143 after Ctrl-C or SIGTERM; 1 after any other failure.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from gtpo_jax.cli.parser import COMMANDS, parse
from gtpo_jax.runtime.errors import RunError, UserError, escape_controls, first_line
from gtpo_jax.runtime.signals import SIGNAL_EXIT

__all__ = ["COMMANDS", "main", "parse"]

# Failed writes that the user can fix: disk full, over quota, file too large, read-only, I/O error.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

REPLACED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit status."""
  _open_standard_streams()
  try:
    args, overrides = parse(list(sys.argv[1:] if argv is None else argv))
    return args.run(args, overrides)
  except UserError as error:
    return _fail(2, str(error))
  except RunError as error:
    return _fail(1, str(error))
  except PermissionError as error:
    return _fail(
      2, f"no permission to access {error.filename!r}; name another path, or change its permissions"
    )
  except KeyboardInterrupt:
    return SIGNAL_EXIT + signal.SIGINT
  except BrokenPipeError:  # nobody reads stdout any more; redirect Python's flush at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    if error.errno not in DISK_ERRORS:
      # Somebody removed or replaced a file or a folder that the program uses.
      if error.filename is not None:
        return _fail(1, f"cannot access {str(error.filename)!r}: {error.strerror}")
      if isinstance(error, REPLACED):
        return _fail(1, first_line(error))
      raise
    file = str(error.filename or "a file")
    return _fail(
      1,
      f"cannot write {file!r}: {error.strerror}; saved checkpoints are intact; free some space, "
      f"then run the same command again",
    )


def _open_standard_streams() -> None:
  """Opens each of stdin, stdout and stderr that the caller has closed, and makes them total.

  Otherwise the next file that is opened takes the number of a closed stream, and everything that is
  printed ends up in that file. Characters that the terminal's encoding does not have are escaped.
  """
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until the program ends)
  for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # not under every notebook or test
      stream.reconfigure(errors="backslashreplace")


def _fail(status: int, message: str) -> int:
  print(f"gtpo: {escape_controls(message)}", file=sys.stderr)
  return status
