"""The attention of whole streams, in training and where prompts are read: which kernel computes it, and on which device."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.attention import KV, Context
from gtpo_jax.models.cudnn import attend_by_cudnn
from gtpo_jax.models.flash import attend_in_blocks
from gtpo_jax.models.parts import contiguous, exchange, paired
from gtpo_jax.models.presets import ModelConfig
from gtpo_jax.models.splash import attend_by_splash
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import (
  axis_size,
  gathered,
  partition_spec,
  shard_number,
  uneven,
  where_even,
)


def attention_kind(config: ModelConfig, mesh: Mesh) -> str:
  """How whole streams attend on this mesh: "splash", "cudnn" or "blocks", as the config says, or else what its platform is best at.

  Raises:
    UserError: the config names one that this platform or these number formats do not have.
  """
  platform = mesh.devices.flat[0].platform
  whole = axis_size(mesh, "position") == 1
  formats = (
    f"compute_dtype {config.compute_dtype}, matmul_precision {config.matmul_precision}, head_dim {config.head_dim}"
    + ("" if whole else f", mesh.context {axis_size(mesh, 'position')}")
  )
  half = config.compute_dtype != "float32" and config.head_dim <= 256 and config.head_dim % 8 == 0
  plain = config.matmul_precision == "default"  # the kernels know no other
  fits = {
    "splash": platform in ("tpu", "cpu") and plain,
    "cudnn": platform == "gpu" and half and plain and whole,
    "blocks": True,
  }
  if config.attention:
    if not fits[config.attention]:
      raise UserError(
        f"model.attention = {config.attention!r} does not run on {platform} with {formats}; use 'blocks', or leave it empty"
      )
    return config.attention
  native = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "blocks")
  return native if fits[native] else "blocks"


def attend_causally(config: ModelConfig, mesh: Mesh, q: jax.Array, context: Context) -> jax.Array:
  """Softmax attention of `q` [n, g, h, s, e] over its context -> [n, g, h, s, e], with no buffer of [s, s].

  Heads are split over the tensor axis; key/value heads too where they divide, else every shard picks those of its queries. Positions are
  split over the context axis where they divide: a shard has its own queries, and gathers the keys and values of all.
  """
  (n, _, h, s, _) = q.shape
  kv_heads = context.own.v.shape[2]
  shards = axis_size(mesh, "heads")
  if h % shards:
    raise uneven("heads", h, mesh)
  kind = attention_kind(config, mesh)
  local = {
    "blocks": functools.partial(attend_in_blocks, precision=config.matmul_precision),
    "cudnn": attend_by_cudnn,
    "splash": functools.partial(attend_by_splash, interpret=mesh.devices.flat[0].platform == "cpu"),
  }[kind]
  own_axis, prompt_axis = (
    kv and where_even(mesh, kv.v.shape[3], "position") for kv in (context.own, context.prompt)
  )
  parts = axis_size(mesh, own_axis)
  rows = where_even(mesh, n, "batch")
  split = kv_heads % shards == 0
  here = h // shards  # query heads of a shard; of them, those beside one another on one kv head
  run = math.gcd(h // shards, h // kv_heads)

  def attend(q: jax.Array, context: Context) -> jax.Array:
    if not split:
      heads = (shard_number("heads") * here + jnp.arange(0, here, run)) // (h // kv_heads)
      pick = lambda kv: (
        None if kv is None else jax.tree.map(lambda x: jnp.take(x, heads, axis=2), kv)
      )
      context = context._replace(own=pick(context.own), prompt=pick(context.prompt))
    context = context._replace(
      own=_whole(context.own, own_axis), prompt=_whole(context.prompt, prompt_axis)
    )
    if parts == 1:
      return local(q, context)
    if (
      kind == "splash" and s % (2 * parts) == 0
    ):  # blocks look at all keys, wherever the queries stand
      return exchange(local(exchange(q, parts), context, part=paired(s, parts)), parts)
    return local(q, context, part=contiguous(s, parts))

  kv_spec = (rows, None, "kv_heads" if split else None)
  of_kv = lambda kv, positions: (
    kv and KV(partition_spec((*kv_spec, None, positions)), partition_spec((*kv_spec, positions)))
  )
  of_mask = lambda mask: None if mask is None else partition_spec((rows,))
  specs = Context(
    of_kv(context.own, own_axis),
    of_mask(context.own_mask),
    of_kv(context.prompt, prompt_axis),
    of_mask(context.prompt_mask),
    of_mask(context.segment),
  )
  queries = partition_spec((rows, None, "heads", own_axis))
  return jax.shard_map(
    attend, mesh=mesh, in_specs=(queries, specs), out_specs=queries, check_vma=False
  )(q, context)


def _whole(kv: KV | None, positions: str | None) -> KV | None:
  """Within `shard_map`: the keys and values of all positions, which lie over the axis called `positions`."""
  return (
    kv
    if kv is None or positions is None
    else KV(gathered(kv.k, positions, 4), gathered(kv.v, positions, 3))
  )
