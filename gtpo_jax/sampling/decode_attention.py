"""Attention of one decode step: each slot attends to its prompt, its past and the current chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention import (
  KV,
  MaskedKV,
  PartialAttention,
  merge_partials,
  partial_attention,
)
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.sampling.cache import gather_rows, position_axes
from gtpo_jax.sampling.ragged import ragged_attention


@dataclasses.dataclass(frozen=True)
class DecodeAttention:
  """The keys and values that slots attend to during one chunk, apart from the chunk's own.

  Both caches are read-only while a chunk is decoded. The chunk's own keys and values are in a small
  buffer in which all slots write at the same position, so that a token needs no scatter.
  """

  model: Qwen2
  prompt_kv: list[KV]  # per layer, [m, 1, k, ...] with p positions
  past_kv: list[KV]  # per layer, [s, 1, k, ...] with w positions: the tokens before the chunk
  table_index: jax.Array  # i32[s], as in `DecodeInputs`
  slot_table: jax.Array  # i32[m, slots_per_entry], as in `DecodeInputs`
  prompt_mask: jax.Array  # bool[m, 1, 1, p]
  past_lengths: jax.Array  # i32[s], valid positions of the past
  kernel: str  # "xla", "pallas" or "triton", see `EngineConfig.attention`

  def at_step(
    self, chunk_kv: list[KV], step: jax.Array
  ) -> Callable[[int, jax.Array, KV], tuple[jax.Array, KV]]:
    """Returns the `attend` argument of `decode_step` for position `step` i32[] of the chunk.

    For a layer it returns the attention output, and that layer's `chunk_kv` with the new position
    written.
    """
    precision = self.model.config.matmul_precision
    chunk_mask = (jnp.arange(chunk_kv[0].v.shape[3]) <= step)[None, None, None]

    def attend(layer: int, q: jax.Array, new: KV) -> tuple[jax.Array, KV]:
      old = chunk_kv[layer]
      write = lambda old, new, axis: jax.lax.dynamic_update_slice_in_dim(old, new, step, axis)
      updated = jax.tree.map(write, old, new, position_axes(old))
      parts = [
        self._attend_prompt(q, layer, precision),
        self._attend_past(q, layer, precision),
        partial_attention(q, MaskedKV(updated, chunk_mask), precision),
      ]
      return merge_partials(parts).astype(q.dtype), updated

    return attend

  def _attend_past(self, q: jax.Array, layer: int, precision: str) -> PartialAttention:
    past = self.past_kv[layer]
    if self.kernel != "xla":
      return ragged_attention(self.model, q, past, self.past_lengths, self.kernel)
    mask = jnp.arange(past.v.shape[3]) < self.past_lengths[:, None]
    return partial_attention(q, MaskedKV(past, mask[:, None, None]), precision)

  def _attend_prompt(self, q: jax.Array, layer: int, precision: str) -> PartialAttention:
    """Attends to each slot's prompt.

    The queries are gathered at the entries of their prompts, and the results are gathered back at
    the slots. A prompt's keys and values are therefore read once for all slots that attend to them.
    """
    m, slots_per_entry = self.slot_table.shape
    at_entries = gather_rows(self.model, q[:, 0], self.slot_table.reshape(-1))
    at_entries = at_entries.reshape(m, slots_per_entry, *q.shape[2:])
    source = MaskedKV(self.prompt_kv[layer], self.prompt_mask)
    partial = partial_attention(at_entries, source, precision)

    def to_slots(x: jax.Array) -> jax.Array:
      flat = x.reshape(m * slots_per_entry, *x.shape[2:])
      return gather_rows(self.model, flat, self.table_index)[:, None]

    return PartialAttention(*map(to_slots, partial))
