"""The configuration of a run."""

from gtpo_jax.config.files import default_config, difference, freeze, load
from gtpo_jax.config.sections import (
  DataSection,
  MeshSection,
  ModelSection,
  RewardSection,
  SamplingSection,
)
from gtpo_jax.config.whole import Config, flatten, to_dict

__all__ = [
  "Config",
  "DataSection",
  "MeshSection",
  "ModelSection",
  "RewardSection",
  "SamplingSection",
  "default_config",
  "difference",
  "flatten",
  "freeze",
  "load",
  "to_dict",
]
