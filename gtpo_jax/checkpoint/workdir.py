"""A run's working directory: its lock, its config, and the changes that it accepts on resuming."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from gtpo_jax.checkpoint.lease import claim_lease
from gtpo_jax.config import Config, difference, freeze_recorded, resolved_dict
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import unique_keys
from gtpo_jax.runtime.paths import (
  absolute_path,
  is_remote,
  storage_errors,
  storage_path,
  write_atomically,
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


class Claim(NamedTuple):
  """A workdir that a run has locked.

  Attributes:
    check_lock: raises RunError if the run has lost the lock. In an object store this can happen if
      it cannot reach the store for a while.
    record_config: writes the run's config.json. A run that resumes calls it once everything in the
      workdir has accepted its config, so that a refused run changes nothing. All processes must
      call it together.
  """

  check_lock: Callable[[], None]
  record_config: Callable[[], None]


@contextlib.contextmanager
def claim(
  workdir: epath.Path, config: Config, say: Callable[[str], None] = print
) -> Iterator[Claim]:
  """Creates and locks the workdir. If no model is saved in it, also writes its config.json.

  The run's first process holds the lock until it ends, however it ends.

  Args:
    workdir: the run's folder.
    config: the run's config. With `checkpoint.accept_changes` a workdir of another config is
      accepted and the differences are printed.
    say: shows a message to the user.

  Raises:
    UserError: the workdir is not a folder, not writable, in use, or belongs to a config that
      differs in fields that may not change on resume.
  """
  with contextlib.ExitStack() as lock:
    claimed = Claim(lambda: None, lambda: None)

    def claim_here() -> None:
      nonlocal claimed
      claimed = _claim(workdir, config, lock, say)

    broadcast_from_first(claim_here)
    record = lambda: claimed.record_config()
    yield claimed._replace(record_config=lambda: broadcast_from_first(record))


def load_config(workdir: Path) -> Config:
  """Returns the config of the run in a workdir.

  Raises:
    UserError: the folder holds no run, or its config.json is damaged.
  """
  return freeze_recorded(_read_config(workdir))


def recorded_date(workdir: Path) -> str:
  """Returns the `data.date` of the run in a workdir; "" if there is none."""
  try:
    return load_config(workdir).data.date
  except UserError:  # `claim` reports a damaged config
    return ""


def has_base(workdir: Path) -> bool:
  """Whether a complete base model is saved in WORKDIR/base."""
  return _has_steps(workdir / "base")


def _claim(
  workdir: epath.Path, config: Config, lock: contextlib.ExitStack, say: Callable[[str], None]
) -> Claim:
  def record_config() -> None:
    text = json.dumps(resolved_dict(config), indent=2) + "\n"
    with storage_errors(f"cannot write into workdir {str(workdir)!r}", UserError):
      write_atomically(workdir / "config.json", text.encode())

  check_lock = lambda: None
  with storage_errors(f"cannot write into workdir {str(workdir)!r}", UserError):
    has_model = _check_config(workdir, config, say)
    if is_remote(workdir):
      check_lock = lock.enter_context(claim_lease(workdir, say)).check
    else:
      workdir.mkdir(parents=True, exist_ok=True)
      lock.enter_context(_locked(workdir))
  if not has_model:
    record_config()
    return Claim(check_lock, lambda: None)
  return Claim(check_lock, record_config)


def _check_config(workdir: Path, config: Config, say: Callable[[str], None]) -> bool:
  """Refuses a workdir whose run has another config, or one that cannot be compared.

  Returns whether the workdir has a model and its config. Before, the config may still change.
  """
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"workdir {str(workdir)!r} is a file; name a folder")
  has_model = has_base(workdir) or _has_steps(workdir / "checkpoints")
  if not has_model or not (workdir / "config.json").exists():
    return False
  values = _read_config(workdir)
  try:
    saved = freeze_recorded(values)
  except UserError as error:
    raise UserError(f"{str(workdir / 'config.json')!r} is not usable: {error}") from error
  changes = "; ".join(forbidden_changes(saved, config))
  if changes and not config.checkpoint.accept_changes:
    raise UserError(
      f"workdir {str(workdir)!r} belongs to another config ({changes}); name another workdir, "
      "remove this one, or set checkpoint.accept_changes to continue anyway"
    )
  if changes:
    say(f"changed since this run began: {changes}")
  return True


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
    try:
      yield
    finally:
      lock.truncate(0)


def _read_config(workdir: Path) -> dict[str, Any]:
  file = workdir / "config.json"
  if not file.exists():
    raise UserError(
      f"no run in {str(workdir)!r}: it has no config.json; name the workdir of a `gtpo train`"
    )
  if not file.is_file():
    raise UserError(f"{str(file)!r} is not a file; {WRITTEN_AGAIN}")
  try:
    values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
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


def _has_steps(folder: Path) -> bool:
  return any(step.name.isdigit() for step in folder.glob("*"))


# Fields of the machine, the length and the files of a run. They do not change its results, apart
# from the exceptions in `FIXED`.
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
  "model.base_layout",
  "model.attention",
  "sampling.slots",
  "sampling.merge_adapters",
  "sampling.chunk",
  "sampling.page_size",
  "sampling.cache_fraction",
  "sampling.warm_up",
  "reward.judge.concurrency",
  "reward.judge.timeout_s",
  "reward.judge.completion_timeout_s",
  "reward.judge.retries",
)


# Advice about a change, for fields that a user may not have changed knowingly.
ADVICE = {"model.compute_dtype": "set it to {old!r} to continue as before"}


class Fixed(NamedTuple):
  """Fields of `MAY_CHANGE` that may not change in some configs."""

  fields: tuple[str, ...]  # their names
  applies: Callable[[Config], bool]  # whether the results of a run with this config depend on them
  reason: str  # why they do


FIXED = (
  Fixed(
    ("steps",),
    lambda config: config.optimizer.schedule != "constant",
    "the schedule of the learning rate depends on it",
  ),
  Fixed(
    ("sampling.slots", "sampling.chunk", "sampling.page_size", "sampling.cache_fraction"),
    lambda config: config.sampling.staleness > 0,
    "with sampling.staleness, it decides which completions end first",
  ),
)


def forbidden_changes(saved: Config, now: Config) -> list[str]:
  """Describes the differences with which `now` would not continue the run of `saved` exactly.

  Returns:
    A text for each field, such as "seed was 0, now 7".
  """
  changes = []
  for key, (old, new) in difference(saved, now).items():
    if key == "data.date" and not old:  # a version before 0.5 did not record it
      continue
    may_change = any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
    reasons = [fixed.reason for fixed in FIXED if key in fixed.fields and fixed.applies(saved)]
    if may_change and not reasons:
      continue
    explained = f", but {reasons[0]}" if may_change else ""
    if advice := ADVICE.get(key):
      explained = f", {advice.format(old=old)}"
    changes.append(f"{key} was {old!r}, now {new!r}{explained}")
  return changes
