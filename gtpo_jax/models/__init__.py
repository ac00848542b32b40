"""The Qwen2.5 model: its architecture, its parameters, and Hugging Face folders."""

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.load import load
from gtpo_jax.models.params import abstract_params, init_params, param_shardings
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.models.save import save, save_adapter

__all__ = [
  "PRESETS",
  "ModelConfig",
  "Qwen2",
  "abstract_params",
  "init_params",
  "load",
  "param_shardings",
  "save",
  "save_adapter",
]
