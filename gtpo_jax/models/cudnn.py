"""Attention of whole streams by cuDNN's flash kernel, for GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention import Context


def attend_by_cudnn(q: jax.Array, context: Context, implementation: str = "cudnn") -> jax.Array:
  """As `attend_in_blocks`, in 16 bits.

  cuDNN takes a mask for a bias of [s, s]. So each row, the prompt with its stream behind it, is turned until its first real token stands
  at place 0: then "causal" is all there is to say. The prompt's places get queries of zeros, and what these find is dropped.

  Args:
    q: [n, g, h, s, e].
    context: what they look at; its tokens stand beside one another, in one segment.
    implementation: of `jax.nn.dot_product_attention`.
  """
  n, g, _, s, _ = q.shape
  k, v, segment = context.joined(g)
  before = k.shape[3] - s
  rows = lambda x: jnp.moveaxis(x.reshape(n * g, *x.shape[2:]), 1, 2)  # [b, places, heads, e]
  places = jnp.arange(before + s)
  padding = segment.reshape(n * g, -1).argmax(-1)[:, None]
  turn = lambda x, by: jnp.take_along_axis(x, ((places + by) % (before + s))[..., None, None], 1)
  queries = jnp.pad(q, [(0, 0)] * 3 + [(before, 0), (0, 0)])
  found = jax.nn.dot_product_attention(
    *(turn(rows(x), padding) for x in (queries, k, v)),
    is_causal=True,
    implementation=implementation,
  )
  return jnp.moveaxis(turn(found, -padding)[:, before:], 1, 2).reshape(q.shape)
