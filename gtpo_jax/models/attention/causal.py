"""Attention over full sequences, for training and prefill: selects a kernel and splits its work."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.attention.flash import (
  attend_in_blocks,
  balanced_queries,
  contiguous_queries,
  exchange_halves,
)
from gtpo_jax.models.attention.kernels import attend_with_cudnn, attend_with_splash
from gtpo_jax.models.attention.sources import KV, AttentionContext
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.runtime.chips import AMPERE, compute_capability
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import (
  all_gather_axis,
  axis_size,
  divisible_axis,
  indivisible_error,
  partition_spec,
  shard_index,
)

# Limits of cuDNN's flash attention in JAX, forward and backward.
CUDNN_MAX_HEAD_DIM = 128  # 256 from Hopper on
CUDNN_HEAD_DIM_MULTIPLE = 8


def attention_kind(config: ModelConfig, mesh: Mesh) -> str:
  """Returns the attention kernel for full sequences: "splash", "cudnn" or "blocks".

  It is `config.attention` if that is set, otherwise the fastest supported kernel of the platform.
  """
  device = mesh.devices.flat[0]
  platform = device.platform
  is_old_gpu = (compute_capability(device) or AMPERE) < AMPERE
  if is_old_gpu and config.compute_dtype == "bfloat16":
    raise UserError(
      f"{device.device_kind} has no bfloat16 units; set model.compute_dtype=float16, which auto "
      "chooses here, or float32, which is slower"
    )
  context_shards = axis_size(mesh, "position")  # positions within a layer: the context axis
  cudnn_format = (
    config.compute_dtype != "float32"
    and config.head_dim <= CUDNN_MAX_HEAD_DIM
    and config.head_dim % CUDNN_HEAD_DIM_MULTIPLE == 0
    and not is_old_gpu
  )
  default_precision = config.matmul_precision == "default"  # splash and cuDNN have no other
  supported = {
    "splash": platform in ("tpu", "cpu") and default_precision,
    "cudnn": platform == "gpu" and cudnn_format and default_precision and context_shards == 1,
    "blocks": True,
  }
  if config.attention:
    if not supported[config.attention]:
      settings = (
        f"compute_dtype {config.compute_dtype}, matmul_precision {config.matmul_precision}, "
        f"head_dim {config.head_dim}"
      )
      if context_shards > 1:
        settings += f", mesh.context {context_shards}"
      raise UserError(
        f"model.attention = {config.attention!r} does not run on {platform} with {settings}; "
        "use 'blocks', or leave it empty"
      )
    return config.attention
  fastest = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "blocks")
  return fastest if supported[fastest] else "blocks"


def attend_causally(
  config: ModelConfig,
  mesh: Mesh,
  q: jax.Array,
  context: AttentionContext,
  window: int | None = None,
) -> jax.Array:
  """Softmax attention of `q` [n, g, h, s, e] over `context`, without an array of [s, s] scores.

  Query heads are split over the tensor axis. Key/value heads are split too if the axis divides
  their number; otherwise every shard selects the heads that its queries use. Positions are split
  over the context axis if it divides their number: a shard then has its own queries and gathers the
  keys and values of all positions.

  Args:
    config: the architecture.
    mesh: the devices.
    q: the queries.
    context: the keys, values and masks that they attend to.
    window: the most positions that a query attends to, its own included; None for all before it.

  Returns:
    [n, g, h, s, e], split like `q`.
  """
  n, _, h, s, _ = q.shape
  kv_heads = context.own.v.shape[2]
  tensor_shards = axis_size(mesh, "heads")
  if h % tensor_shards:
    raise indivisible_error("heads", h, mesh)
  kind = attention_kind(config, mesh)
  own_axis, prompt_axis = (
    kv and divisible_axis(mesh, kv.v.shape[3], "position") for kv in (context.own, context.prompt)
  )
  context_shards = axis_size(mesh, own_axis)
  if kind == "splash" and window and context.segment is not None and context_shards > 1:
    kind = "blocks"  # splash needs rows of one completion each, which have no shards of positions
  kernel = {
    "blocks": functools.partial(attend_in_blocks, precision=config.matmul_precision),
    "cudnn": attend_with_cudnn,
    "splash": functools.partial(
      attend_with_splash, interpret=mesh.devices.flat[0].platform == "cpu"
    ),
  }[kind]
  kernel = functools.partial(kernel, window=window)
  split_kv_heads = kv_heads % tensor_shards == 0

  def attend(q: jax.Array, context: AttentionContext) -> jax.Array:
    if not split_kv_heads:
      context = _select_kv_heads(context, h, kv_heads, tensor_shards)
    context = context._replace(
      own=_all_positions(context.own, own_axis), prompt=_all_positions(context.prompt, prompt_axis)
    )
    if context_shards == 1:
      return kernel(q, context)
    # On a shard the blocks kernel computes the scores of all keys, so balancing does not help it.
    if kind == "splash" and s % (2 * context_shards) == 0:
      balanced = exchange_halves(q, context_shards)
      attended = kernel(balanced, context, query_shard=balanced_queries(s, context_shards))
      return exchange_halves(attended, context_shards)
    return kernel(q, context, query_shard=contiguous_queries(s, context_shards))

  batch_axis = divisible_axis(mesh, n, "batch")
  kv_axis = "kv_heads" if split_kv_heads else None
  queries = partition_spec((batch_axis, None, "heads", own_axis))
  specs = _context_specs(context, batch_axis, kv_axis, own_axis, prompt_axis)
  return jax.shard_map(
    attend, mesh=mesh, in_specs=(queries, specs), out_specs=queries, check_vma=False
  )(q, context)


def _select_kv_heads(
  context: AttentionContext, heads: int, kv_heads: int, tensor_shards: int
) -> AttentionContext:
  """Within `shard_map`: selects the key/value heads that this shard's query heads use."""
  heads_per_shard = heads // tensor_shards
  heads_per_kv = heads // kv_heads
  # Each run of this many query heads of a shard shares one key/value head.
  run = math.gcd(heads_per_shard, heads_per_kv)
  first_of_runs = jnp.arange(0, heads_per_shard, run)
  selected = (shard_index("heads") * heads_per_shard + first_of_runs) // heads_per_kv
  select = lambda kv: kv and jax.tree.map(lambda x: jnp.take(x, selected, axis=2), kv)
  return context._replace(own=select(context.own), prompt=select(context.prompt))


def _context_specs(
  context: AttentionContext,
  batch_axis: str | None,
  kv_axis: str | None,
  own_axis: str | None,
  prompt_axis: str | None,
) -> AttentionContext:
  """Returns the `PartitionSpec` of every array of the context."""
  of_kv = lambda kv, positions: (
    kv
    and KV(
      partition_spec((batch_axis, None, kv_axis, None, positions)),
      partition_spec((batch_axis, None, kv_axis, positions)),
    )
  )
  of_mask = lambda mask: None if mask is None else partition_spec((batch_axis,))
  return AttentionContext(
    of_kv(context.own, own_axis),
    of_mask(context.own_mask),
    of_kv(context.prompt, prompt_axis),
    of_mask(context.prompt_mask),
    of_mask(context.segment),
    jax.tree.map(of_mask, context.ranges),
    of_mask(context.places),
  )


def _all_positions(kv: KV | None, axis: str | None) -> KV | None:
  """Within `shard_map`: gathers the keys and values of all positions, which `axis` splits."""
  if kv is None or axis is None:
    return kv
  return KV(all_gather_axis(kv.k, axis, 4), all_gather_axis(kv.v, axis, 3))
