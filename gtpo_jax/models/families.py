"""The model families that the transformer covers, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
MATRICES = ATTENTION + MLP


class Family(NamedTuple):
  """What the models of one `model_type` have in common.

  Attributes:
    architecture: the class in Transformers.
    qk_norm: whether queries and keys are normalised per head.
    biases: the matrices that always have a bias.
    optional_biases: by setting of config.json, the matrices that have a bias if it is true.
    context: `max_position_embeddings` if config.json has none.
    kv_heads: `num_key_value_heads` if config.json has none; None for the number of heads.
    head_dim: `head_dim` if config.json has none; None for the width divided by the heads.
    sliding_window: `sliding_window` if config.json has none; None if the family ignores it.
    settings: what config.json states to turn sliding windows off.
  """

  architecture: str
  qk_norm: bool = False
  biases: tuple[str, ...] = ()
  optional_biases: Mapping[str, tuple[str, ...]] = {}
  context: int = 32768
  kv_heads: int | None = None
  head_dim: int | None = None
  sliding_window: int | None = None
  settings: Mapping[str, Any] = {}


FAMILIES = {
  "qwen2": Family(  # Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen
    "Qwen2ForCausalLM", biases=("q", "k", "v"), kv_heads=32, settings={"use_sliding_window": False}
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    qk_norm=True,
    optional_biases={"attention_bias": ATTENTION},
    kv_heads=32,
    head_dim=128,
    settings={"use_sliding_window": False},
  ),
  "llama": Family(  # Llama 3, DeepSeek-R1-Distill-Llama, SmolLM2
    "LlamaForCausalLM", optional_biases={"attention_bias": ATTENTION, "mlp_bias": MLP}, context=2048
  ),
  "mistral": Family(
    "MistralForCausalLM",
    context=131072,
    kv_heads=8,
    sliding_window=4096,
    settings={"sliding_window": None},
  ),
}
