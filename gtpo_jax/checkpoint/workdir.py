"""A run's working directory: its lock, and the config of the run that it belongs to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from gtpo_jax.config import Config, difference, freeze, resolved_dict
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.storage.lease import claim_lease
from gtpo_jax.storage.paths import (
  absolute_path,
  is_remote,
  storage_errors,
  storage_path,
  write_atomically,
)

# What may change on resume: where the run computes and what it writes, but not what it computes.
MAY_CHANGE = (
  "steps",
  "mesh",
  "eval",
  "checkpoint",
  "guards",
  "log",
  "profile",
  "batch.micro_batches",
  "batch.head_chunk",
  "batch.pack",
  "model.random_weights",
  "model.remat",
  "model.attention",
  "sampling.slots",
  "sampling.chunk",
  "sampling.page_size",
  "sampling.cache_fraction",
  "sampling.warm_up",
)
WRITTEN_AGAIN = "remove it; the next `gtpo train` with the run's config writes it again"


@contextlib.contextmanager
def open_workdir(workdir: str | Path | None) -> Iterator[epath.Path]:
  """Yields a run's folder; a temporary one if `workdir` is None.

  Its path is absolute: code of the user, such as a reward function, may change the current folder.
  """
  if workdir is not None:
    yield absolute_path(storage_path(workdir))
    return
  with tempfile.TemporaryDirectory(prefix="gtpo_") as folder:
    yield epath.Path(folder)


@contextlib.contextmanager
def claim(
  workdir: epath.Path, config: Config, say: Callable[[str], None] = print
) -> Iterator[Callable[[], None]]:
  """Creates and locks the workdir, and writes its config.json.

  The run's first process holds the lock until it ends, however it ends. In an object store it may
  lose the lock if it cannot reach the store for a while. Yields a function that raises RunError in
  that case.

  Args:
    workdir: the run's folder.
    config: the run's config. With `checkpoint.accept_changes` a workdir of another config is
      accepted and the differences are printed.
    say: shows a message to the user.

  Raises:
    UserError: the workdir is not a folder, not writable, in use, or belongs to a config that
      differs in more than what may change on resume.
  """
  with contextlib.ExitStack() as lock:
    check = lambda: None

    def claim_here() -> None:
      nonlocal check
      check = _claim(workdir, config, lock, say)

    broadcast_from_first(claim_here)
    yield check


def load_config(workdir: Path) -> Config:
  """Returns the config of the run in a workdir.

  Raises:
    UserError: the folder holds no run, or its config.json is damaged.
  """
  return freeze(_read_config(workdir))


def has_base(workdir: Path) -> bool:
  """Whether a complete base model is saved in WORKDIR/base."""
  return _has_steps(workdir / "base")


def _claim(
  workdir: epath.Path, config: Config, lock: contextlib.ExitStack, say: Callable[[str], None]
) -> Callable[[], None]:
  check = lambda: None
  with storage_errors(f"cannot write into workdir {str(workdir)!r}", UserError):
    _check_config(workdir, config, say)
    if is_remote(workdir):
      check = lock.enter_context(claim_lease(workdir, say)).check
    else:
      workdir.mkdir(parents=True, exist_ok=True)
      lock.enter_context(_locked(workdir))
    text = json.dumps(resolved_dict(config), indent=2) + "\n"
    write_atomically(workdir / "config.json", text.encode())
  return check


def _check_config(workdir: Path, config: Config, say: Callable[[str], None]) -> None:
  """Refuses a workdir whose run has another config, or one that cannot be compared."""
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"workdir {str(workdir)!r} is a file; name a folder")
  has_model = has_base(workdir) or _has_steps(workdir / "checkpoints")
  if not has_model or not (workdir / "config.json").exists():
    return  # before the first model is saved, the config may still change
  saved = _read_config(workdir)
  accept = config.checkpoint.accept_changes
  changed = {
    key: values
    for key, values in difference(_freeze(workdir, saved), config).items()
    if not _may_change(key)
  }
  changes = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
  if changed and not accept:
    raise UserError(
      f"workdir {str(workdir)!r} belongs to another config ({changes}); name another workdir, "
      "remove this one, or set checkpoint.accept_changes to continue anyway"
    )
  if changed:
    say(f"changed since this run began: {changes}")


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
  with open(workdir / "lock", "a+") as lock:  # etils paths do not support "a+"
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      owner = lock.read().strip() or "another process"
      raise UserError(
        f"workdir {str(workdir)!r} is in use by {owner}; "
        "wait until that ends, or name another workdir"
      ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    yield


def _read_config(workdir: Path) -> dict[str, Any]:
  file = workdir / "config.json"
  if not file.exists():
    raise UserError(
      f"no run in {str(workdir)!r}: it has no config.json; name the workdir of a `gtpo train`"
    )
  if not file.is_file():
    raise UserError(f"{str(file)!r} is not a file; {WRITTEN_AGAIN}")
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:  # also text that is not UTF-8
    raise UserError(
      f"{str(file)!r} is not valid JSON: {first_line(error)}; {WRITTEN_AGAIN}"
    ) from error
  if not isinstance(values, dict):
    raise UserError(
      f"{str(file)!r} is not a config: it holds {type(values).__name__}, not an object; "
      f"{WRITTEN_AGAIN}"
    )
  return values


def _freeze(workdir: Path, saved: Mapping[str, Any]) -> Config:
  try:
    return freeze(saved)
  except UserError as error:
    raise UserError(f"{str(workdir / 'config.json')!r} is not usable: {error}") from error


def _has_steps(folder: Path) -> bool:
  return any(step.name.isdigit() for step in folder.glob("*"))


def _may_change(key: str) -> bool:
  return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
