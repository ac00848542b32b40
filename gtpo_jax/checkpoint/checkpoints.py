"""Checkpoints of a run: saved in the background, verified when read, for any mesh.

The checkpoints of a run with adapters do not hold its base model, which `SharedBase` keeps once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from gtpo_jax.checkpoint.integrity import DIGEST_DIGITS, digest_tree, leaf_types
from gtpo_jax.checkpoint.steps import SavedSteps, read_checkpoint
from gtpo_jax.models.lora import combine, split_adapters
from gtpo_jax.models.params import Params, abstract_params, stack_layers, stacked, unstack_layers
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import CorruptCheckpoint, RunError, UserError
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state

# Names of the items of a checkpoint on disk. Parameters and optimizer are separate items: a sampler
# reads only the parameters.
PARAMS = "params"
REST = "rest"  # {"step", "opt_state"}, and "entropy_coef" if it is adapted
LEFTOVERS = "leftovers"


class RestoredRun(NamedTuple):
  """The content of a run's checkpoint."""

  state: TrainState
  leftovers: dict[str, np.ndarray] | None  # completions that the next step will use
  metadata: dict[str, Any]  # other plain values that the next step depends on


class Checkpoints:
  """A folder of numbered checkpoints (`SavedSteps`).

  If the parameters have adapters, a checkpoint holds only these, and a digest of the base model.
  Methods that restore such a checkpoint take a function `base` that reads the base model; its
  result must have that digest. A folder of base models (`save_params(with_base=True)`) has both.

  Args:
    folder: contains one folder per step.
    keep: number of latest steps to keep. None opens the folder for reading only and leaves it
      unchanged.
  """

  def __init__(self, folder: epath.PathLike, keep: int | None = None):
    self._steps = SavedSteps(folder, keep)
    self._base = SharedBase(self._steps.path)

  @property
  def latest(self) -> int | None:
    """The latest step that is saved or being saved."""
    return self._steps.latest

  def steps(self) -> list[int]:
    """Returns the steps on disk, in ascending order."""
    return self._steps.steps()

  def save(
    self,
    state: TrainState,
    leftovers: dict[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    model: Transformer | None = None,
  ) -> None:
    """Starts saving a state with leftovers and metadata; see `RestoredRun`.

    Does nothing if the state's step is the latest one. On disk, layers are always stacked.

    Args:
      state, leftovers, metadata: what is saved.
      model: the architecture; None if its layers are stacked.

    Raises:
      RunError: this save or the previous one failed, for example because the disk is full.
    """
    step = int(state.step)
    if step == self.latest:
      return
    trained, metadata = self._base.leave_out(state.params, metadata or {}, model)
    opt_state = stack_layers(model, state.opt_state)
    items = {PARAMS: trained, REST: _rest_of(state.replace(opt_state=opt_state))}
    if leftovers is not None:
      items[LEFTOVERS] = leftovers
    self._steps.save(step, items, metadata)

  def save_params(
    self, params: Params, step: int = 0, with_base: bool = False, model: Transformer | None = None
  ) -> None:
    """Saves only parameters, and waits until they are on disk.

    Does nothing if `step` is the latest one.

    Args:
      params: the parameters.
      step: the step that they belong to.
      with_base: whether to save the base model as well if there are adapters.
      model: as in `save`.
    """
    if step != self.latest:
      if with_base:
        trained, metadata = stack_layers(model, params), {}
      else:
        trained, metadata = self._base.leave_out(params, {}, model)
      self._steps.save(step, {PARAMS: trained}, metadata)
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
    abstract = abstract_state(stacked(model), optimizer)
    targets = {PARAMS: params_target(model), REST: _rest_of(abstract), LEFTOVERS: None}
    found = self._steps.read_latest(targets, _check_step, say)
    if found is None:
      return None
    items, metadata = found
    params = self._base.add(model, items[PARAMS], metadata, base)
    state = TrainState(params=params, **items[REST])
    state = state.replace(opt_state=unstack_layers(model, state.opt_state))
    return RestoredRun(state, items.get(LEFTOVERS), metadata)

  def newest_params(
    self,
    model: Transformer,
    say: Callable[[str], None] = print,
    base: Callable[[], Params] | None = None,
  ) -> Params | None:
    """Restores only the parameters of the latest intact checkpoint, as `restore` does."""
    found = self._steps.read_latest({PARAMS: params_target(model)}, _check_step, say)
    if found is None:
      return None
    items, metadata = found
    return self._base.add(model, items[PARAMS], metadata, base)

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
      items, metadata = read_checkpoint(self._steps.folder(step), {PARAMS: params_target(model)})
    except CorruptCheckpoint as error:
      earlier = [other for other in self.steps() if other < step]
      raise RunError(
        f"the checkpoint of step {step} in {str(self._steps.path)!r} is damaged ({error}); "
        + (f"the one before is step {earlier[-1]}" if earlier else "there is none before it")
      ) from error
    return self._base.add(model, items[PARAMS], metadata, base)

  def wait(self) -> None:
    """Waits until the current save is on disk."""
    self._steps.wait()

  def close(self) -> None:
    """Waits as `wait` does, and closes the folder."""
    self._steps.close()


def _check_step(step: int, items: dict[str, Any]) -> None:
  """Raises CorruptCheckpoint if a checkpoint is in the folder of another step."""
  if REST in items and int(items[REST]["step"]) != step:
    raise CorruptCheckpoint(f"it contains step {int(items[REST]['step'])}")


def _rest_of(state: TrainState) -> dict[str, Any]:
  """Returns the training state without the parameters, as one item of a checkpoint."""
  rest = {"step": state.step, "opt_state": state.opt_state}
  return rest if state.entropy_coef is None else {**rest, "entropy_coef": state.entropy_coef}


# The key in a checkpoint's metadata of a digest of the base that its adapters were trained on.
BASE_DIGEST = "base"


def params_target(model: Transformer) -> Callable[[Mapping[str, str]], Params]:
  """Returns a function from the saved leaves of an item to the abstract parameters to restore.

  These are the adapters, or all parameters if the item holds the base model's too.
  """
  complete = abstract_params(stacked(model))
  adapters, base = split_adapters(complete)

  def choose(saved: Mapping[str, str]) -> Params:
    if adapters and saved.keys().isdisjoint(leaf_types(base)):
      return adapters
    return complete

  return choose


def digest_base(base: Params, model: Transformer | None = None) -> str:
  """Returns a digest of a base model that is the same on every mesh and with layers apart.

  Embeddings, norms and biases identify the model. Matrices are left out: a run may quantise them,
  and platforms round differently.
  """
  kept = {path: x for path, x in flatten_dict(base).items() if not path[-1].startswith("kernel")}
  kept = flatten_dict(stack_layers(model, unflatten_dict(kept)))
  return digest_tree(kept)[:DIGEST_DIGITS]


class SharedBase:
  """Leaves the base model out of the checkpoints in a folder, and adds it when they are read.

  Its digest is computed once, because it never changes.

  Args:
    folder: the folder of checkpoints, for messages.
  """

  def __init__(self, folder: epath.Path):
    self._folder = folder
    self._digest = ""

  def leave_out(
    self, params: Params, metadata: Mapping[str, Any], model: Transformer | None
  ) -> tuple[Params, Mapping[str, Any]]:
    """Returns the parameters that a checkpoint holds, and its metadata; see `Checkpoints.save`."""
    adapters, base = split_adapters(params)
    if not adapters:
      return params, metadata
    self._digest = self._digest or digest_base(base, model)
    return stack_layers(model, adapters), {**metadata, BASE_DIGEST: self._digest}

  def add(
    self,
    model: Transformer,
    params: Params,
    metadata: Mapping[str, Any],
    read_base: Callable[[], Params] | None,
  ) -> Params:
    """Adds the base model to adapters that were saved without it."""
    params = unstack_layers(model, params)
    if not model.config.lora.rank or split_adapters(params)[1]:
      return params
    if read_base is None:
      raise ValueError("these checkpoints hold only adapters; pass base= to restore")
    base = read_base()
    self._digest = digest_base(base, model)
    if self._digest != metadata[BASE_DIGEST]:
      raise UserError(
        f"the adapters in {str(self._folder)!r} were trained on another base model: its "
        f"digest was {metadata[BASE_DIGEST]}, now it is {self._digest}; restore the folder "
        "that model.path names, and model.param_dtype"
      )
    return combine(params, base)
