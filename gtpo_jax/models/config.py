"""Model architectures: sizes, rotary settings, adapters and number formats."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from gtpo_jax.runtime.errors import UserError, did_you_mean

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PRECISIONS = ("default", "high", "highest")
REMAT = ("none", "attention", "full")
ATTENTION = ("", "blocks", "splash", "cudnn")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (2309.00071): rotary angles for contexts longer than those of pre-training.

  Qwen2.5's documentation recommends it for long inputs.

  Attributes:
    factor: ratio of the new context length to the original one.
    original: context length of pre-training, in positions.
    beta_fast: features with more rotations over `original` positions keep their frequency.
    beta_slow: features with fewer rotations have their frequency divided by `factor`.
    attention_factor: scale of the cosines and sines; None for 0.1 ln(factor) + 1.
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
        "YaRN needs factor >= 1, original >= 1, beta_fast > beta_slow > 0, attention_factor > 0, "
        f"all finite; got {self}"
      )


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters (2106.09685): W + (alpha / rank) A B. Only A and B are trained.

  Attributes:
    rank: columns of A and rows of B; 0 for no adapters.
    alpha: the adapters are scaled by alpha / rank.
    targets: the matrices that have an adapter, a subset of q, k, v, o, gate, up, down.
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
        f"model.lora_targets names {unknown[0]!r}{did_you_mean(unknown[0], LORA_TARGETS)}; "
        f"valid are {', '.join(LORA_TARGETS)}"
      )
    if not self.targets:
      raise UserError("model.lora_targets is empty; name some of " + ", ".join(LORA_TARGETS))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Qwen2.5 architecture and its number formats.

  Attributes:
    vocab_size: rows of the embedding.
    width: features of the residual stream (`hidden_size`).
    layers: number of transformer blocks.
    heads: number of query heads.
    kv_heads: number of key/value heads; each serves `heads // kv_heads` query heads.
    head_dim: features of one head, an even number.
    mlp: features of the gated MLP (`intermediate_size`).
    tied: whether the embedding is also the output head.
    rope_theta: base of the rotary angles.
    norm_eps: constant added to the mean square in RMSNorm.
    context: positions that the model was trained for (`max_position_embeddings`).
    yarn: rotary angles for longer contexts; None for plain angles.
    lora: adapters; rank 0 for none.
    param_dtype: format of the stored parameters (the master weights).
    compute_dtype: format of activations and matrix products. Norms, softmax and the statistics of
      the output head are float32.
    matmul_precision: "default", "high" or "highest", as in `jax.lax.Precision`.
    remat: "full" recomputes each layer in the backward pass, "attention" recomputes everything but
      the attention outputs, "none" stores all intermediate results.
    attention: kernel for full sequences: "splash" (TPU), "cudnn" (GPU, 16 bits) or "blocks"
      (XLA); "" selects the fastest one for the platform.
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
      value = getattr(self, name)
      if value not in valid:
        names = ", ".join(filter(None, valid))
        raise UserError(f"model.{name} must be one of {names}; got {value!r}")

  @property
  def max_length(self) -> int:
    """The most positions of a sequence, prompt and completion together."""
    if self.yarn is None:
      return self.context
    return max(self.context, int(self.yarn.factor * self.yarn.original))
