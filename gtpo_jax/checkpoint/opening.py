"""Opens the checkpoints of a run, and reads the architectures of the policies that a run needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from etils import epath

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import Config, resolve_model, with_compute_dtype
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import split_adapters
from gtpo_jax.models.number_formats import usable_compute_dtype
from gtpo_jax.models.params import Params, param_shardings
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import AUTO

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
  workdir: epath.PathLike, model: Transformer, step: int | None = None, base: Params | None = None
) -> tuple[Params, int]:
  """Restores the parameters of a run at `step` (None: the latest).

  `base` is what `frozen_params` would read, if it is in memory already.

  Returns:
    The parameters, laid out on `model`'s mesh, and their step.
  """
  checkpoints = open_run(workdir, step)
  step = checkpoints.latest if step is None else step
  path = lambda: load_config(epath.Path(workdir)).model.path
  params = checkpoints.restore_params(
    model, step, lambda: base or frozen_params(workdir, model, path())
  )
  checkpoints.close()
  return params, step


def frozen_params(workdir: epath.PathLike, model: Transformer, path: str) -> Params:
  """Returns the parameters that a run with adapters does not train.

  Args:
    workdir: the run's working directory.
    model: the run's model.
    path: the run's `model.path`; if empty, the run started from WORKDIR/base.
  """
  if path:
    return read_params(model, find(path))
  checkpoints = open_run(workdir, 0)
  _, frozen = split_adapters(checkpoints.restore_params(model, 0))
  checkpoints.close()
  return frozen


def usable_here(config: Config, device: Any = None) -> Config:
  """Returns a run's config for sampling here: what followed the devices of the run is open again.

  A run has recorded the format that "auto" meant on its devices, which this machine may have no
  units for, and how it stored a base under adapters.

  Args:
    config: the run's config.
    device: one of the devices to use, which need not be attached; None for the first attached one.
  """
  device = jax.devices()[0] if device is None else device
  config = with_compute_dtype(config, usable_compute_dtype(config.model.compute_dtype, device))
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, base_layout=AUTO),
    sampling=dataclasses.replace(config.sampling, merge_adapters=AUTO),
  )


def frozen_architecture(folder: Path, own: ModelConfig, device: Any = None) -> ModelConfig:
  """Returns the architecture of a policy's folder, in the formats in which a run reads it.

  Args:
    folder: a Hugging Face folder, or the workdir of a run that has a checkpoint.
    own: the architecture that the run trains. A Hugging Face folder is read in its compute dtype.
    device: as in `usable_here`.
  """
  if is_hf_folder(folder):
    return dataclasses.replace(
      read_config(folder, own.compute_dtype),
      remat=own.remat,
      matmul_precision=own.matmul_precision,
      attention=own.attention,
    )
  open_run(folder).close()
  return resolve_model(usable_here(load_config(folder), device), device).config


def teacher_architecture(
  config: Config, own: ModelConfig, device: Any = None
) -> ModelConfig | None:
  """Returns the architecture of the teacher; None without one.

  Args:
    config: the run's config.
    own, device: as in `frozen_architecture`.

  Raises:
    UserError: there is no such model or checkpoint, it is not supported, or its context is too
      short for the run's prompts and completions.
  """
  if config.teacher.policy:
    config.check_context(own, teacher=True)
    return own
  path = config.teacher.path
  if not path:
    return None
  try:
    architecture = frozen_architecture(find(path), own, device)
    config.check_context(architecture, teacher=True)
    return architecture
  except UserError as error:
    raise UserError(f"teacher.path = {path!r}: {error}") from error


def teacher_model(config: Config, model: Transformer) -> Transformer | None:
  """Returns the teacher's architecture on the mesh of the run's `model`; None without a teacher."""
  architecture = teacher_architecture(config, model.config, model.mesh.devices.flat[0])
  if architecture is None:
    return None
  teacher = Transformer(architecture, model.mesh)
  try:
    param_shardings(teacher)  # raises an error if the mesh does not fit the model
    attention_kind(architecture, model.mesh)  # or if the device does not support the model
  except UserError as error:
    raise UserError(f"teacher.path = {config.teacher.path!r}: {error}") from error
  return teacher
