"""Checkpoints on Orbax: the state of a run, saved in the background, restored onto any mesh."""
from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from gtpo_jax.errors import RunError, UserError, first_line
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state


class Checkpoints:
  """A folder of numbered checkpoints, the newest `keep` of them.

  Parameters and optimizer are separate items, so that a sampler reads the parameters alone.
  """

  def __init__(self, folder: Path, keep: int = 1):
    for name in ("absl", "orbax"):  # their progress notes would break into the display
      logging.getLogger(name).setLevel(logging.ERROR)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
    self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

  @property
  def latest(self) -> int | None:
    """The newest step saved."""
    return self._manager.latest_step()

  def save(self, state: TrainState, leftovers: dict[str, np.ndarray] | None = None) -> None:
    """Begins to save the state, and what a step leaves to the next where it does; a save of the newest step again is skipped."""
    step = int(state.step)
    if step != self.latest:
      items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
      items |= {} if leftovers is None else {"leftovers": leftovers}
      self._manager.save(step, args=ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()}))

  def _read(self, step: int | None, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax, TensorStore and JSON each have their own
      raise RunError(f"the checkpoint of step {step} in {str(self._manager.directory)!r} cannot be read ({first_line(error)[:200]}); "
                     f"remove that step's folder to go back to the one before") from error

  def restore(self, model: Qwen2, optimizer: Optimizer) -> TrainState:
    """The newest state, laid out for `model`'s mesh."""
    like = abstract_state(model, optimizer)
    rest = {"step": like.step, "opt_state": like.opt_state}
    found = self._read(self.latest, params=ocp.args.StandardRestore(like.params), rest=ocp.args.StandardRestore(rest))
    return TrainState(params=found["params"], **found["rest"])

  def restore_leftovers(self, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """What the newest step left to the next, as host arrays."""
    empty = {name: np.zeros(x.shape, x.dtype) for name, x in like.items()}
    return self._read(self.latest, leftovers=ocp.args.StandardRestore(empty))["leftovers"]

  def restore_params(self, model: Qwen2, step: int | None = None) -> Params:
    """The parameters alone, of the newest step unless another is named."""
    step = self.latest if step is None else step
    return self._read(step, params=ocp.args.StandardRestore(abstract_params(model)))["params"]

  def save_params(self, params: Params) -> None:
    """Saves parameters alone, as step 0, and waits: for the base model."""
    self._manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    self.wait()

  def steps(self) -> list[int]:
    """The steps that can be restored."""
    return list(self._manager.all_steps())

  def wait(self) -> None:
    """Returns when what was begun is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and lets go of the folder."""
    self.wait()
    self._manager.close()


def open_run(workdir: Path, step: int | None = None) -> Checkpoints:
  """The folder of a run that holds `step`: its base model for step 0, its checkpoints else (None: the newest will do).

  Raises:
    UserError: no such checkpoint, with the steps that there are.
  """
  folder = workdir / ("base" if step == 0 else "checkpoints")
  found = Checkpoints(folder) if folder.is_dir() else None
  steps = found.steps() if found else []
  if not steps or (step is not None and step not in steps):
    have = ", ".join(map(str, steps)) or "none"
    raise UserError(f"no checkpoint{'' if step is None else f' of step {step}'} in {str(folder)!r}; steps there: {have}")
  return found


def run_params(workdir: Path, model: Qwen2, step: int | None = None) -> tuple[Params, int]:
  """The parameters of a run at `step` (None: the newest), and that step. Raises what `open_run` raises."""
  found = open_run(workdir, step)
  step = found.latest if step is None else step
  params = found.restore_params(model, step)
  found.close()
  return params, step
