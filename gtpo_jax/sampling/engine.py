"""Sampling for its callers: prompts as lists of token ids in, completions out as they end."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.qwen2 import Params, Qwen2, Unstacked, sampling_layout
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.sampling.cache import Seats, Slots, abstract, empty, fewer, longer
from gtpo_jax.sampling.decode import Chunk, decode_chunk, read_prompts
from gtpo_jax.sampling.filters import Sampler
from gtpo_jax.sampling.ragged import LANES
from gtpo_jax.sampling.slots import Limits, Room, Schedule, room

PREFILL_TOKENS = 8192  # prompt tokens that one shard reads at once
CHOSEN = Limits()      # all of them by the machine
LEAST = 64             # the shortest length that arrays are made for; others double it


@dataclasses.dataclass(frozen=True)
class Sheet:
  """Completions of one call on the host, while they are written: arrays that fill up, [n, g, t] or [n, g]."""

  tokens: np.ndarray           # i32[n, g, t]; the padding id where nothing is written
  mask: np.ndarray             # bool[n, g, t]
  log_probs: np.ndarray        # f32[n, g, t], nats, as `Rollouts`
  entropy: np.ndarray          # f32[n, g, t], nats, as `Rollouts`
  drawn_log_probs: np.ndarray  # f32[n, g, t], nats, of the distribution that was drawn from: penalty and filters applied
  plain_log_probs: np.ndarray  # f32[n, g, t], nats, at temperature 1
  finished: np.ndarray         # bool[n, g], ended with a stop token

  @classmethod
  def blank(cls, n: int, g: int, t: int, pad: int) -> Sheet:
    """A sheet with nothing written."""
    number = lambda: np.zeros((n, g, t), np.float32)
    return cls(np.full((n, g, t), pad, np.int32), np.zeros((n, g, t), bool), number(), number(), number(), number(), np.zeros((n, g), bool))

  def write(self, which: np.ndarray, start: np.ndarray, chunk: Chunk) -> None:
    """Enters what a chunk wrote in the slots of completions `which` i32[s, 2], from token `start` i32[s] on."""
    step, slot = np.nonzero(chunk.mask)
    place = (*which[slot].T, start[slot] + step)
    self.mask[place] = True
    for field in ("tokens", "log_probs", "entropy", "drawn_log_probs", "plain_log_probs"):
      getattr(self, field)[place] = getattr(chunk, field)[step, slot]
    self.finished[tuple(which[chunk.stopped].T)] = True


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Host prompts to left-padded arrays [n, width].

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  tokens = np.full((len(ids), width), pad, np.int32)
  for row, prompt in zip(tokens, ids, strict=True):
    if not len(prompt):
      raise UserError("a prompt is empty; give at least one token")
    if len(prompt) > width:
      raise UserError(f"a prompt has {len(prompt)} tokens, over the limit of {width}; raise data.max_prompt_tokens or shorten it")
    row[-len(prompt):] = prompt
  return Prompts(tokens, np.asarray([len(prompt) for prompt in ids], np.int32))


def lengths(most: int) -> list[int]:
  """The lengths that arrays for up to `most` positions are made of: few, so that few programs are compiled."""
  sizes = [LEAST]
  while sizes[-1] < most:
    sizes.append(2 * sizes[-1])
  return [size for size in sizes if 4 * size <= 3 * most] + [most]


class Engine:
  """Compiled sampling for one model on one mesh: continuous batching over a fixed number of slots.

  Each prompt is read once, and its keys and values are kept once for its whole group. A chunk of tokens is decoded in every slot without
  the host; between chunks finished slots take the next completions. Keys and values take the room that the longest of the running
  completions needs, and when nothing waits any more, slots that have run dry are given up. All shapes come from a small fixed set.
  """

  def __init__(self, model: Qwen2, stop: Sequence[int], pad: int, max_prompt_tokens: int, max_tokens: int,
               words: int | None = None, limits: Limits = CHOSEN):
    c = model.config
    self.model, self.pad = Qwen2(without_lora(model).config, sampling_mesh(model.mesh, c.kv_heads, c.mlp)), pad
    self.max_prompt_tokens, self.max_tokens = max_prompt_tokens, max_tokens
    self._stop = np.asarray(sorted(stop), np.int32)
    self._shards = batch_shards(self.model.mesh)
    self.limits = limits.on(model.mesh.devices.flat[0].platform, self._shards)
    self._most, self._chunk = self.limits.slots, min(self.limits.chunk, max_tokens)
    if self.limits.attention == "triton" and (c.head_dim < 16 or c.head_dim & (c.head_dim - 1)):
      raise UserError(f"sampling.attention = 'triton' needs heads whose width is a power of two from 16, not {c.head_dim}; set it to 'xla'")
    multiple = 1 if self.limits.attention == "xla" else LANES
    self._widths = sorted({-(-(size + self._chunk) // multiple) * multiple for size in lengths(max_tokens)})
    self._kv_dtype = limits.kv_dtype or c.compute_dtype
    self._layout = jax.jit(lambda params: sampling_layout(self.model, merge_lora(model, params)))
    self._empty = jax.jit(functools.partial(empty, self.model), static_argnums=(0, 1, 2, 3))
    self._read = jax.jit(functools.partial(read_prompts, self.model), donate_argnums=1)
    decode = functools.partial(decode_chunk, self.model, chunk=self._chunk, attention=self.limits.attention, words=words)
    self._decode = jax.jit(decode, static_argnames="sampler", donate_argnums=2)
    self._longer = jax.jit(functools.partial(longer, self.model), static_argnums=1)
    self._fewer = jax.jit(functools.partial(fewer, self.model))
    self._keys = jax.jit(lambda key, n, g: jax.random.key_data(completion_keys(key, n, g)), static_argnums=(1, 2))

  def described(self) -> str:
    """How it samples on this machine, in words."""
    limits = self.limits
    return (f"{limits.slots} completions at once in chunks of {self._chunk} tokens, keys and values as {self._kv_dtype}, "
            f"attention by {limits.attention} on {self.model.mesh.devices.flat[0].platform}")

  def layout(self, params: Params) -> Unstacked:
    """The parameters as sampling wants them, adapters merged; make it once and sample many batches from it."""
    return self._layout(params)

  def sample(self, params: Unstacked, prompts: Sequence[Sequence[int]], key: jax.Array, *, group: int, sampler: Sampler) -> Rollouts:
    """Samples `group` completions of each prompt; see `write`.

    Returns:
      Rollouts [n, group, max_tokens] in host arrays.
    """
    *_, (sheet, _) = self.write(params, prompts, key, group=group, sampler=sampler)
    return self.rollouts(sheet, prompts)

  def rollouts(self, sheet: Sheet, prompts: Sequence[Sequence[int]]) -> Rollouts:
    """What a sheet holds of its prompts, in host arrays."""
    return Rollouts(pad_prompts(prompts, self.max_prompt_tokens, self.pad), sheet.tokens, sheet.mask, sheet.log_probs, sheet.entropy,
                    sheet.finished)

  def write(self, params: Unstacked, prompts: Sequence[Sequence[int]], key: jax.Array, *, group: int, sampler: Sampler,
            every: int | None = None, limits: np.ndarray | None = None) -> Iterator[tuple[Sheet, list[tuple[int, int]]]]:
    """Samples `group` completions of each prompt, and shows them as they are written.

    Completion (i, j) is drawn with `fold_in(fold_in(key, i), j)`: it depends on the key, the prompt's place and its own number, not on
    slots, mesh or the completions beside it. It may have `max_tokens`, or what the model's context leaves behind the prompt.

    Args:
      params: from `layout`.
      prompts: token ids, n lists.
      key: typed PRNG key.
      group: completions of each prompt.
      sampler: how tokens are drawn.
      every: looks after so many tokens, if that is sooner than the engine's own chunk.
      limits: i32[n, group] >= 1, the most tokens that each completion may have; None for `max_tokens`.

    Yields:
      The sheet, always the same object, after each chunk (once, blank, before the first), and the (prompt, number) that have ended since.

    Raises:
      UserError: a prompt is empty, over `max_prompt_tokens` or over the model's context.
    """
    pad_prompts(prompts, self.max_prompt_tokens, self.pad)
    context, have = self.model.config.longest, np.asarray([len(prompt) for prompt in prompts], np.int32)
    if max(have, default=0) > context:
      raise UserError(f"a prompt has {max(have)} tokens, over the model's context of {context}; shorten it")
    limits = np.full((len(prompts), group), self.max_tokens, np.int32) if limits is None else limits.astype(np.int32)
    limits = np.minimum(limits, np.minimum(self.max_tokens, context - have)[:, None])
    sheet = Sheet.blank(len(prompts), group, self.max_tokens, self.pad)
    yield sheet, [(i, j) for i, j in np.argwhere(limits == 0).tolist()]
    if not limits.any():
      return
    keys = np.asarray(self._keys(key, len(prompts), group))
    schedule = Schedule(room(len(prompts), group, self._shards, self._most), have, limits, keys)
    width = next(size for size in lengths(self.max_prompt_tokens) if size >= max(have))
    until = np.int32(min(every or self._chunk, self._chunk))
    seats, slots, reads = self._seats(schedule.room, width, sampler), None, _reads(schedule.room, width)
    while True:
      while any(seated := schedule.fill(reads)):
        seats = self._read(params, seats, *_padded(seated, prompts, reads, width, schedule.room.seats, self.pad))
      if not schedule.live.any():
        return
      slots = self._fitted(slots, schedule, sampler)
      control, busy = schedule.control(), int(schedule.live.sum())
      spare = np.int32(max(busy // 8, 1) if schedule.waiting else busy)
      slots, chunk = self._decode(params, seats, slots, control, self._stop, sampler=sampler, until=until, spare=spare)
      chunk = jax.device_get(chunk)
      which, written = schedule.completion.copy(), chunk.mask.sum(0)
      sheet.write(which, control.written, chunk)
      ended = control.live & (chunk.stopped | (control.written + written >= control.limit))
      schedule.advance(written, ended)
      yield sheet, [(i, j) for i, j in which[ended].tolist()]

  def _fitted(self, slots: Slots | None, schedule: Schedule, sampler: Sampler) -> Slots:
    """The slots with room for the next chunk: new ones, or the same made longer; a quarter of them where no more are needed."""
    need = int(schedule.written.max()) + self._chunk
    if slots is None:
      return self._slots(schedule.room, self._widths[0], sampler)
    while (have := slots.kv[0].v.shape[3]) < need:
      slots = self._longer(slots, self._widths[self._widths.index(have) + 1])
    busy = 0 if schedule.waiting else int(schedule.live.reshape(self._shards, -1).sum(1).max())
    while busy and 4 * busy <= schedule.room.slots:
      slots = self._fewer(slots, schedule.shrink(schedule.room.slots // 4))
    return slots

  def _slots(self, room: Room, width: int, sampler: Sampler) -> Slots:
    return Slots(*self._empty(room.shards * room.slots, width, self._kv_dtype, sampler.penalises))

  def _seats(self, room: Room, width: int, sampler: Sampler) -> Seats:
    return Seats(*self._empty(room.shards * room.seats, width, self._kv_dtype, sampler.penalises))

  def warm_up(self, params: Unstacked, prompts: int, *, group: int, sampler: Sampler) -> None:
    """Compiles every program that sampling `prompts` x `group` completions may need, so that none is compiled later."""
    limit = min(self.max_prompt_tokens, self.model.config.longest)
    for width in lengths(limit):
      place = room(prompts, group, self._shards, self._most)
      reads = _reads(place, width)
      seats = self._read(params, self._seats(place, width, sampler),
                         *_padded([[] for _ in range(place.shards)], [], reads, width, place.seats, self.pad))
      while True:
        schedule, slots = _at_rest(place, group), self._slots(place, self._widths[0], sampler)
        rest, less = schedule.control(), place.slots // 4
        order = schedule.shrink(less) if less else None
        for wider in [*self._widths[1:], None]:
          slots, _ = self._decode(params, seats, slots, rest, self._stop, sampler=sampler, until=np.int32(0), spare=np.int32(1))
          if less:
            self._fewer(slots, order)
          if wider:
            slots = self._longer(slots, wider)
        if not less:
          break
        place = place._replace(slots=less)
    jax.block_until_ready(slots)

  def caches(self, prompts: int, *, group: int, sampler: Sampler) -> tuple[Seats, Slots]:
    """What sampling `prompts` x `group` completions keeps at its largest, as shapes and shardings."""
    place, width = room(prompts, group, self._shards, self._most), min(self.max_prompt_tokens, self.model.config.longest)
    make = lambda rows, length: abstract(self.model, self._shards * rows, length, self._kv_dtype, sampler.penalises)
    return Seats(*make(place.seats, width)), Slots(*make(place.slots, self._widths[-1]))

  def programs(self, params: Params, prompts: int, *, group: int, sampler: Sampler) -> Iterator[tuple[str, jax.stages.Lowered, Any]]:
    """The programs of sampling `prompts` x `group` completions at their largest, for devices that need not be here.

    Yields:
      A name (layout, read, decode), the lowered program, and its arguments, all abstract but for what the host sends.
    """
    lowered = self._layout.lower(params)
    yield "layout", lowered, params
    shapes, shardings = jax.eval_shape(self._layout, params), lowered.compile().output_shardings
    laid = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
    seats, slots = self.caches(prompts, group=group, sampler=sampler)
    place, width = room(prompts, group, self._shards, self._most), seats.kv[0].v.shape[3]
    reads = _reads(place, width)
    padded = _padded([[] for _ in range(self._shards)], [], reads, width, place.seats, self.pad)
    yield "read", self._read.lower(laid, seats, *padded), (laid, seats)
    rest, number = _at_rest(place, group).control(), np.int32(1)
    decode = self._decode.lower(laid, seats, slots, rest, self._stop, sampler=sampler, until=number, spare=number)
    yield "decode", decode, (laid, seats, slots)


def _reads(room: Room, width: int) -> int:
  """How many prompts of `width` tokens a shard reads at once."""
  return max(min(room.seats, PREFILL_TOKENS // width), 1)


def _at_rest(room: Room, group: int) -> Schedule:
  """A schedule with nothing to do."""
  return Schedule(room, np.ones(1, np.int32), np.zeros((1, group), np.int32), np.zeros((1, group, 2), np.uint32))


def _padded(seated: list[list[tuple[int, int]]], prompts: Sequence[Sequence[int]], reads: int, width: int, seats: int,
            pad: int) -> tuple[Prompts, np.ndarray]:
  """The prompts that take seats, `reads` rows a shard, and their seats i32[shards, reads]; rows that are not needed get none."""
  rows = [row for shard in seated for row in shard + [(seats, -1)] * (reads - len(shard))]
  ids = [prompts[prompt] if prompt >= 0 else [pad] for _, prompt in rows]
  return pad_prompts(ids, width, pad), np.asarray([seat for seat, _ in rows], np.int32).reshape(len(seated), reads)


def completion_keys(key: jax.Array, n: int, g: int) -> jax.Array:
  """Keys [n, g]: the step's key folded with the prompt's number, then with the completion's."""
  rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
  return jax.vmap(lambda row: jax.vmap(lambda j: jax.random.fold_in(row, j))(jnp.arange(g)))(rows)
