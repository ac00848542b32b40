"""The configuration of a run."""

from gtpo_jax.config.config_files import (
  default_config,
  difference,
  freeze,
  freeze_recorded,
  load,
  load_config,
  override,
)
from gtpo_jax.config.data_sections import DataSection, EnvSection, RewardSection
from gtpo_jax.config.resolve import (
  ResolvedModel,
  recorded_routes,
  resolve_model,
  with_compute_dtype,
  with_date,
)
from gtpo_jax.config.run_config import Config, flatten, resolved_dict, to_dict
from gtpo_jax.config.sections import AlgorithmSection, MeshSection, ModelSection, SamplingSection

__all__ = [
  "AlgorithmSection",
  "Config",
  "DataSection",
  "EnvSection",
  "MeshSection",
  "ModelSection",
  "ResolvedModel",
  "RewardSection",
  "SamplingSection",
  "default_config",
  "difference",
  "flatten",
  "freeze",
  "freeze_recorded",
  "load",
  "load_config",
  "override",
  "recorded_routes",
  "resolve_model",
  "resolved_dict",
  "to_dict",
  "with_compute_dtype",
  "with_date",
]
