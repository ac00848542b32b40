"""The architectures of the policies that a run reads but does not train, before they are loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from gtpo_jax.checkpoint.opening import open_run
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import Config, resolve_model, with_compute_dtype
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.formats.compute_dtype import usable_compute_dtype
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.params import param_shardings
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError


def usable_here(config: Config, device: Any = None) -> Config:
  """Returns a run's config, computing in another format if this machine has no units for its own.

  A run that learned on other devices has recorded what "auto" stood for there.

  Args:
    config: the run's config.
    device: one of the devices to use, which need not be attached; None for the first attached one.
  """
  device = jax.devices()[0] if device is None else device
  return with_compute_dtype(config, usable_compute_dtype(config.model.compute_dtype, device))


def frozen_architecture(folder: Path, own: ModelConfig, device: Any = None) -> ModelConfig:
  """Returns the architecture of a policy's folder, in the formats in which a run reads it.

  Args:
    folder: a Hugging Face folder, or the workdir of a run that has a checkpoint.
    own: the architecture that the run trains. A Hugging Face folder is read in its compute dtype.
    device: as in `usable_here`.

  Raises:
    UserError: there is no such model or checkpoint, or it is not supported.
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
  """Returns the teacher's architecture on the mesh of the run's `model`; None without a teacher.

  Raises:
    UserError: as `teacher_architecture`, or the mesh or its devices do not support the teacher.
  """
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
