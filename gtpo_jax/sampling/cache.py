"""What the two caches of sampling share: states, number formats, and moving rows within shards.

A cache holds the keys and values of prompts and of running completions. There are two: dense arrays
for XLA's attention (`dense/`), and pages for the kernels of TPUs and GPUs (`paged/`).

In shapes of `gtpo_jax.sampling`, s is the number of slots, m the number of prompts in the cache,
and c the positions of a chunk. The other letters are as in `gtpo_jax.arrays`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.attention.streams import Ropes
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.delta.layer import STATE_AXES, DeltaState
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain

INT8_MAX = 127
# The parts of a cache, and of `SamplerState`.
Part = Literal["prompts", "slots"]
PROMPTS: Part = "prompts"
SLOTS: Part = "slots"


class States(NamedTuple):
  """What predicts the next token of each row, a cached prompt or a slot."""

  hidden: jax.Array  # [rows, 1, 1, d], the final hidden states
  # bool[rows, v], the tokens so far; None if there is no repetition penalty
  seen_tokens: jax.Array | None
  # [rows, 1, ...], what each gated delta net has kept of the tokens so far
  delta: list[DeltaState]

  @classmethod
  def zeros(cls, model: Transformer, rows: int, track_tokens: bool) -> States:
    """Returns the states of `rows` rows over all shards."""
    c = model.config
    hidden = jnp.zeros((rows, 1, 1, c.width), DTYPES[c.compute_dtype])
    seen_tokens = None
    if track_tokens:
      seen_tokens = constrain(jnp.zeros((rows, c.vocab_size), bool), model.mesh, "batch")
    delta = [DeltaState.zeros(c, rows) for _ in range(c.delta_layers)]
    return cls(constrain(hidden, model.mesh, "batch"), seen_tokens, delta).constrained(model)

  @property
  def axes(self) -> States:
    """The logical axes of each array; those after them are not split."""
    rows = ("batch",)
    seen_tokens = None if self.seen_tokens is None else rows
    return States(rows, seen_tokens, [STATE_AXES] * len(self.delta))

  def constrained(self, model: Transformer) -> States:
    """Shards `delta`: rows over the batch axes, and heads over the tensor axis."""
    split = lambda x, axes: constrain(x, model.mesh, *axes)
    return self._replace(delta=jax.tree.map(split, self.delta, self.axes.delta))


# How slots attend in one layer: (layer, queries [s, 1, h, 1, e], the new position's keys and
# values, the layer's chunk, i32[] position in the chunk) -> (the output [s, 1, h, 1, e], the chunk
# with the new position). Queries and keys come without their rotary angles. The cache is only read
# while a chunk is decoded. The chunk's own keys and values are in a small buffer in which all slots
# write at the same position, so that no token needs a scatter.
CachedAttention = Callable[[int, jax.Array, KV, Any, jax.Array], tuple[jax.Array, Any]]


class Cache(Protocol):
  """The device functions of a cache. `kv` is its pytree of keys and values."""

  def part(self, kv: Any, name: Part) -> Any:
    """Returns the part of `kv` that prompts are written to, or completions."""

  def with_part(self, kv: Any, name: Part, part: Any) -> Any:
    """Returns `kv` with that part replaced."""

  def insert(self, part: Any, new: list[KV], places: Any) -> Any:
    """Returns the prompts' part with the prompts `new`, per layer [b, 1, k, ...], at `places`.

    Here and below, a layer is one with attention.
    """

  def insert_completions(self, part: Any, new: list[KV], places: Any) -> Any:
    """Returns the slots' part with what is read of completions that are resumed.

    Args:
      part: the keys and values.
      new: of whole sequences, per layer [b, 1, k, ...], padded on the left.
      places: where the completions are written, and i32[shards, b / shards], the position in `new`
        of their first tokens.
    """

  def zero_chunk(self, slots: int, positions: int) -> list[Any]:
    """Returns a zeroed buffer for a chunk of `positions`, per layer."""

  def attention(self, kv: Any, tables: Any, generated: jax.Array, ropes: Ropes) -> CachedAttention:
    """Returns how slots attend to their prompts, their `generated` i32[s] positions and a chunk.

    `ropes` has the rotary angles of the chunk's positions, f32[s, 1, c, e/2] each.
    """

  def append(self, kv: Any, chunk: list[Any], tables: Any, generated: jax.Array) -> Any:
    """Returns `kv` with the chunks, from position `generated` of each slot on."""


def computed_zeros(model: Transformer, rows: int, positions: int) -> list[KV]:
  """Returns zeroed keys and values of rows over all shards, per layer, in the model's format."""
  c = model.config
  dtype = DTYPES[c.compute_dtype]
  kv = KV(
    jnp.zeros((rows, 1, c.kv_heads, c.head_dim, positions), dtype),
    jnp.zeros((rows, 1, c.kv_heads, positions, c.head_dim), dtype),
  )
  return [constrain_kv(model, kv)] * len(c.attention_kinds)


def quantise(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
  """Returns int8 values and f32 scales with x ~ int8 * scale.

  The value of largest magnitude along `axis` becomes +-127.
  """
  scale = jnp.abs(x).max(axis, keepdims=True).astype(jnp.float32) / INT8_MAX
  rounded = jnp.round(x.astype(jnp.float32) / jnp.where(scale > 0, scale, 1))
  return rounded.astype(jnp.int8), scale.squeeze(axis)


def position_axes(kv: KV) -> KV:
  """Returns the index of the position axis of each array."""
  return KV(4, 3, *(None if scale is None else 3 for scale in kv[2:]))


def from_position(model: Transformer, kv: KV, first: jax.Array) -> KV:
  """Returns each row of `kv` from its position `first` i32[shards, b / shards] on.

  The positions before it are moved to the end.
  """

  def shift(x: jax.Array, axis: int) -> jax.Array:
    roll = jax.vmap(lambda row, first: jnp.roll(row, -first, axis - 1))
    return within_shards(model, roll, x, first.reshape(-1))

  return jax.tree.map(shift, kv, position_axes(kv))


def gather_rows(model: Transformer, x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the rows of `x` at `index` i32[...], which counts rows within each shard."""
  return within_shards(model, lambda x, index: x[index], x, index)


def take_rows(model: Transformer, old: jax.Array, new: jax.Array, source: jax.Array) -> jax.Array:
  """Returns `old` with the rows of `new` at `source` i32[rows of `old`]; below 0, rows stay.

  `source` counts rows within each shard. A CPU selects rows many times faster than it scatters.
  """

  def take(old: jax.Array, new: jax.Array, source: jax.Array) -> jax.Array:
    is_new = (source >= 0).reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(is_new, new[jnp.maximum(source, 0)], old)

  return within_shards(model, take, old, new, source)


def within_shards(
  model: Transformer, function: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
  """Applies `function` to each shard's rows of the arrays and concatenates the results."""
  shards = batch_shards(model.mesh)
  if shards == 1:
    return function(*arrays)
  split = lambda x: constrain(x, model.mesh, "batch", *[...] * (x.ndim - 1))
  out = jax.vmap(function)(*(split(x.reshape(shards, -1, *x.shape[1:])) for x in arrays))
  return split(out.reshape(-1, *out.shape[2:]))


def constrain_kv(model: Transformer, kv: KV) -> KV:
  """Shards rows over the batch axes, and heads over the tensor axis if it divides their number."""
  return jax.tree.map(lambda x: constrain(x, model.mesh, "batch", None, head_axis(model)), kv)


def head_axis(model: Transformer) -> str | None:
  """Returns the logical axis of key/value heads; None if the tensor axis does not divide them."""
  divisible = model.config.kv_heads % axis_size(model.mesh, "kv_heads") == 0
  return "kv_heads" if divisible and model.config.kv_heads > 1 else None
