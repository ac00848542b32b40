"""Shapes of the Qwen2.5 family, and of the tiny model of the embedded task."""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from gtpo_jax.errors import UserError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PRECISIONS = ("default", "high", "highest")
REMAT = ("none", "full")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen2.5 architecture and the number formats it runs in.

  Attributes:
    vocab_size: rows of the embedding.
    width: features of the residual stream (`hidden_size`).
    layers: transformer blocks.
    heads: query heads.
    kv_heads: key/value heads; each serves `heads // kv_heads` query heads.
    head_dim: features of one head, even.
    mlp: features of the gated MLP (`intermediate_size`).
    tied: the output head is the embedding.
    rope_theta: base of the rotary angles.
    norm_eps: added to the mean square in RMSNorm.
    param_dtype: format the parameters are kept in (the master weights).
    compute_dtype: format of activations and matrix products; norms, softmax and the head's statistics are float32.
    matmul_precision: "default", "high" or "highest", as `jax.lax.Precision`.
    remat: "full" recomputes each layer in the backward pass, "none" keeps its residuals.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  tied: bool = True
  rope_theta: float = 1e6
  norm_eps: float = 1e-6
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"

  def __post_init__(self):
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp"):
      if getattr(self, name) < 1:
        raise UserError(f"model.{name} must be at least 1, got {getattr(self, name)}")
    if self.heads % self.kv_heads:
      raise UserError(f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}")
    if self.head_dim % 2:
      raise UserError(f"model.head_dim must be even for rotary positions, got {self.head_dim}")
    for name, valid in (("param_dtype", DTYPES), ("compute_dtype", DTYPES), ("matmul_precision", PRECISIONS), ("remat", REMAT)):
      if getattr(self, name) not in valid:
        raise UserError(f"model.{name} must be one of {', '.join(valid)}; got {getattr(self, name)!r}")

  @property
  def matmul_params(self) -> int:
    """Parameters that take part in matrix products, the head included once: N of the 6 N FLOP a trained token."""
    attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
    return self.layers * (attention + 3 * self.width * self.mlp) + self.vocab_size * self.width


def _qwen(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab_size: int = 152064, tied: bool = False,
          norm_eps: float = 1e-6) -> ModelConfig:
  return ModelConfig(vocab_size, width, layers, heads, kv_heads, head_dim=128, mlp=mlp, tied=tied, norm_eps=norm_eps)


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(vocab_size=384, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=384),
    "qwen2.5-0.5b": ModelConfig(vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, vocab_size=151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, vocab_size=151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, norm_eps=1e-5),
    "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, norm_eps=1e-5),
    "qwen2.5-72b": _qwen(8192, 80, 64, 8, 29568, norm_eps=1e-5),
}
