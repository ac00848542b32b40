"""A folder of numbered steps on Orbax, each with an integrity record that readers verify."""

from __future__ import annotations

import contextlib
import errno
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from etils import epath

from gtpo_jax.checkpoint.integrity import (
  IntegrityRecord,
  check_integrity,
  digest_leaves,
  leaf_types,
  record_commit_files,
  write_integrity_record,
)
from gtpo_jax.runtime.distributed import broadcast_from_first, first_nonempty_text, is_first_process
from gtpo_jax.runtime.errors import CorruptCheckpoint, RunError, UserError, first_line
from gtpo_jax.runtime.files import set_aside
from gtpo_jax.runtime.paths import absolute_path

MAX_MESSAGE = 200  # characters of another library's message that are shown


def read_checkpoint(
  folder: epath.Path, targets: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads the items of a step's folder and checks them against its integrity record.

  All processes reach the same result: if one of them finds damage, for example on its own disk or
  in its own cache, every process raises the error.

  Args:
    folder: the folder of one step.
    targets: maps the name of each item to abstract arrays with the shardings to restore, to a
      function from the item's saved leaves to such arrays, or to None to read host arrays. An item
      that was not saved is skipped.

  Returns:
    The items by name, and the metadata saved with them.

  Raises:
    CorruptCheckpoint: the checkpoint differs from what was saved.
    UserError: the checkpoint is intact, but its arrays differ from `targets` in paths, dtypes or
      shapes.
  """
  values = broadcast_from_first(lambda: check_integrity(folder, targets)._asdict())
  record = IntegrityRecord(**values)
  wanted = {
    name: target(record.leaves[name]) if callable(target) else target
    for name, target in targets.items()
    if name in record.leaves
  }
  for name, target in wanted.items():
    if target is not None:
      _check_types(folder, name, record.leaves[name], leaf_types(target))
  items = _read_items(folder, wanted)
  for name, item in items.items():
    restored = digest_leaves(item)
    changed = [x for x, digest in record.leaves[name].items() if restored.get(x) != digest]
    _raise_everywhere(f"{name}{changed[0]} differs from what was saved" if changed else "")
  return items, record.metadata


def _read_items(folder: epath.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
  # CheckpointManager would wait for processes that failed; StandardCheckpointHandler does not.
  handler = ocp.StandardCheckpointHandler()
  items = {}
  damage = ""
  try:
    for name, target in targets.items():
      items[name] = handler.restore(folder / name, args=ocp.args.StandardRestore(target))
  except Exception as error:  # Orbax, TensorStore and JSON raise various types
    damage = first_line(error)
  finally:
    handler.close()
  _raise_everywhere(damage[:MAX_MESSAGE])
  return items


def _check_types(
  folder: epath.Path, item: str, saved: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
  """Raises UserError if an item's saved arrays and `wanted` differ in paths, dtypes or shapes."""
  types = {leaf: digest.partition(":")[0] for leaf, digest in saved.items()}
  for leaf in sorted(types.keys() | wanted.keys()):
    actual = types.get(leaf, "missing")
    expected = wanted.get(leaf, "missing")
    if actual != expected:
      raise UserError(
        f"the checkpoint in {str(folder)!r} belongs to another model or optimizer: {item}{leaf} is "
        f"{actual}, but {expected} in this config; use the config that it was written with, or "
        f"another workdir"
      )


def _raise_everywhere(damage: str) -> None:
  """Raises CorruptCheckpoint on every process if `damage` is not empty on one of them."""
  if message := first_nonempty_text(damage):
    raise CorruptCheckpoint(message)


TMP_SUFFIX = ".orbax-checkpoint-tmp"  # of a step's folder until Orbax commits it
FILE_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class _PendingSave(NamedTuple):
  """The future integrity record of the step that is being saved."""

  step: int
  leaves: dict[str, dict[str, str]]
  metadata: dict[str, Any]


class SavedSteps:
  """A folder with one folder per step, which holds items: pytrees of arrays by name.

  Each step gets an integrity record before Orbax commits it with one rename. A folder whose name is
  a number and whose record is valid is therefore complete.

  Args:
    folder: contains one folder per step.
    keep: number of latest steps to keep. None opens the folder for reading only and leaves it
      unchanged.

  Attributes:
    path: the folder's absolute path.
  """

  def __init__(self, folder: epath.PathLike, keep: int | None):
    self.path = absolute_path(epath.Path(folder))
    if self.path.exists() and not self.path.is_dir():
      raise UserError(
        f"{str(self.path)!r} must be a folder of checkpoints, but is a file; remove it"
      )
    self._writable = keep is not None
    self._pending = _PendingSave(-1, {}, {})
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=self._writable,
      read_only=not self._writable,
      cleanup_tmp_directories=self._writable,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._before_commit),
    )
    self._manager = ocp.CheckpointManager(self.path, options=options)

  @property
  def latest(self) -> int | None:
    """The latest step that is saved or being saved."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Returns the steps on disk, in ascending order."""
    return sorted(self._manager.all_steps(read=True))

  def folder(self, step: int | None) -> epath.Path:
    """Returns the folder of a step."""
    return self.path / str(step)

  def save(self, step: int, items: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Starts saving a step in the background."""
    if not self._writable:
      raise ValueError("these checkpoints are open for reading only; pass keep= to save")
    self.wait()  # so that a failure of the previous save is reported with its own step
    leaves = {name: digest_leaves(item) for name, item in items.items()}
    self._pending = _PendingSave(step, leaves, dict(metadata))
    arguments = {name: ocp.args.StandardSave(item) for name, item in items.items()}
    with self._save_errors(step):
      self._manager.save(step, args=ocp.args.Composite(**arguments))

  def wait(self) -> None:
    """Waits until the current save is on disk."""
    step = self.latest
    with self._save_errors(step):
      self._manager.wait_until_finished()
      folder = self.folder(step)
      saved_here = self._writable and step == self._pending.step and folder.exists()
      if is_first_process() and saved_here:
        record_commit_files(folder)

  def close(self) -> None:
    """Waits as `wait` does, and closes Orbax."""
    self.wait()
    self._manager.close()

  def read_latest(
    self,
    targets: Mapping[str, Any],
    check: Callable[[int, dict[str, Any]], None],
    say: Callable[[str], None],
  ) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Reads the latest intact step and renames the damaged ones that are newer.

    Args:
      targets: as in `read_checkpoint`.
      check: raises CorruptCheckpoint if the items cannot belong to a step.
      say: shows a message to the user.

    Returns:
      The items and the metadata; None if no step is intact.
    """
    while (step := self.latest) is not None:
      try:
        items, metadata = read_checkpoint(self.folder(step), targets)
        check(step, items)
        return items, metadata
      except CorruptCheckpoint as error:
        moved = broadcast_from_first(lambda step=step: str(set_aside(self.folder(step))))
        self._manager.reload()
        fallback = "there is none before it"
        if self.latest is not None:
          fallback = f"trying step {self.latest} instead"
        say(
          f"the checkpoint of step {step} is damaged ({error}) and was renamed to {moved!r}; "
          f"{fallback}"
        )
    return None

  def _before_commit(self) -> None:
    """Called by Orbax when all files of a step are written, just before it commits the step."""
    step, leaves, metadata = self._pending
    # A renamed damaged step (5.damaged) may exist beside the new step of the same number.
    folder = next(
      entry
      for entry in self.path.iterdir()
      if entry.name == str(step) or entry.name.startswith(f"{step}{TMP_SUFFIX}")
    )
    write_integrity_record(folder, leaves, metadata)

  @contextlib.contextmanager
  def _save_errors(self, step: int | None) -> Iterator[None]:
    """Turns any error within the context into a RunError about saving `step`."""
    try:
      yield
    except Exception as error:  # whatever the file system makes Orbax and TensorStore raise
      others = [other for other in self.steps() if other != step]
      raise RunError(
        f"cannot save the checkpoint of step {step} in {str(self.path)!r} "
        f"({_cause(error)}); "
        + (f"step {others[-1]} is intact" if others else "there is none yet")
        + "; free some space or choose another workdir, then run the same command again"
      ) from error


def _cause(error: BaseException) -> str:
  """Returns the operating system's message if there is one, and otherwise the error's first line.

  TensorStore includes the system's message somewhere within its own.
  """
  text = "".join(traceback.format_exception(error))
  for number in FILE_SYSTEM_ERRORS:
    if (message := os.strerror(number)) in text:
      return message
  return first_line(error)[:MAX_MESSAGE]
