"""A run's folder: whose it is, and the config that it was written by."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from gtpo_jax.config import Config, difference, freeze, to_dict
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError

# What may change when a run is taken up again: where it runs and what is written, not what is computed.
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
  "model.remat",
  "model.attention",
  "sampling.slots",
  "sampling.chunk",
  "sampling.warm_up",
)


@contextlib.contextmanager
def claim(workdir: Path, config: Config, say: Callable[[str], None] = print) -> Iterator[None]:
  """Makes the workdir, keeps every other run from training in it, and writes its config.json.

  The lock is held by the run's first process and ends with it, however that ends. With `checkpoint.accept_changes` another config is
  not refused, and what differs is said.

  Raises:
    UserError: not a folder, not writable, in use, or written by a config that differs in more than what may change on resume.
  """
  with contextlib.ExitStack() as held:
    broadcast_from_first(lambda: _take(workdir, config, held, say))
    yield


def _take(
  workdir: Path, config: Config, held: contextlib.ExitStack, say: Callable[[str], None]
) -> None:
  try:
    _check_config(workdir, config, say)
    workdir.mkdir(parents=True, exist_ok=True)
    if "://" not in str(workdir):  # an object store knows no locks
      held.enter_context(_locked(workdir))
    fresh = workdir / "config.tmp"
    fresh.write_text(json.dumps(to_dict(config), indent=2) + "\n")
    fresh.replace(workdir / "config.json")
  except OSError as error:
    raise UserError(
      f"cannot write into workdir {str(workdir)!r}: {error.strerror or error}"
    ) from error


def _check_config(workdir: Path, config: Config, say: Callable[[str], None]) -> None:
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"workdir {str(workdir)!r} is a file; name a folder")
  if (
    not (has_base(workdir) or _has_steps(workdir / "checkpoints"))
    or not (workdir / "config.json").exists()
  ):
    return  # a config that never made a model may be mended
  changed = {
    key: values
    for key, values in difference(load_config(workdir), config).items()
    if not _may_change(key)
  }
  shown = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
  if changed and not config.checkpoint.accept_changes:
    raise UserError(
      f"workdir {str(workdir)!r} belongs to another config ({shown}); name another workdir, remove this one, or set "
      f"checkpoint.accept_changes to go on all the same"
    )
  if changed:
    say(f"changed since this run began: {shown}")


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
  with open(workdir / "lock", "a+") as lock:  # etils paths know no "a+"
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      raise UserError(
        f"workdir {str(workdir)!r} is in use by {lock.read().strip() or 'another process'}; wait until that ends, or name "
        f"another workdir"
      ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    yield


def load_config(workdir: Path) -> Config:
  """The config that a workdir was written by.

  Raises:
    UserError: the folder holds no run, or its config.json is damaged.
  """
  file = workdir / "config.json"
  if not file.is_file():
    raise UserError(
      f"no run in {str(workdir)!r}: it has no config.json; name the workdir of a `gtpo train`"
    )
  try:
    values = json.loads(file.read_text())
  except json.JSONDecodeError as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {error}") from error
  if not isinstance(values, dict):
    raise UserError(
      f"{str(file)!r} is not a config: it holds {type(values).__name__}, not an object"
    )
  return freeze(values)


def has_base(workdir: Path) -> bool:
  """Whether a base model was saved whole."""
  return _has_steps(workdir / "base")


def _has_steps(folder: Path) -> bool:
  return any(step.name.isdigit() for step in folder.glob("*"))


def _may_change(key: str) -> bool:
  return any(key == name or key.startswith(name + ".") for name in MAY_CHANGE)
