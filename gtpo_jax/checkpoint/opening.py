"""Opens the checkpoints of a run, including its base model, by step number."""

from __future__ import annotations

from etils import epath

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.models.hf.folder import find
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import split_adapters
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError

BASE = "base"  # the initial model, as step 0
REGULAR = "checkpoints"  # every `checkpoint.every` steps
BEST = "best"  # the parameters of the best evaluation so far


def open_run(workdir: epath.PathLike, step: int | None = None) -> Checkpoints:
  """Opens the checkpoint folder of a run that contains `step`.

  Args:
    workdir: the run's working directory.
    step: 0 opens the base model; any other step is looked up in the regular checkpoints, then in
      the best one; None opens the regular checkpoints, which must not be empty.

  Raises:
    UserError: there is no such checkpoint. The message lists the available steps.
  """
  workdir = epath.Path(workdir)
  if step is None:
    names = [REGULAR]
  elif step == 0:
    names = [BASE]
  else:
    names = [REGULAR, BEST]
  available = set()
  for name in names:
    if not (workdir / name).is_dir():
      continue
    checkpoints = Checkpoints(workdir / name)
    steps = checkpoints.steps()
    if step in steps or (step is None and steps):
      return checkpoints
    available.update(steps)
  wanted = "" if step is None else f" of step {step}"
  listed = ", ".join(map(str, sorted(available))) or "none"
  raise UserError(f"no checkpoint{wanted} in {str(workdir)!r}; available steps: {listed}")


def run_params(
  workdir: epath.PathLike, model: Transformer, step: int | None = None
) -> tuple[Params, int]:
  """Restores the parameters of a run at `step` (None: the latest).

  Returns:
    The parameters, laid out on `model`'s mesh, and their step.

  Raises:
    UserError: there is no such checkpoint, or it belongs to another model.
    RunError: the checkpoint is damaged.
  """
  checkpoints = open_run(workdir, step)
  step = checkpoints.latest if step is None else step
  path = lambda: load_config(epath.Path(workdir)).model.path
  params = checkpoints.restore_params(model, step, lambda: frozen_params(workdir, model, path()))
  checkpoints.close()
  return params, step


def frozen_params(workdir: epath.PathLike, model: Transformer, path: str) -> Params:
  """Returns the parameters that a run with adapters does not train.

  Args:
    workdir: the run's working directory.
    model: the run's model.
    path: the run's `model.path`; if empty, the run started from WORKDIR/base.

  Raises:
    UserError: the model's folder is missing or damaged.
    RunError: the checkpoint in WORKDIR/base is damaged.
  """
  if path:
    return read_params(model, find(path))
  checkpoints = open_run(workdir, 0)
  _, frozen = split_adapters(checkpoints.restore_params(model, 0))
  checkpoints.close()
  return frozen
