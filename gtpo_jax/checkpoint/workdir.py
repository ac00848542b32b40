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

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.algorithms.settings import RENAMED
from gtpo_jax.config import Config, difference, freeze_saved, resolved_dict
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError, first_line

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
  "model.remat",
  "model.attention",
  "sampling.slots",
  "sampling.chunk",
  "sampling.warm_up",
)


@contextlib.contextmanager
def open_workdir(workdir: str | Path | None) -> Iterator[epath.Path]:
  """Yields a run's folder; a temporary one if `workdir` is None."""
  if workdir is not None:
    yield epath.Path(workdir)
    return
  with tempfile.TemporaryDirectory(prefix="gtpo_") as folder:
    yield epath.Path(folder)


@contextlib.contextmanager
def claim(workdir: Path, config: Config, say: Callable[[str], None] = print) -> Iterator[None]:
  """Creates and locks the workdir, and writes its config.json.

  The run's first process holds the lock until it ends, however it ends.

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
    broadcast_from_first(lambda: _claim(workdir, config, lock, say))
    yield


def load_config(workdir: Path) -> Config:
  """Returns the config of the run in a workdir.

  Raises:
    UserError: the folder holds no run, or its config.json is damaged.
  """
  return freeze_saved(_read_config(workdir))


def has_base(workdir: Path) -> bool:
  """Whether a complete base model is saved in WORKDIR/base."""
  return _has_steps(workdir / "base")


def _claim(
  workdir: Path, config: Config, lock: contextlib.ExitStack, say: Callable[[str], None]
) -> None:
  try:
    _check_config(workdir, config, say)
    workdir.mkdir(parents=True, exist_ok=True)
    if "://" not in str(workdir):  # object stores have no locks
      lock.enter_context(_locked(workdir))
    temporary = workdir / "config.tmp"
    temporary.write_text(json.dumps(resolved_dict(config), indent=2) + "\n")
    temporary.replace(workdir / "config.json")
  except OSError as error:
    raise UserError(
      f"cannot write into workdir {str(workdir)!r}: {error.strerror or error}"
    ) from error


def _check_config(workdir: Path, config: Config, say: Callable[[str], None]) -> None:
  """Refuses a workdir whose run has another config, or one that cannot be compared."""
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"workdir {str(workdir)!r} is a file; name a folder")
  has_model = has_base(workdir) or _has_steps(workdir / "checkpoints")
  if not has_model or not (workdir / "config.json").exists():
    return  # before the first model is saved, the config may still change
  saved = _read_config(workdir)
  accept = config.checkpoint.accept_changes
  if (unrecorded := _unrecorded_settings(saved)) and not accept:
    raise UserError(
      f"workdir {str(workdir)!r} was started by an earlier version, which did not record its "
      f"algorithm settings ({unrecorded[0]} and {len(unrecorded) - 1} more); resume it with that "
      "version, name another workdir, or set checkpoint.accept_changes to use today's settings"
    )
  changed = {
    key: values
    for key, values in difference(freeze_saved(saved), config).items()
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


def _unrecorded_settings(saved: Mapping[str, Any]) -> list[str]:
  """Returns the settings that a saved config's algorithm reads and for which it has no value.

  Since version 0.2 config.json has a value for each of them. Earlier versions wrote null for a
  published default, which may have changed since.
  """
  section = saved.get("algorithm")
  if not isinstance(section, Mapping) or section.get("name") not in RECIPES:
    return []  # refused where the config is made
  recorded = {RENAMED.get(key, key) for key, value in section.items() if value is not None}
  return [key for key in RECIPES[section["name"]].settings if key not in recorded]


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
  if not file.is_file():
    raise UserError(
      f"no run in {str(workdir)!r}: it has no config.json; name the workdir of a `gtpo train`"
    )
  try:
    values = json.loads(file.read_text())
  except (ValueError, RecursionError) as error:  # also text that is not UTF-8
    raise UserError(f"{str(file)!r} is not valid JSON: {first_line(error)}") from error
  if not isinstance(values, dict):
    raise UserError(
      f"{str(file)!r} is not a config: it holds {type(values).__name__}, not an object"
    )
  return values


def _has_steps(folder: Path) -> bool:
  return any(step.name.isdigit() for step in folder.glob("*"))


def _may_change(key: str) -> bool:
  return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
