"""Shared by the commands: the processes that run them, their messages, and the files they write.

Modules that import JAX are imported inside the functions, after `prepare_jax`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_jax.runtime.cluster.agreement import agree, announce_failure, process_identity
from gtpo_jax.runtime.cluster.joining import join_processes
from gtpo_jax.runtime.device_errors import explain
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import (
  absolute_path,
  check_object_writable,
  is_remote,
  storage_errors,
  storage_path,
)
from gtpo_jax.runtime.startup import prepare_devices, prepare_jax, refuse_cpu_fallback

if TYPE_CHECKING:
  from gtpo_jax.logs.display import Display


def in_all_processes(command: Callable[..., int]) -> Callable[..., int]:
  """Decorates a command that the processes of a launcher run together."""

  @functools.wraps(command)
  def run(args: argparse.Namespace, overrides: list[str]) -> int:
    prepare_jax()
    join_processes()
    with exit_on_failure():
      agree({**process_identity(), "the command": command.__name__, **_places(args)})
      refuse_cpu_fallback()
      prepare_devices()
      return command(args, overrides)

  return run


def _places(args: argparse.Namespace) -> dict[str, str]:
  """Returns the options of a command that all processes must share; paths are absolute.

  The config file is not among them: its content is compared.
  """
  options = {key: value for key, value in vars(args).items() if key not in ("run", "config")}
  return {
    f"--{key}": str(absolute_path(storage_path(value)) if isinstance(value, Path) else value)
    for key, value in options.items()
  }


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
  """Exits at once when this process fails, if it is one of several.

  A normal exit would wait for the other processes, which may wait for this one in a collective.

  Raises:
    RunError: XLA failed, and `explain` knows what to do about it.
  """
  import jax

  try:
    yield
  except (Exception, SystemExit) as error:  # rich raises SystemExit when its output pipe is closed
    count = jax.process_count()
    reason = explain(error, count)
    if count == 1:
      if reason:
        raise RunError(reason) from error
      raise
    announce_failure(error)
    expected = reason or isinstance(error, UserError | RunError)
    with contextlib.suppress(OSError):  # stderr may be closed
      if not expected:
        traceback.print_exc()
      print(
        f"gtpo: process {jax.process_index()} of {count}: {reason or error}; "
        f"restart all processes to resume",
        file=sys.stderr,
        flush=True,
      )
    os._exit(2 if isinstance(error, UserError) else 1)


def program_name() -> str:
  """Returns how this program was started, for commands that the user can copy."""
  if Path(sys.argv[0]).name == "gtpo":
    on_path = shutil.which("gtpo")
    is_first = on_path and os.path.samefile(on_path, sys.argv[0])
    return "gtpo" if is_first else shlex.quote(sys.argv[0])
  python = shutil.which("python")
  is_first = python and os.path.abspath(python) == os.path.abspath(sys.executable)
  return f"{'python' if is_first else shlex.quote(sys.executable)} -m gtpo_jax"


def stderr_display(enabled: bool = True) -> Display:
  """Returns a display of progress on stderr, for commands whose result is on stdout."""
  from rich.console import Console

  from gtpo_jax.logs.display import Display

  console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
  return Display(console=console)


def check_writable(file: Path | None) -> None:
  """Raises UserError if the file cannot be written. Called before the work that fills the file."""
  if file is None:
    return
  if is_remote(file):
    with storage_errors(f"cannot write {str(file)!r}", UserError):
      check_object_writable(file)
    return
  target = file if file.exists() else Path(file).absolute().parent
  if file.is_dir() or not os.access(target, os.W_OK):
    raise UserError(
      f"cannot write {str(file)!r}; name a file in an existing folder that you can write to"
    )


def write(file: Path, text: str) -> None:
  """Writes a result."""
  with storage_errors(f"cannot write {str(file)!r}", UserError):
    file.write_bytes(text.encode())
