"""Checkpoints of a run on Orbax: saved in the background, verified when read, for any mesh."""

from __future__ import annotations

import contextlib
import errno
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gtpo_jax.checkpoint.base import digest_base, params_target
from gtpo_jax.checkpoint.digests import digest_leaves
from gtpo_jax.checkpoint.integrity import record_commit_files, write_integrity_record
from gtpo_jax.checkpoint.reader import MAX_MESSAGE, read_checkpoint
from gtpo_jax.models.lora import combine, split_adapters
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.errors import CorruptCheckpoint, RunError, UserError, first_line
from gtpo_jax.storage.files import set_aside
from gtpo_jax.storage.paths import absolute_path
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state

# Names of the items of a checkpoint on disk. They must not change, or older checkpoints no longer
# restore. Parameters and optimizer are separate items: a sampler reads only the parameters.
PARAMS = "params"
REST = "rest"  # {"step", "opt_state"}, and "entropy_coef" if it is adapted
LEFTOVERS = "leftovers"
# The key in a checkpoint's metadata of a digest of the base that its adapters were trained on.
BASE_DIGEST = "base"

TMP_SUFFIX = ".orbax-checkpoint-tmp"  # of a step's folder until Orbax commits it
FILE_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class RestoredRun(NamedTuple):
  """The content of a run's checkpoint."""

  state: TrainState
  leftovers: dict[str, np.ndarray] | None  # completions that the next step will use
  metadata: dict[str, Any]  # other plain values that the next step depends on


class _PendingSave(NamedTuple):
  """What the integrity record of the step that is being saved will contain."""

  step: int
  leaves: dict[str, dict[str, str]]
  metadata: dict[str, Any]


class Checkpoints:
  """A folder of numbered checkpoints.

  Each step gets an integrity record before Orbax commits it with one rename. A folder whose name is
  a number and whose record is valid is therefore complete.

  If the parameters have adapters, a checkpoint holds only these, and a digest of the base model.
  Methods that restore such a checkpoint take a function `base` that reads the base model; its
  result must have that digest. Checkpoints of earlier versions hold the base model too.

  Args:
    folder: contains one folder per step.
    keep: number of latest steps to keep. None opens the folder for reading only and leaves it
      unchanged.

  Raises:
    UserError: `folder` is a file.
  """

  def __init__(self, folder: epath.PathLike, keep: int | None = None):
    folder = absolute_path(epath.Path(folder))
    if folder.exists() and not folder.is_dir():
      raise UserError(f"{str(folder)!r} must be a folder of checkpoints, but is a file; remove it")
    self._writable = keep is not None
    self._pending = _PendingSave(-1, {}, {})
    self._base_digest = ""  # of the base model, which never changes
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=self._writable,
      read_only=not self._writable,
      cleanup_tmp_directories=self._writable,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._before_commit),
    )
    self._manager = ocp.CheckpointManager(folder, options=options)

  @property
  def latest(self) -> int | None:
    """The latest step that is saved or being saved."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Returns the steps on disk, in ascending order."""
    return sorted(self._manager.all_steps(read=True))

  def save(
    self,
    state: TrainState,
    leftovers: dict[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
  ) -> None:
    """Starts saving a state and what belongs to it; see `RestoredRun`.

    Does nothing if the state's step is the latest one.

    Raises:
      RunError: this save or the previous one failed, for example because the disk is full.
    """
    step = int(state.step)
    if step == self.latest:
      return
    trained, metadata = self._without_base(state.params, metadata or {})
    items = {PARAMS: trained, REST: _rest_of(state)}
    if leftovers is not None:
      items[LEFTOVERS] = leftovers
    self._start_save(step, items, metadata)

  def save_params(self, params: Params, step: int = 0, with_base: bool = False) -> None:
    """Saves only parameters, and waits until they are on disk.

    Does nothing if `step` is the latest one.

    Args:
      params: the parameters.
      step: the step that they belong to.
      with_base: whether to save the base model as well if there are adapters.

    Raises:
      RunError: the save failed.
    """
    if step != self.latest:
      trained, metadata = (params, {}) if with_base else self._without_base(params, {})
      self._start_save(step, {PARAMS: trained}, metadata)
      self.wait()

  def restore(
    self,
    model: Transformer,
    optimizer: Optimizer,
    say: Callable[[str], None] = print,
    base: Callable[[], Params] | None = None,
  ) -> RestoredRun | None:
    """Restores the latest intact checkpoint onto `model`'s mesh.

    A damaged checkpoint is renamed, which is reported through `say`, and the one before is tried.

    Returns:
      The content of the checkpoint, or None if there is none.

    Raises:
      UserError: the checkpoint belongs to another model or optimizer.
    """
    abstract = abstract_state(model, optimizer)
    targets = {PARAMS: params_target(model), REST: _rest_of(abstract), LEFTOVERS: None}
    found = self._read_latest(targets, say)
    if found is None:
      return None
    items, metadata = found
    params = self._with_base(model, items[PARAMS], metadata, base)
    return RestoredRun(TrainState(params=params, **items[REST]), items.get(LEFTOVERS), metadata)

  def newest_params(
    self,
    model: Transformer,
    say: Callable[[str], None] = print,
    base: Callable[[], Params] | None = None,
  ) -> Params | None:
    """Restores only the parameters of the latest intact checkpoint, as `restore` does."""
    found = self._read_latest({PARAMS: params_target(model)}, say)
    if found is None:
      return None
    items, metadata = found
    return self._with_base(model, items[PARAMS], metadata, base)

  def restore_params(
    self, model: Transformer, step: int | None = None, base: Callable[[], Params] | None = None
  ) -> Params:
    """Restores only the parameters of `step` (default: the latest). The folder is not changed.

    Raises:
      RunError: the checkpoint is damaged.
      UserError: the checkpoint belongs to another model or base model.
    """
    step = self.latest if step is None else step
    try:
      items, metadata = read_checkpoint(self._folder(step), {PARAMS: params_target(model)})
    except CorruptCheckpoint as error:
      earlier = [other for other in self.steps() if other < step]
      raise RunError(
        f"the checkpoint of step {step} in {str(self._manager.directory)!r} is damaged ({error}); "
        + (f"the one before is step {earlier[-1]}" if earlier else "there is none before it")
      ) from error
    return self._with_base(model, items[PARAMS], metadata, base)

  def wait(self) -> None:
    """Waits until the current save is on disk.

    Raises:
      RunError: the save failed.
    """
    step = self.latest
    with self._save_errors(step):
      self._manager.wait_until_finished()
      folder = self._folder(step)
      saved_here = self._writable and step == self._pending.step and folder.exists()
      if is_first_process() and saved_here:
        record_commit_files(folder)

  def close(self) -> None:
    """Waits as `wait` does, and closes the folder."""
    self.wait()
    self._manager.close()

  def _without_base(
    self, params: Params, metadata: Mapping[str, Any]
  ) -> tuple[Params, Mapping[str, Any]]:
    """Returns what a checkpoint holds of the parameters, and its metadata."""
    adapters, base = split_adapters(params)
    if not adapters:
      return params, metadata
    self._base_digest = self._base_digest or digest_base(base)
    return adapters, {**metadata, BASE_DIGEST: self._base_digest}

  def _with_base(
    self,
    model: Transformer,
    params: Params,
    metadata: Mapping[str, Any],
    read_base: Callable[[], Params] | None,
  ) -> Params:
    """Adds the base model to adapters that were saved without it.

    Raises:
      UserError: it is not the base model that the adapters were trained on.
    """
    if not model.config.lora.rank or split_adapters(params)[1]:
      return params
    if read_base is None:
      raise ValueError("these checkpoints hold only adapters; pass base= to restore")
    base = read_base()
    self._base_digest = digest_base(base)
    if self._base_digest != metadata[BASE_DIGEST]:
      raise UserError(
        f"the adapters in {str(self._manager.directory)!r} were trained on another base model: its "
        f"digest was {metadata[BASE_DIGEST]}, now it is {self._base_digest}; restore the folder "
        "that model.path names, and model.param_dtype"
      )
    return combine(params, base)

  def _start_save(self, step: int, items: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    if not self._writable:
      raise ValueError("these checkpoints are open for reading only; pass keep= to save")
    self.wait()  # so that a failure of the previous save is reported with its own step
    leaves = {name: digest_leaves(item) for name, item in items.items()}
    self._pending = _PendingSave(step, leaves, dict(metadata))
    arguments = {name: ocp.args.StandardSave(item) for name, item in items.items()}
    with self._save_errors(step):
      self._manager.save(step, args=ocp.args.Composite(**arguments))

  def _before_commit(self) -> None:
    """Called by Orbax when all files of a step are written, just before it commits the step."""
    step, leaves, metadata = self._pending
    # A renamed damaged step (5.damaged) may exist beside the new step of the same number.
    folder = next(
      entry
      for entry in self._manager.directory.iterdir()
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
        f"cannot save the checkpoint of step {step} in {str(self._manager.directory)!r} "
        f"({_cause(error)}); "
        + (f"step {others[-1]} is intact" if others else "there is none yet")
        + "; free some space or choose another workdir, then run the same command again"
      ) from error

  def _read_latest(
    self, targets: Mapping[str, Any], say: Callable[[str], None]
  ) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Reads the latest intact checkpoint and renames the damaged ones that are newer."""
    while (step := self.latest) is not None:
      try:
        items, metadata = read_checkpoint(self._folder(step), targets)
        if REST in items and int(items[REST]["step"]) != step:
          raise CorruptCheckpoint(f"it contains step {int(items[REST]['step'])}")
        return items, metadata
      except CorruptCheckpoint as error:
        moved = broadcast_from_first(lambda step=step: str(set_aside(self._folder(step))))
        self._manager.reload()
        fallback = "there is none before it"
        if self.latest is not None:
          fallback = f"trying step {self.latest} instead"
        say(
          f"the checkpoint of step {step} is damaged ({error}) and was renamed to {moved!r}; "
          f"{fallback}"
        )
    return None

  def _folder(self, step: int | None) -> epath.Path:
    return self._manager.directory / str(step)


def _cause(error: BaseException) -> str:
  """Returns the operating system's message if there is one, and otherwise the error's first line.

  TensorStore includes the system's message somewhere within its own.
  """
  text = "".join(traceback.format_exception(error))
  for number in FILE_SYSTEM_ERRORS:
    if (message := os.strerror(number)) in text:
      return message
  return first_line(error)[:MAX_MESSAGE]


def _rest_of(state: TrainState) -> dict[str, Any]:
  """Returns the training state without the parameters, as one item of a checkpoint."""
  rest = {"step": state.step, "opt_state": state.opt_state}
  return rest if state.entropy_coef is None else {**rest, "entropy_coef": state.entropy_coef}
