"""Published models by name, and the tiny models of the built-in task."""

from __future__ import annotations

import dataclasses
from typing import Any

from gtpo_jax.models.attention.rope import Linear, Llama3Scaling, Yarn
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.kinds import DELTA, DeltaSizes, LayerKind, Mixture


def _model(
  vocab_size: int, width: int, layers: int, heads: int, kv_heads: int, mlp: int, **features: Any
) -> ModelConfig:
  """Returns an architecture whose output head is not tied and whose heads have 128 features."""
  features = {"head_dim": 128, "tied": False, **features}
  return ModelConfig(vocab_size, width, layers, heads, kv_heads, mlp=mlp, **features)


def _qwen3(*sizes: int, tied: bool = False) -> ModelConfig:
  return _model(151936, *sizes, tied=tied, context=40960, biases=(), model_type="qwen3")


def _llama3(*sizes: int, factor: float | None = None, **features: Any) -> ModelConfig:
  """Returns a Llama 3. Without a `factor` it is one of version 3.0, whose RoPE is not scaled."""
  scaling = factor and Llama3Scaling(factor, 8192, 1.0, 4.0)
  features |= {"rope_theta": 5e5, "norm_eps": 1e-5, "rope_scaling": scaling}
  context = 131072 if factor else 8192
  return _model(128256, *sizes, context=context, biases=(), model_type="llama", **features)


def _mistral(*sizes: int) -> ModelConfig:
  return _model(*sizes, norm_eps=1e-5, biases=(), model_type="mistral")


def _gemma3(*sizes: int, window: int, **features: Any) -> ModelConfig:
  """Returns a Gemma 3: five layers with a window and angles of their own, then a full one."""
  kinds = (LayerKind(window, rope_theta=1e4),) * 5 + (LayerKind(),)
  features = {"head_dim": 256, "query_scalar": 256.0, "context": 131072} | features
  return _model(*sizes, tied=True, biases=(), model_type="gemma3_text", kinds=kinds, **features)


def _qwen3_5(*sizes: int, value_heads: int, tied: bool = False) -> ModelConfig:
  """Returns the text model of a Qwen3.5: three gated delta nets, then a layer with attention."""
  features = {
    "head_dim": 256,
    "rope_theta": 1e7,
    "rope_share": 0.25,
    "context": 262144,
    "kinds": (LayerKind(mixer=DELTA),) * 3 + (LayerKind(),),
    "delta": DeltaSizes(16, value_heads, 128, 128, 4),
  }
  return _model(248320, *sizes, tied=tied, biases=(), model_type="qwen3_5_text", **features)


def _olmo2(*sizes: int, context: int = 4096) -> ModelConfig:
  return _model(100352, *sizes, rope_theta=5e5, context=context, biases=(), model_type="olmo2")


def _mixture(
  model_type: str, *sizes: int, mixture: Mixture, biases: tuple[str, ...] = (), **features: Any
) -> ModelConfig:
  """Returns a model with a mixture of experts in each layer."""
  kinds = (LayerKind(mlp="experts"),)
  features |= {"model_type": model_type, "kinds": kinds, "mixture": mixture, "biases": biases}
  return _model(*sizes, **features)


TINY = ModelConfig(vocab_size=384, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=352)
# As TINY, but its MLPs are experts of which three compute a token, of the same size together.
TINY_MOE = dataclasses.replace(
  TINY,
  model_type="qwen2_moe",
  kinds=(LayerKind(mlp="experts"),),
  mixture=Mixture(experts=8, per_token=2, mlp=88, normalised=True, shared=176),
)
# A Qwen3.5 of the size of TINY: three gated delta nets, then a layer with attention.
TINY_DELTA = dataclasses.replace(
  TINY,
  model_type="qwen3_5_text",
  biases=(),
  layers=4,
  mlp=152,
  rope_share=0.25,
  kinds=(LayerKind(mixer=DELTA),) * 3 + (LayerKind(),),
  delta=DeltaSizes(key_heads=4, value_heads=4, key_dim=32, value_dim=32, taps=4),
)
QWEN2_5 = {
  "0.5b": _model(151936, 896, 24, 14, 2, 4864, head_dim=64, tied=True),
  "1.5b": _model(151936, 1536, 28, 12, 2, 8960, tied=True),
  "3b": _model(151936, 2048, 36, 16, 2, 11008, tied=True),
  "7b": _model(152064, 3584, 28, 28, 4, 18944),
  "14b": _model(152064, 5120, 48, 40, 8, 13824, norm_eps=1e-5),
  "32b": _model(152064, 5120, 64, 40, 8, 27648, norm_eps=1e-5),
  "72b": _model(152064, 8192, 80, 64, 8, 29568, norm_eps=1e-5),
}
MATH = {"context": 4096, "rope_theta": 1e4}  # Qwen2.5-Math
R1_DISTILL = {"context": 131072, "tied": False}
LLAMA_3_1_8B = _llama3(4096, 32, 32, 8, 14336, factor=8.0)
LLAMA_3_1_70B = _llama3(8192, 80, 64, 8, 28672, factor=8.0)

PRESETS: dict[str, ModelConfig] = {
  "tiny": TINY,
  "tiny-moe": TINY_MOE,
  "tiny-delta": TINY_DELTA,
  **{f"qwen2.5-{size}": model for size, model in QWEN2_5.items()},
  **{
    f"qwen2.5-math-{size}": dataclasses.replace(QWEN2_5[size], **MATH)
    for size in ("1.5b", "7b", "72b")
  },
  "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
  "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
  "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
  "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
  "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
  "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
  "qwen3-30b-a3b": _mixture(
    "qwen3_moe",
    *(151936, 2048, 48, 32, 4, 6144),
    context=40960,
    mixture=Mixture(128, 8, 768, normalised=True),
  ),
  "qwen3-235b-a22b": _mixture(
    "qwen3_moe",
    *(151936, 4096, 94, 64, 4, 12288),
    context=40960,
    mixture=Mixture(128, 8, 1536, normalised=True),
  ),
  "qwen1.5-moe-a2.7b": _mixture(
    "qwen2_moe",
    *(151936, 2048, 24, 16, 16, 5632),
    context=8192,
    biases=("q", "k", "v"),
    mixture=Mixture(60, 4, 1408, shared=5632),
  ),
  "olmoe-1b-7b": _mixture(
    "olmoe",
    *(50304, 2048, 16, 16, 16, 1024),
    context=4096,
    rope_theta=1e4,
    norm_eps=1e-5,
    mixture=Mixture(64, 8, 1024),
  ),
  "qwen3.5-0.8b": _qwen3_5(1024, 24, 8, 2, 3584, value_heads=16, tied=True),
  "qwen3.5-2b": _qwen3_5(2048, 24, 8, 2, 6144, value_heads=16, tied=True),
  "qwen3.5-4b": _qwen3_5(2560, 32, 16, 4, 9216, value_heads=32, tied=True),
  "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 12288, value_heads=32),
  "qwen3.5-27b": _qwen3_5(5120, 64, 24, 4, 17408, value_heads=48),
  "llama-3-8b": _llama3(4096, 32, 32, 8, 14336),
  "llama-3-70b": _llama3(8192, 80, 64, 8, 28672),
  "llama-3.1-8b": LLAMA_3_1_8B,
  "llama-3.1-70b": LLAMA_3_1_70B,
  "llama-3.2-1b": _llama3(2048, 16, 32, 8, 8192, factor=32.0, head_dim=64, tied=True),
  "llama-3.2-3b": _llama3(3072, 28, 24, 8, 8192, factor=32.0, tied=True),
  "llama-3.3-70b": LLAMA_3_1_70B,
  "mistral-7b-v0.2": _mistral(32000, 4096, 32, 32, 8, 14336),
  "mistral-7b-v0.3": _mistral(32768, 4096, 32, 32, 8, 14336),
  "gemma-3-270m": _gemma3(262144, 640, 18, 4, 1, 2048, window=512, context=32768),
  "gemma-3-1b": _gemma3(262144, 1152, 26, 4, 1, 6912, window=512, context=32768),
  "gemma-3-4b": _gemma3(262208, 2560, 34, 8, 4, 10240, window=1024, rope_scaling=Linear(8.0)),
  "smollm3-3b": _model(
    128256,
    *(2048, 36, 16, 4, 11008),
    tied=True,
    rope_theta=5e6,
    context=65536,
    biases=(),
    model_type="smollm3",
    kinds=(LayerKind(),) * 3 + (LayerKind(rotates=False),),
  ),
  "olmo-2-1b": _olmo2(2048, 16, 16, 16, 8192),
  "olmo-2-7b": _olmo2(4096, 32, 32, 32, 11008),
  "olmo-3-7b": _model(  # three layers with a window of 4,096, then a full one with YaRN
    100278,
    *(4096, 32, 32, 32, 11008),
    context=65536,
    biases=(),
    model_type="olmo3",
    rope_theta=5e5,
    rope_scaling=Yarn(8.0, 8192, attention_factor=1.2079441541679836),
    kinds=(LayerKind(4096, rope_theta=5e5),) * 3 + (LayerKind(),),
  ),
  # The first two were distilled into Qwen2.5-Math, whose base of the rotary angles they keep.
  "r1-distill-qwen-1.5b": dataclasses.replace(QWEN2_5["1.5b"], rope_theta=1e4, **R1_DISTILL),
  "r1-distill-qwen-7b": dataclasses.replace(QWEN2_5["7b"], rope_theta=1e4, **R1_DISTILL),
  "r1-distill-qwen-14b": dataclasses.replace(QWEN2_5["14b"], **R1_DISTILL),
  "r1-distill-qwen-32b": dataclasses.replace(QWEN2_5["32b"], **R1_DISTILL),
  "r1-distill-llama-8b": LLAMA_3_1_8B,
  "r1-distill-llama-70b": LLAMA_3_1_70B,
}
