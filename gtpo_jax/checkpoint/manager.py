"""Checkpoints on Orbax: the state of a run, saved in the background, sealed, checked when it is read, restored onto any mesh."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gtpo_jax.checkpoint.digests import digest_leaves, leaf_kinds
from gtpo_jax.checkpoint.integrity import check_seal, seal_late_files, write_seal
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params
from gtpo_jax.runtime.distributed import any_text, broadcast_from_first, is_first_process
from gtpo_jax.runtime.errors import Damaged, RunError, UserError, first_line
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state


class Saved(NamedTuple):
  """What a checkpoint of a run holds."""

  state: TrainState
  leftovers: dict[str, np.ndarray] | None  # what the step left to the next
  facts: dict[str, Any]  # what else the next step depends on, in plain values


class Checkpoints:
  """A folder of numbered checkpoints, the newest `keep` of them; None: to read them, and to leave the folder as it is.

  Parameters and optimizer are separate items, so that a sampler reads the parameters alone. Each step is sealed before Orbax commits
  it with one rename: a folder with a number for its name and a good seal was written whole.
  """

  def __init__(self, folder: epath.PathLike, keep: int | None = None):
    for name in (
      "absl",
      "orbax",
      "asyncio",
    ):  # their notes would break into the display; what fails is raised besides
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self._owned = keep is not None
    self._sealing = (-1, {}, {})
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=self._owned,
      read_only=not self._owned,
      cleanup_tmp_directories=self._owned,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
    )
    self._manager = ocp.CheckpointManager(epath.Path(folder).absolute(), options=options)

  @property
  def latest(self) -> int | None:
    """The newest step saved, or begun to be."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """The steps that are on disk, in order."""
    return sorted(self._manager.all_steps(read=True))

  def save(
    self,
    state: TrainState,
    leftovers: dict[str, np.ndarray] | None = None,
    facts: Mapping[str, Any] | None = None,
  ) -> None:
    """Begins to save a state with what belongs to it (see `Saved`); a save of the newest step again is skipped.

    Raises:
      RunError: this save or the one before failed, as on a full disk.
    """
    step = int(state.step)
    if step != self.latest:
      items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
      self._save(step, items | ({} if leftovers is None else {"leftovers": leftovers}), facts or {})

  def save_params(self, params: Params, step: int = 0) -> None:
    """Saves parameters alone, and waits; skipped and refused as `save` is."""
    if step != self.latest:
      self._save(step, {"params": params}, {})
      self.wait()

  def _save(self, step: int, items: dict[str, Any], facts: Mapping[str, Any]) -> None:
    if not self._owned:
      raise ValueError("these checkpoints were opened to be read; open them with keep=")
    self.wait()  # a failure of the save before is told as its own
    self._sealing = step, {name: digest_leaves(item) for name, item in items.items()}, dict(facts)
    with self._told(step):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          **{name: ocp.args.StandardSave(item) for name, item in items.items()}
        ),
      )

  def _seal(self) -> None:
    """Called by Orbax when all files of a step are written and it is about to be committed."""
    step, leaves, facts = self._sealing
    folder = next(
      entry for entry in self._manager.directory.iterdir() if entry.name.split(".")[0] == str(step)
    )
    write_seal(folder, leaves, facts)

  def restore(
    self, model: Qwen2, optimizer: Optimizer, say: Callable[[str], None] = print
  ) -> Saved | None:
    """The newest checkpoint that is whole, laid out for `model`'s mesh; None where there is none.

    One that is not what was saved is set aside under another name, with a word of it, and the one before is read.
    """
    like = abstract_state(model, optimizer)
    targets = {
      "params": like.params,
      "rest": {"step": like.step, "opt_state": like.opt_state},
      "leftovers": None,
    }
    if (newest := self._newest(targets, say)) is None:
      return None
    found, facts = newest
    return Saved(TrainState(params=found["params"], **found["rest"]), found.get("leftovers"), facts)

  def newest_params(self, model: Qwen2, say: Callable[[str], None] = print) -> Params | None:
    """The parameters alone, of the newest step that is whole, as `restore` finds it."""
    newest = self._newest({"params": abstract_params(model)}, say)
    return newest and newest[0]["params"]

  def _newest(
    self, targets: Mapping[str, Any], say: Callable[[str], None]
  ) -> tuple[dict[str, Any], dict[str, Any]] | None:
    while (step := self.latest) is not None:
      try:
        return self._read(step, targets)
      except Damaged as error:
        aside = self._set_aside(step)
        say(
          f"the checkpoint of step {step} is damaged ({error}); it is set aside as {str(aside)!r}, "
          + (
            f"step {self.latest} is read instead"
            if self.latest is not None
            else "and there is none before it"
          )
        )
    return None

  def restore_params(self, model: Qwen2, step: int | None = None) -> Params:
    """The parameters alone, of the newest step unless another is named.

    Raises:
      RunError: they are not what was saved.
    """
    step = self.latest if step is None else step
    try:
      return self._read(step, {"params": abstract_params(model)})[0]["params"]
    except Damaged as error:
      before = [other for other in self.steps() if other < step]
      raise RunError(
        f"the checkpoint of step {step} in {str(self._manager.directory)!r} is damaged ({error}); "
        + (f"step {before[-1]} is before it" if before else "there is none before it")
      ) from error

  def _read(self, step: int, targets: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The items of `targets` that were saved, as these say (None: as host arrays), and the facts.

    What one process alone finds damaged is damaged for all, or they would part. Raises Damaged, and UserError for arrays of other shapes.
    """
    folder = self._manager.directory / str(step)
    seal = broadcast_from_first(lambda: check_seal(folder, targets))
    names = [name for name in targets if name in seal["leaves"]]
    for name in names:
      if targets[name] is not None:
        _check_kinds(folder, name, seal["leaves"][name], leaf_kinds(targets[name]))
    found = {}  # the manager's reading waits for processes that failed
    damage = ""
    reader = ocp.StandardCheckpointHandler()
    try:
      for name in names:
        found[name] = reader.restore(folder / name, args=ocp.args.StandardRestore(targets[name]))
    except Exception as error:  # Orbax, TensorStore and JSON each have their own
      damage = first_line(error)
    finally:
      reader.close()
    if damage := any_text(damage[:200]):
      raise Damaged(damage)
    for name in names:
      now = digest_leaves(found[name])
      differs = [leaf for leaf, digest in seal["leaves"][name].items() if now.get(leaf) != digest]
      if damage := any_text(f"{name}{differs[0]} is not what was saved" if differs else ""):
        raise Damaged(damage)
    return found, seal["facts"]

  def _set_aside(self, step: int) -> epath.Path:
    aside = broadcast_from_first(lambda: str(_rename(self._manager.directory, step)))
    self._manager.reload()
    return epath.Path(aside)

  def wait(self) -> None:
    """Returns when what was begun is on disk. Raises RunError where that failed."""
    step = self.latest
    with self._told(step):
      self._manager.wait_until_finished()
      folder = self._manager.directory / str(step)
      if is_first_process() and self._owned and step == self._sealing[0] and folder.exists():
        seal_late_files(folder)

  def close(self) -> None:
    """Waits and lets go of the folder."""
    self.wait()
    self._manager.close()

  @contextlib.contextmanager
  def _told(self, step: int | None) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # whatever the file system makes Orbax and TensorStore raise
      whole = [other for other in self.steps() if other != step]
      raise RunError(
        f"the checkpoint of step {step} cannot be saved in {str(self._manager.directory)!r} ({_cause(error)}); "
        + (f"step {whole[-1]} is whole" if whole else "there is none yet")
        + ": free some space or name another place, then give the same command again"
      ) from error


def _check_kinds(
  folder: epath.Path, item: str, saved: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
  """Refuses a checkpoint, whole as it may be, whose arrays are others than those that are wanted."""
  kinds = {leaf: digest.partition(":")[0] for leaf, digest in saved.items()}
  if differs := [
    leaf for leaf in sorted(kinds.keys() | wanted.keys()) if kinds.get(leaf) != wanted.get(leaf)
  ]:
    was, wants = (which.get(differs[0], "not there") for which in (kinds, wanted))
    raise UserError(
      f"the checkpoint in {str(folder)!r} is of another model or optimizer: {item}{differs[0]} is {was}, and by this config "
      f"{wants}; give it the config that it was made with, or name another workdir"
    )


def _rename(folder: epath.Path, step: int) -> epath.Path:
  count = 1
  while (aside := folder / f"{step}.damaged{'' if count == 1 else f'.{count}'}").exists():
    count += 1
  (folder / str(step)).rename(aside)
  return aside


def _cause(error: BaseException) -> str:
  """What the operating system said, where it was that; TensorStore puts it into the midst of its own message."""
  known = (
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
  )
  text = "".join(traceback.format_exception(error))
  return next((what for what in known if what in text), first_line(error)[:200])


def open_run(workdir: epath.PathLike, step: int | None = None) -> Checkpoints:
  """The folder of a run that holds `step`: its base model for step 0, else its checkpoints (None: the newest will do) or its best.

  Raises:
    UserError: no such checkpoint, with the steps that there are.
  """
  workdir = epath.Path(workdir)
  have = set()
  for name in (
    ["base"] if step == 0 else ["checkpoints"] if step is None else ["checkpoints", "best"]
  ):
    found = Checkpoints(workdir / name) if (workdir / name).is_dir() else None
    steps = found.steps() if found else []
    if step in steps or (step is None and steps):
      return found
    have |= {*steps}
  raise UserError(
    f"no checkpoint{'' if step is None else f' of step {step}'} in {str(workdir)!r}; steps there: "
    f"{', '.join(map(str, sorted(have))) or 'none'}"
  )


def run_params(
  workdir: epath.PathLike, model: Qwen2, step: int | None = None
) -> tuple[Params, int]:
  """The parameters of a run at `step` (None: the newest), and that step. Raises what `open_run` raises."""
  found = open_run(workdir, step)
  step = found.latest if step is None else step
  params = found.restore_params(model, step)
  found.close()
  return params, step
