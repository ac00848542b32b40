"""Model architectures: sizes, rotary settings, adapters and number formats."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from gtpo_jax.models.attention.rope import RopeScaling
from gtpo_jax.models.families import FAMILIES, MATRICES, MLP, Family
from gtpo_jax.models.kinds import ATTENTION as ATTENTION_MIXER
from gtpo_jax.models.kinds import (
  DELTA,
  DeltaSizes,
  LayerKind,
  LayerPlace,
  Mixture,
  Stack,
  places_of,
  shortest_pattern,
  stacks_of,
)
from gtpo_jax.models.number_formats import FORMATS
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.fields import ABOVE_0, Checked, at_least, setting

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PRECISIONS = ("default", "high", "highest")
BASE_LAYOUTS = ("stacked", "apart")
REMAT = ("none", "products", "attention", "full")
ATTENTION = ("", "blocks", "splash", "cudnn")
EXPERTS = "experts"
LORA_TARGETS = MATRICES
ALL_LORA_TARGETS = (*LORA_TARGETS, EXPERTS)


@dataclasses.dataclass(frozen=True)
class Lora(Checked):
  """Low-rank adapters (2106.09685): W + (alpha / rank) A B. Only A and B are trained.

  Attributes:
    rank: columns of A and rows of B; 0 for no adapters.
    alpha: the adapters are scaled by alpha / rank.
    targets: the matrices that have an adapter, a subset of q, k, v, o, gate, up, down, experts.
      gate, up and down are those of dense MLPs and of shared experts; experts are all matrices of
      all other experts. In gated delta nets, each of q, k and v stands for all matrices that read
      the residual stream, and o for the one that adds to it.
  """

  prefix: ClassVar[str] = "model.lora_"

  rank: int = setting(0, bound=at_least(0))
  alpha: float = setting(32.0, bound=ABOVE_0)
  targets: tuple[str, ...] = LORA_TARGETS

  def __post_init__(self):
    super().__post_init__()
    if unknown := [target for target in self.targets if target not in ALL_LORA_TARGETS]:
      raise UserError(
        f"model.lora_targets names {unknown[0]!r}{did_you_mean(unknown[0], ALL_LORA_TARGETS)}; "
        f"valid are {', '.join(ALL_LORA_TARGETS)}"
      )
    if not self.targets:
      raise UserError("model.lora_targets is empty; name some of " + ", ".join(ALL_LORA_TARGETS))

  @property
  def scale(self) -> float:
    """The factor of the product of A and B."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """An architecture and its number formats. The defaults of its features are Qwen2.5's.

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
    rope_scaling: changes the rotary angles for longer contexts; None for plain angles.
    rope_share: the share of the features of a head that are rotated, the first ones.
    kinds: the pattern of layers, which repeats; it is stored in its shortest form.
    delta: the sizes of gated delta nets; None if no layer is one.
    mixture: the experts of layers that have them; None if all MLPs are dense.
    clip_qkv: the largest magnitude of queries, keys and values; None for any.
    query_scalar: attention scores are divided by its square root; None for `head_dim`.
    biases: the matrices that have a bias, a subset of q, k, v, o, gate, up, down.
    model_type: the family, a key of `FAMILIES`; exports name it.
    lora: adapters; rank 0 for none.
    quantize: format of the base matrices under adapters, "int8" or "int4"; "" for `param_dtype`.
    param_dtype: format of the stored parameters (the master weights).
    compute_dtype: format of activations and matrix products. Norms, softmax and the statistics of
      the output head are float32.
    matmul_precision: "default", "high" or "highest", as in `jax.lax.Precision`.
    remat: what the backward pass recomputes: "full" each layer, "attention" everything but the
      attention outputs, "products" what is cheap beside attention and matrix products, "none"
      nothing. "none" unrolls the layers, because a loop over them would copy what it stores.
    attention: kernel for full sequences: "splash" (TPU), "cudnn" (GPU, 16 bits) or "blocks"
      (XLA); "" selects the fastest one for the platform.
    apart: whether each layer's parameters are arrays of their own rather than stacked. Sampler and
      update then read the same arrays of a frozen base, whose matrices are in `compute_dtype`.
    router_replay: whether the trainer computes tokens with the experts that the sampler chose.
    router_balance: the weight of the load-balancing loss of the routers.
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
  rope_scaling: RopeScaling | None = None
  rope_share: float = 1.0
  kinds: tuple[LayerKind, ...] = (LayerKind(),)
  delta: DeltaSizes | None = None
  query_scalar: float | None = None
  mixture: Mixture | None = None
  clip_qkv: float | None = None
  biases: tuple[str, ...] = ("q", "k", "v")
  model_type: str = "qwen2"
  lora: Lora = Lora()
  quantize: str = ""
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"
  attention: str = ""
  apart: bool = False
  router_replay: bool = True
  router_balance: float = 0.0

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
    if self.rotated % 2 or self.head_dim % 2 or not 0 < self.rotated <= self.head_dim:
      share = "" if self.rope_share == 1 else f", of which {self.rope_share} are rotated"
      raise UserError(
        f"model.head_dim must be even for rotary positions, got {self.head_dim}{share}"
      )
    for name, valid in (
      ("param_dtype", DTYPES),
      ("compute_dtype", DTYPES),
      ("matmul_precision", PRECISIONS),
      ("remat", REMAT),
      ("attention", ATTENTION),
      ("quantize", ("", *FORMATS)),
    ):
      value = getattr(self, name)
      if value not in valid:
        names = ", ".join(filter(None, valid))
        raise UserError(f"model.{name} must be one of {names}; got {value!r}")
    object.__setattr__(self, "kinds", shortest_pattern(self.layer_kinds))
    self._check_family()

  def _check_family(self) -> None:
    """Raises UserError if no model of `model_type` has these features."""
    if self.model_type not in FAMILIES:
      raise UserError(
        f"unknown model_type {self.model_type!r}{did_you_mean(self.model_type, FAMILIES)}; "
        f"supported are {', '.join(FAMILIES)}"
      )
    family = self.family
    optional = family.optional_biases.values()
    rest = set(self.biases) - set(family.biases)
    for matrices in optional:
      if rest.issuperset(matrices):
        rest -= set(matrices)
    if rest or not set(self.biases).issuperset(family.biases):
      choices = [", ".join(names) for names in (family.biases, *optional) if names]
      raise UserError(
        f"{self.model_type} models have biases in {' and/or '.join(choices) or 'no matrix'}; "
        f"got {', '.join(self.biases) or 'none'}"
      )
    if self.query_scalar and "query_pre_attn_scalar" not in family.defaults:
      raise UserError(f"{self.model_type} models have no query_scalar, got {self.query_scalar}")
    if EXPERTS in self.lora.targets and self.mixture is None:
      raise UserError("model.lora_targets names experts, but the model has none")
    dense = self.mixture is None or self.mlps != (self.mixture.mlp,)
    missing = set() if dense else set(MLP)
    if self.lora.rank and missing.issuperset(self.lora.targets):
      raise UserError(
        f"model.lora_targets names only {', '.join(self.lora.targets)}, but all MLPs of the model "
        "are experts; add experts"
      )
    if self.clip_qkv and "clip_qkv" not in family.keys:
      raise UserError(f"{self.model_type} models have no clip_qkv, got {self.clip_qkv}")
    self._check_kinds(family)

  def _check_kinds(self, family: Family) -> None:
    """Raises UserError if the config.json of no model of the family can state the pattern."""
    attention = {(kind.window, kind.rope_theta) for kind in self.kinds}
    own = attention - {(None, None)}
    mlps = {kind.mlp for kind in self.kinds}
    has_delta = any(kind.mixer == DELTA for kind in self.kinds)
    if (EXPERTS in mlps) != (self.mixture is not None):
      raise UserError(
        f"layers with experts need a mixture, and only they: got {self.kinds} and {self.mixture}"
      )
    if (
      len(own) > 1
      or (own and not family.has_windows)
      or (len(attention) > 1 and not family.full_interval)
      or (EXPERTS in mlps and not family.expert_mlp)
      or ("dense" in mlps and family.expert_mlp and "mlp_only_layers" not in family.keys)
      or (self.mixture and self.mixture.shared and not family.shared_mlp)
      or (any(theta for _, theta in own) and not family.local_theta)
      or (not all(kind.rotates for kind in self.kinds) and not family.no_rope_interval)
      or (has_delta and not family.has_delta)
    ):
      raise UserError(f"{self.model_type} models have no layers of such kinds: {self.kinds}")
    if self.rope_share != 1 and not family.rope_share:
      raise UserError(f"{self.model_type} models rotate whole heads, got {self.rope_share}")
    if has_delta != (self.delta is not None):
      raise UserError(f"the sizes of gated delta nets do not fit the layers {self.kinds}")
    if self.delta and (min(self.delta) < 1 or self.delta.value_heads % self.delta.key_heads):
      raise UserError(f"gated delta nets cannot have these sizes: {self.delta}")
    if not self.attention_kinds:
      raise UserError("a model needs a layer with attention; all are gated delta nets")

  @property
  def family(self) -> Family:
    """The row of this `model_type` in the table of families."""
    return FAMILIES[self.model_type]

  @property
  def layer_kinds(self) -> list[LayerKind]:
    """The kind of each layer."""
    return [self.kinds[i % len(self.kinds)] for i in range(self.layers)]

  @property
  def attention_kinds(self) -> list[LayerKind]:
    """The kinds of the layers with attention, which keep keys and values."""
    return [kind for kind in self.layer_kinds if kind.mixer == ATTENTION_MIXER]

  @property
  def delta_layers(self) -> int:
    """The number of layers that are gated delta nets."""
    return self.layers - len(self.attention_kinds)

  @property
  def rotated(self) -> int:
    """The features of a head that are rotated."""
    return int(self.head_dim * self.rope_share)

  @property
  def stacks(self) -> tuple[Stack, ...]:
    """The layers whose parameters are stacked; see `kinds.py`."""
    if self.apart:
      kinds = enumerate(self.layer_kinds)
      return tuple(Stack(f"layer_{i}", (kind,), 1) for i, kind in kinds)
    return stacks_of(self.kinds, self.layers)

  @property
  def matrix_dtype(self) -> str:
    """Format of matrices and their scales; a frozen base has them as the sampler reads them."""
    return self.compute_dtype if self.apart else self.param_dtype

  @property
  def places(self) -> list[LayerPlace]:
    """Where the parameters of each layer are."""
    return places_of(self.stacks)

  @property
  def mlps(self) -> tuple[int, ...]:
    """The numbers of features of the MLPs of a layer, which tensor parallelism divides."""
    if self.mixture is None:
      return (self.mlp,)
    dense = (self.mlp,) if any(kind.mlp == "dense" for kind in self.kinds) else ()
    return tuple(filter(None, (*dense, self.mixture.mlp, self.mixture.shared)))

  @property
  def active_mlp(self) -> int:
    """The most features of the MLP of a layer that compute a token."""
    dense = any(kind.mlp == "dense" for kind in self.kinds)
    return max(self.mixture.active if self.mixture else 0, self.mlp if dense else 0)

  @property
  def expert_layers(self) -> list[int]:
    """The numbers of the layers that have experts."""
    return [i for i, kind in enumerate(self.layer_kinds) if kind.mlp == EXPERTS]

  @property
  def expert_params(self) -> int:
    """The number of parameters of all experts, the shared ones not included."""
    if self.mixture is None:
      return 0
    m = self.mixture
    return 3 * self.width * m.mlp * m.experts * len(self.expert_layers)

  @property
  def max_length(self) -> int:
    """The most positions of a sequence, prompt and completion together."""
    if self.rope_scaling is None:
      return self.context
    return self.rope_scaling.max_length(self.context)
