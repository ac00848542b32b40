"""The attention of whole streams, in training and where prompts are read: which kernel computes it, and on which device."""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.errors import UserError
from gtpo_jax.models.attention import Context
from gtpo_jax.models.cudnn import attend_by_cudnn
from gtpo_jax.models.flash import attend_in_blocks
from gtpo_jax.models.presets import ModelConfig
from gtpo_jax.models.splash import attend_by_splash
from gtpo_jax.parallel import axis_size, partition_spec, uneven


def attention_kind(config: ModelConfig, mesh: Mesh) -> str:
  """How whole streams attend on this mesh: "splash", "cudnn" or "blocks", as the config says, or else what its platform is best at.

  Raises:
    UserError: the config names one that this platform or these number formats do not have.
  """
  platform = mesh.devices.flat[0].platform
  formats = f"compute_dtype {config.compute_dtype}, matmul_precision {config.matmul_precision}, head_dim {config.head_dim}"
  half = config.compute_dtype != "float32" and config.head_dim <= 256 and config.head_dim % 8 == 0
  plain = config.matmul_precision == "default"  # the kernels know no other
  fits = {"splash": platform in ("tpu", "cpu") and plain, "cudnn": platform == "gpu" and half and plain, "blocks": True}
  if config.attention:
    if not fits[config.attention]:
      raise UserError(f"model.attention = {config.attention!r} does not run on {platform} with {formats}; use 'blocks', or leave it empty")
    return config.attention
  native = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "blocks")
  return native if fits[native] else "blocks"


def attend_causally(config: ModelConfig, mesh: Mesh, q: jax.Array, context: Context) -> jax.Array:
  """Softmax attention of `q` [n, g, h, s, e] over its context -> [n, g, h, s, e], with no buffer of [s, s].

  Heads are split over the tensor axis; key/value heads too where they divide, else every shard picks those of its queries.
  """
  (n, _, h, _, _), kv_heads, shards = q.shape, context.own.v.shape[2], axis_size(mesh, "heads")
  if h % shards:
    raise uneven("heads", h, mesh)
  kind = attention_kind(config, mesh)
  local = {"blocks": functools.partial(attend_in_blocks, precision=config.matmul_precision), "cudnn": attend_by_cudnn,
           "splash": functools.partial(attend_by_splash, interpret=mesh.devices.flat[0].platform == "cpu")}[kind]
  rows = None if n % axis_size(mesh, "batch") else "batch"
  split = kv_heads % shards == 0
  here, run = h // shards, math.gcd(h // shards, h // kv_heads)  # query heads of a shard; of them, those beside one another on one kv head

  def attend(q: jax.Array, context: Context) -> jax.Array:
    if not split:
      heads = (jax.lax.axis_index("tensor") * here + jnp.arange(0, here, run)) // (h // kv_heads)
      pick = lambda kv: None if kv is None else jax.tree.map(lambda x: jnp.take(x, heads, axis=2), kv)
      context = context._replace(own=pick(context.own), prompt=pick(context.prompt))
    return local(q, context)

  spec = lambda heads: partition_spec((rows, None, heads))
  of_kv = lambda kv: jax.tree.map(lambda _: spec("kv_heads" if split else None), kv)
  of_mask = lambda mask: None if mask is None else partition_spec((rows,))
  specs = Context(of_kv(context.own), of_mask(context.own_mask), of_kv(context.prompt), of_mask(context.prompt_mask),
                  of_mask(context.segment))
  return jax.shard_map(attend, mesh=mesh, in_specs=(spec("heads"), specs), out_specs=spec("heads"), check_vma=False)(q, context)
