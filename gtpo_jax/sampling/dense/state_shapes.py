"""Shapes and shardings of the state of sampling with a dense cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import batch_shards
from gtpo_jax.sampling.cache import States, head_axis
from gtpo_jax.sampling.dense.cache import DenseCache, DenseKV
from gtpo_jax.sampling.programs import SamplerState, abstract, abstract_states


class StateShapes:
  """Returns shapes, with shardings. Rows, entries and slots are counted per shard."""

  def __init__(self, cache: DenseCache, track_tokens: bool):
    """Args:
    cache: the device functions of the cache.
    track_tokens: whether states have the tokens so far.
    """
    self._cache = cache
    self._track_tokens = track_tokens
    self._shards = batch_shards(cache.model.mesh)

  def kv(self, rows: int, positions: int) -> list[KV]:
    """Returns the shapes of keys and values."""
    zeros = lambda: self._cache.zeros(self._shards * rows, positions)
    return abstract_kv(self._cache.model, zeros)

  def states(self, rows: int) -> States:
    """Returns the shapes of the states of rows."""
    return abstract_states(self._cache.model, self._shards * rows, self._track_tokens)

  def all(self, entries: int, width: int, slots: int, length: int) -> SamplerState:
    """Returns the shapes of entries with `width` positions, and slots with `length` positions."""
    return SamplerState(
      DenseKV(self.kv(entries, width), self.kv(slots, length)),
      self.states(entries),
      self.states(slots),
    )


def abstract_kv(model: Transformer, zeros: Callable[[], Any]) -> Any:
  """Returns the shapes of keys and values [rows, 1, k, ...], with their shardings."""
  return abstract(model, zeros, "batch", None, head_axis(model))
