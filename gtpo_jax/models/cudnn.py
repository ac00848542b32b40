"""Attention over full sequences with cuDNN's flash kernel, on GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention import AttentionContext


def attend_with_cudnn(
  q: jax.Array, context: AttentionContext, implementation: str = "cudnn"
) -> jax.Array:
  """Softmax attention of `q` over `context`, in 16 bits.

  cuDNN treats a mask as a bias of [s, s]. To avoid one, each row (the prompt followed by the
  completion's sequence) is rolled until its first real token is at position 0; causal masking then
  suffices. The queries of the prompt's positions are zeros, and their outputs are dropped.

  Args:
    q: [n, g, h, s, e].
    context: the keys, values and masks. Real tokens are contiguous and form one segment.
    implementation: passed to `jax.nn.dot_product_attention`.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  n, g, _, s, _ = q.shape
  k, v, segment = context.concatenate(g)
  prompt_length = k.shape[3] - s
  length = prompt_length + s
  as_rows = lambda x: jnp.moveaxis(x.reshape(n * g, *x.shape[2:]), 1, 2)  # [b, positions, heads, e]
  positions = jnp.arange(length)
  padding = segment.reshape(n * g, -1).argmax(-1)[:, None]
  roll = lambda x, by: jnp.take_along_axis(x, ((positions + by) % length)[..., None, None], 1)
  queries = jnp.pad(q, [(0, 0)] * 3 + [(prompt_length, 0), (0, 0)])
  attended = jax.nn.dot_product_attention(
    *(roll(as_rows(x), padding) for x in (queries, k, v)),
    is_causal=True,
    implementation=implementation,
  )
  return jnp.moveaxis(roll(attended, -padding)[:, prompt_length:], 1, 2).reshape(q.shape)
