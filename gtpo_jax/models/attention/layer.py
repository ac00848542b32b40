"""Grouped-query attention with its projections, norms and rotary angles: one kind of mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.attention.causal import attend_causally
from gtpo_jax.models.attention.rope import in_pairs, rotate
from gtpo_jax.models.attention.sources import KV, AttentionContext
from gtpo_jax.models.attention.streams import Ropes, StreamMasks, rope_of
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.kinds import LayerKind
from gtpo_jax.models.layers import Dense, RMSNorm, normalised

# (queries [n, g, h, 1, e], the new position's keys and values) -> (the attention output
# [n, g, h, 1, e], a result of any type that is passed on to the caller). It rotates queries and
# keys first.
Attend = Callable[[jax.Array, KV], tuple[jax.Array, Any]]


class Attention(nn.Module):
  """Attention of the positions of a stream [n, g, s, d] to their sequence and its prompt.

  Its parameters are in the scope of the layer.
  """

  config: ModelConfig
  mesh: Mesh
  kind: LayerKind

  def setup(self):
    """Declares the parameters with the names of their axes."""
    c = self.config
    dense = lambda name, inputs, outputs, axes: Dense(
      c, self.mesh, inputs, outputs, axes, bias=name in c.biases
    )
    queries = (c.heads, c.head_dim)
    keys = (c.kv_heads, c.head_dim)
    projected = (c.heads, 2 * c.head_dim) if c.family.output_gate else queries
    self.q = dense("q", (c.width,), projected, ("embed", "heads", "head_dim"))
    self.k = dense("k", (c.width,), keys, ("embed", "kv_heads", "head_dim"))
    self.v = dense("v", (c.width,), keys, ("embed", "kv_heads", "head_dim"))
    self.o = dense("o", queries, (c.width,), ("heads", "head_dim", "embed"))
    if c.family.qk_norm == "head":
      factor = (c.head_dim / c.query_scalar) ** 0.5 if c.query_scalar else 1.0
      self.q_norm = RMSNorm(c, (c.head_dim,), factor=factor)
      self.k_norm = RMSNorm(c, (c.head_dim,))
    elif c.family.qk_norm == "width":
      self.q_norm = RMSNorm(c, queries, ("heads", "head_dim"))
      self.k_norm = RMSNorm(c, keys, ("kv_heads", "head_dim"))

  def __call__(
    self, x: jax.Array, masks: StreamMasks, is_continued: bool = False
  ) -> tuple[jax.Array, KV]:
    """Returns the output [n, g, s, d] of a stream, and its keys and values.

    Args:
      x: [n, g, s, d].
      masks: of the stream.
      is_continued: whether `continue_from` follows; it makes no difference here.
    """
    q, kv, gate = self._queries_keys_values(x, masks.ropes)
    return self._attend(q, AttentionContext(kv, masks.mask), gate), kv

  def continue_from(self, x: jax.Array, masks: StreamMasks, prompt: KV) -> jax.Array:
    """Returns the output of completions, whose first input is the last token of their prompt."""
    q, kv, gate = self._queries_keys_values(x, masks.ropes)
    return self._attend(q, AttentionContext(kv, masks.mask, prompt, *masks[2:]), gate)

  def step(self, x: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
    """Returns the output of one new position [n, g, 1, d], and `attend`'s second result."""
    q, k, v, gate = self._project(x)
    attended, extra = attend(q, KV(jnp.swapaxes(k, -1, -2), v))
    return self._output(attended, gate), extra

  def _queries_keys_values(
    self, x: jax.Array, ropes: Ropes
  ) -> tuple[jax.Array, KV, jax.Array | None]:
    """Returns rotated queries [n, g, h, s, e], keys and values of the same positions, and gates."""
    q, k, v, gate = self._project(x)
    rope = rope_of(self.kind, ropes)
    return rotate(q, rope), KV(jnp.swapaxes(rotate(k, rope), -1, -2), v), gate

  def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns queries [n, g, h, s, e], keys and values [n, g, k, s, e], not rotated, and gates."""
    c = self.config
    qk_norm = c.family.qk_norm
    over_width = (self.q_norm, self.k_norm, None) if qk_norm == "width" else (None,) * 3
    projections = zip((self.q, self.k, self.v), over_width, strict=True)
    clip = (lambda y: jnp.clip(y, -c.clip_qkv, c.clip_qkv)) if c.clip_qkv else (lambda y: y)
    q, k, v = (
      jnp.swapaxes(clip(normalised(norm, project(x))), 2, 3) for project, norm in projections
    )
    gate = None
    if c.family.output_gate:
      q, gate = jnp.split(q, 2, -1)
    if qk_norm == "head":
      q, k = self.q_norm(q), self.k_norm(k)
    return in_pairs(q, c.rotated), in_pairs(k, c.rotated), v, gate

  def _attend(self, q: jax.Array, context: AttentionContext, gate: jax.Array | None) -> jax.Array:
    attended = attend_causally(self.config, self.mesh, q, context, self.kind.window)
    return self._output(attended, gate)

  def _output(self, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Projects the output of attention [n, g, h, s, e], times the sigmoid of the gates."""
    if gate is not None:
      attended = attended * nn.sigmoid(gate)
    return self.o(jnp.swapaxes(attended, 2, 3))
