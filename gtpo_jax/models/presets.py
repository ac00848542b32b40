"""Shapes of the Qwen2.5 family, and of the tiny model of the embedded task."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from gtpo_jax.runtime.errors import UserError, nearest

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PRECISIONS = ("default", "high", "highest")
REMAT = ("none", "attention", "full")
ATTENTION = ("", "blocks", "splash", "cudnn")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (2309.00071): rotary angles for contexts longer than those of pre-training, as Qwen2.5 documents it.

  Attributes:
    factor: by how much the context grows.
    original: positions of pre-training.
    beta_fast, beta_slow: rotations over `original` above which a feature is left alone, below which it is interpolated.
    attention_factor: scales cosines and sines; None for 0.1 ln(factor) + 1.
  """

  factor: float
  original: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None

  def __post_init__(self):
    attention = 1.0 if self.attention_factor is None else self.attention_factor
    finite = all(math.isfinite(x) for x in (self.factor, self.beta_fast, attention))
    ordered = (
      self.factor >= 1
      and self.original >= 1
      and self.beta_fast > self.beta_slow > 0
      and attention > 0
    )
    if not (finite and ordered):
      raise UserError(
        f"YaRN needs factor >= 1, original >= 1, beta_fast > beta_slow > 0, attention_factor > 0, all finite; got {self}"
      )


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters (2106.09685): W + (alpha / rank) A B, of which A and B alone are trained.

  Attributes:
    rank: columns of A, rows of B; 0 for no adapters.
    alpha: their scale is alpha / rank.
    targets: which matrices carry one, a part of q, k, v, o, gate, up, down.
  """

  rank: int = 0
  alpha: float = 32.0
  targets: tuple[str, ...] = LORA_TARGETS

  def __post_init__(self):
    if self.rank < 0:
      raise UserError(f"model.lora_rank must be at least 0, got {self.rank}")
    if not 0 < self.alpha < float("inf"):
      raise UserError(f"model.lora_alpha must be above 0 and finite, got {self.alpha}")
    if unknown := [target for target in self.targets if target not in LORA_TARGETS]:
      raise UserError(
        f"model.lora_targets names {unknown[0]!r}{nearest(unknown[0], LORA_TARGETS)}; valid are {', '.join(LORA_TARGETS)}"
      )
    if not self.targets:
      raise UserError("model.lora_targets is empty; name some of " + ", ".join(LORA_TARGETS))


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
    context: the most positions that the model was made for (`max_position_embeddings`; times YaRN's factor where there is one).
    yarn: rotary angles for longer contexts; None for plain ones.
    lora: adapters; rank 0 for none.
    param_dtype: format the parameters are kept in (the master weights).
    compute_dtype: format of activations and matrix products; norms, softmax and the head's statistics are float32.
    matmul_precision: "default", "high" or "highest", as `jax.lax.Precision`.
    remat: "full" recomputes each layer in the backward pass, "attention" all but what attention gave, "none" keeps all residuals.
    attention: how whole streams attend: "splash" (a TPU kernel), "cudnn" (a GPU kernel, 16 bits) or "blocks" (XLA); "" for what the
      platform is best at.
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
  context: int = 32768
  yarn: Yarn | None = None
  lora: Lora = Lora()
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"
  attention: str = ""

  def __post_init__(self):
    for name in (
      "vocab_size",
      "width",
      "layers",
      "heads",
      "kv_heads",
      "head_dim",
      "mlp",
      "context",
    ):
      if getattr(self, name) < 1:
        raise UserError(f"model.{name} must be at least 1, got {getattr(self, name)}")
    if self.heads % self.kv_heads:
      raise UserError(
        f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}"
      )
    if self.head_dim % 2:
      raise UserError(f"model.head_dim must be even for rotary positions, got {self.head_dim}")
    for name, valid in (
      ("param_dtype", DTYPES),
      ("compute_dtype", DTYPES),
      ("matmul_precision", PRECISIONS),
      ("remat", REMAT),
      ("attention", ATTENTION),
    ):
      if getattr(self, name) not in valid:
        raise UserError(
          f"model.{name} must be one of {', '.join(filter(None, valid))}; got {getattr(self, name)!r}"
        )

  @property
  def longest(self) -> int:
    """Positions that a sequence may have: prompt and completion together."""
    return (
      self.context
      if self.yarn is None
      else max(self.context, int(self.yarn.factor * self.yarn.original))
    )

  @property
  def matmul_params(self) -> int:
    """Parameters that take part in matrix products, the head included once: N of the 6 N FLOP a trained token."""
    attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
    return self.layers * (attention + 3 * self.width * self.mlp) + self.vocab_size * self.width


def _qwen(
  width: int,
  layers: int,
  heads: int,
  kv_heads: int,
  mlp: int,
  vocab_size: int = 152064,
  tied: bool = False,
  norm_eps: float = 1e-6,
) -> ModelConfig:
  return ModelConfig(
    vocab_size, width, layers, heads, kv_heads, head_dim=128, mlp=mlp, tied=tied, norm_eps=norm_eps
  )


PRESETS: dict[str, ModelConfig] = {
  "tiny": ModelConfig(
    vocab_size=384, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=384
  ),
  "qwen2.5-0.5b": ModelConfig(
    vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864
  ),
  "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, vocab_size=151936, tied=True),
  "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, vocab_size=151936, tied=True),
  "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944),
  "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, norm_eps=1e-5),
  "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, norm_eps=1e-5),
  "qwen2.5-72b": _qwen(8192, 80, 64, 8, 29568, norm_eps=1e-5),
}
