"""The one place that looks up a config's model: a preset, a folder, or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from gtpo_jax.config.config import Config
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
  """The model that a config names.

  Attributes:
    folder: the local Hugging Face folder with weights and tokenizer; None for a preset.
    config: its architecture, in the run's number formats.
  """

  folder: Path | None
  config: ModelConfig


def resolve_model(config: Config) -> ResolvedModel:
  """Looks up a config's model, and downloads it if `model.path` is a hub id that is not cached.

  Raises:
    UserError: there is no such model, its architecture is not supported, or its context is too
      short for the config's prompts and completions.
  """
  if not config.model.path:
    return ResolvedModel(None, config.with_formats(PRESETS[config.model.preset]))
  folder = find(config.model.path)
  if (folder / "base").is_dir() or (folder / "checkpoints").is_dir():
    raise UserError(
      f"model.path = {config.model.path!r} is the workdir of a run; export its model first: "
      f"gtpo export --workdir={shlex.quote(config.model.path)} --out=FOLDER"
    )
  architecture = config.with_formats(read_config(folder, config.model.param_dtype))
  config.check_context(architecture)
  return ResolvedModel(folder, architecture)
