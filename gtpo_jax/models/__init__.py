"""The model: its architecture, its parameters, and Hugging Face folders."""

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.hf.load import load
from gtpo_jax.models.hf.save import save, save_adapter
from gtpo_jax.models.params import abstract_params, init_params, param_shardings
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.transformer import Transformer

__all__ = [
  "PRESETS",
  "ModelConfig",
  "Transformer",
  "abstract_params",
  "init_params",
  "load",
  "param_shardings",
  "save",
  "save_adapter",
]
