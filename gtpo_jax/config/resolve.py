"""The one place that looks up a config's model: a preset, a folder, or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import jax

from gtpo_jax.config.read_settings import check_router
from gtpo_jax.config.run_config import Config
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.experts.routing import RouteShape
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find
from gtpo_jax.models.number_formats import compute_dtype_for
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
  """The model that a config names."""

  folder: Path | None  # the local Hugging Face folder with weights and tokenizer; None for a preset
  config: ModelConfig  # its architecture, in the run's number formats
  compute_dtype_reason: str  # completes "computing in FORMAT, because ..."


def resolve_model(config: Config, device: Any = None) -> ResolvedModel:
  """Looks up a config's model, and downloads it if `model.path` is a hub id that is not cached.

  Args:
    config: the run's config.
    device: one of the run's devices, which need not be attached; None for the first attached one.

  Raises:
    UserError: there is no such model, its architecture is not supported, or its context is too
      short for the config's prompts and completions.
  """
  folder = _find_folder(config.model.path) if config.model.path else None
  architecture = _architecture(config, folder)
  device = jax.devices()[0] if device is None else device
  dtype, reason = compute_dtype_for(config.model.compute_dtype, device, architecture.width)
  architecture = config.model.with_formats(architecture, dtype)
  if folder:
    config.check_context(architecture)
    check_router(config, architecture)
  return ResolvedModel(folder, architecture, reason)


def recorded_routes(config: Config) -> RouteShape | None:
  """Returns the shape of the choices of experts that are recorded; None without experts."""
  folder = _find_folder(config.model.path) if config.model.path else None
  return RouteShape.of(_architecture(config, folder))


def _architecture(config: Config, folder: Path | None) -> ModelConfig:
  if folder:
    return read_config(folder, config.model.param_dtype)
  return PRESETS[config.model.preset]


def with_date(config: Config, date: str) -> Config:
  """Returns the config with the day that chat templates call today."""
  return dataclasses.replace(config, data=dataclasses.replace(config.data, date=date))


def with_compute_dtype(config: Config, dtype: str) -> Config:
  """Returns the config with the format that its `model.compute_dtype` stands for."""
  return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def _find_folder(path: str) -> Path:
  folder = find(path)
  base = Path(path).name == "base" and not (folder / "config.json").exists()
  workdir = folder.parent if base else folder
  if any((workdir / name).is_dir() for name in ("base", "checkpoints")):
    what = "the base model of a run" if base else "the workdir of a run"
    step = " --step=0" if base else ""
    raise UserError(
      f"model.path = {path!r} is {what}; export its model first: "
      f"gtpo export --workdir={shlex.quote(str(workdir))}{step} --out=FOLDER"
    )
  return folder
