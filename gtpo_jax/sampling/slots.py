"""Which completion runs in which slot, and which prompt sits in which seat. Plain Python and NumPy: nothing here knows a device.

A slot runs one completion at a time. A seat holds the keys and values of one prompt, for all the slots that complete it. Slots and
seats are cut into equal shards, one a device of the batch axes, and a completion runs in the shard in which its prompt sits. A slot
that has finished takes the next completion of a seated prompt; a seat whose prompt has no completion left takes the next prompt.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from gtpo_jax.runtime.errors import UserError

KERNELS = {"pallas": "tpu", "triton": "gpu"}  # of attention, and where they run


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """How much is sampled at once.

  Attributes:
    slots: completions that run side by side, over all devices; 0 for 64 a device of the batch axes on CPU, 256 elsewhere.
    chunk: tokens between two looks of the host; 0 for 16 on CPU, 64 elsewhere.
    kv_dtype: what keys and values are kept as: float32, bfloat16, int8; "" for the model's compute type.
    attention: how a slot looks at what it has written: "xla", over as many positions as the longest slot has; "pallas" and "triton",
      kernels for TPU and GPU that read of each slot what it has (interpreted, slowly, on CPU); "" for pallas on TPU, xla elsewhere.
  """

  slots: int = 0
  chunk: int = 0
  kv_dtype: str = ""
  attention: str = ""

  def __post_init__(self):
    if self.slots < 0:
      raise UserError(
        f"sampling.slots must be at least 1, or 0 to choose by the machine; got {self.slots}"
      )
    if self.chunk < 0:
      raise UserError(
        f"sampling.chunk must be at least 1, or 0 to choose by the machine; got {self.chunk}"
      )
    if self.kv_dtype not in ("", "float32", "bfloat16", "int8"):
      raise UserError(
        f"sampling.kv_dtype must be float32, bfloat16, int8 or empty, got {self.kv_dtype!r}"
      )
    if self.attention not in ("", "xla", *KERNELS):
      raise UserError(
        f"sampling.attention must be xla, pallas, triton or empty to choose by the machine, got {self.attention!r}"
      )

  def on(self, platform: str, shards: int) -> EngineConfig:
    """What is chosen by the machine filled in, for `shards` devices of the batch axes.

    Raises:
      UserError: the machine cannot run what is asked for.
    """
    cpu = platform == "cpu"
    attention = self.attention or ("pallas" if platform == "tpu" else "xla")
    if (home := KERNELS.get(attention, platform)) != platform and not cpu:
      raise UserError(
        f"sampling.attention = {attention!r} is a {home.upper()} kernel, and this is {platform}; leave it empty, or set it "
        f"to 'xla'"
      )
    return dataclasses.replace(
      self,
      slots=self.slots or (64 if cpu else 256) * shards,
      chunk=self.chunk or (16 if cpu else 64),
      attention=attention,
    )


class Room(NamedTuple):
  """How much runs at once in one shard."""

  shards: int
  slots: int  # completions
  prompt_cache: int  # prompts
  rows: int  # completions of one prompt


class Control(NamedTuple):
  """What the decode program is told before each chunk; slots [s] and seats [m] shard by shard. A slot that is not live is at rest."""

  live: np.ndarray  # bool[s]
  fresh: np.ndarray  # bool[s], its completion has no token yet
  keys: np.ndarray  # u32[s, 2], of its completion
  written: np.ndarray  # i32[s], tokens so far
  limit: np.ndarray  # i32[s], the most tokens it may have
  place: np.ndarray  # i32[s], seat * rows + row within its shard
  prompt: np.ndarray  # i32[s], tokens of its prompt
  slot: (
    np.ndarray
  )  # i32[m, rows], the slot in each row of a seat, within the shard; 0 where there is none
  seated: np.ndarray  # i32[m], tokens of the seated prompt


def room(prompts: int, group: int, shards: int, slots: int) -> Room:
  """Room for `prompts` x `group` completions, at most `slots` at once in all (at least one a shard).

  There are four times the seats that full groups need: a few slow completions then do not keep the next prompts waiting.
  """
  most = max(-(-prompts // shards), 1)
  slots = min(max(slots // shards, 1), most * group)
  rows = min(group, slots)
  return Room(shards, slots, min(most, slots, 4 * -(-slots // rows)), rows)


@dataclasses.dataclass
class _Seat:
  """A seated prompt, and which slot runs in each of its rows (-1 for none)."""

  prompt: int
  rows: list[int]
  begun: int = 0


class Schedule:
  """Runs every completion of every prompt once: prompts in order, their completions in order."""

  def __init__(self, room: Room, lengths: np.ndarray, token_limits: np.ndarray, keys: np.ndarray):
    """Args:
    room: what runs at once.
    lengths: i32[n], tokens of each prompt.
    token_limits: i32[n, g], the most tokens that each completion may have; prompts with 0 are left out.
    keys: u32[n, g, 2].
    """
    self.room = room
    self._lengths = lengths
    self._token_limits = token_limits
    self._keys = keys
    self._group = keys.shape[1]
    self._waiting = np.flatnonzero(token_limits.all(1))[::-1].tolist()
    self._seats: list[list[_Seat | None]] = [[None] * room.prompt_cache for _ in range(room.shards)]
    total = room.shards * room.slots
    self.completion = np.full((total, 2), -1, np.int32)  # [s, (prompt, number)]
    self.written = np.zeros(total, np.int32)
    self._place = np.zeros(total, np.int32)

  @property
  def live(self) -> np.ndarray:
    """bool[s]: the slots that run a completion."""
    return self.completion[:, 0] >= 0

  @property
  def waiting(self) -> bool:
    """Whether completions wait for a slot."""
    return bool(self._waiting) or any(
      seat and seat.begun < self._group for prompt_cache in self._seats for seat in prompt_cache
    )

  def fill(self, prefill: int) -> list[list[tuple[int, int]]]:
    """Gives free slots their next completions. Where slots stay idle, prompts take seats, at most `prefill` a shard.

    Returns:
      Of each shard the (seat, prompt) whose keys and values are to be made before the next chunk.
    """
    seated: list[list[tuple[int, int]]] = [[] for _ in self._seats]
    idle = [self._assign(shard) for shard in range(self.room.shards)]
    short = any(idle)
    while (
      self._waiting and short
    ):  # once prompts are read at all, free seats are filled ahead of need
      roomy = [
        shard
        for shard, prompt_cache in enumerate(self._seats)
        if None in prompt_cache and len(seated[shard]) < prefill
      ]
      if not roomy:
        break
      shard = max(roomy, key=lambda shard: (idle[shard], -len(seated[shard])))
      seat = self._seats[shard].index(None)
      self._seats[shard][seat] = _Seat(self._waiting.pop(), [-1] * self.room.rows)
      seated[shard].append((seat, self._seats[shard][seat].prompt))
      idle[shard] = self._assign(shard)
    return seated

  def control(self) -> Control:
    """What the next chunk is told."""
    live = self.live
    rows = self.room.rows
    prompt = self.completion[:, 0]
    number = self.completion[:, 1]
    prompt_cache = [seat for shard in self._seats for seat in shard]
    return Control(
      live,
      live & (self.written == 0),
      self._keys[prompt, number],
      self.written.copy(),
      self._token_limits[prompt, number],
      self._place.copy(),
      self._lengths[prompt],
      np.asarray(
        [[max(slot, 0) for slot in seat.rows] if seat else [0] * rows for seat in prompt_cache],
        np.int32,
      ),
      np.asarray([self._lengths[seat.prompt] if seat else 1 for seat in prompt_cache], np.int32),
    )

  def advance(self, tokens: np.ndarray, ended: np.ndarray) -> None:
    """Takes up what a chunk wrote: i32[s] tokens in each slot, and bool[s] whether its completion ended. Its slot is then free."""
    self.written += tokens
    for slot in np.flatnonzero(ended):
      shard, local = divmod(int(slot), self.room.slots)
      number, row = divmod(int(self._place[slot]), self.room.rows)
      seat = self._seats[shard][number]
      assert seat is not None and seat.rows[row] == local
      seat.rows[row] = -1
      if seat.begun == self._group and max(seat.rows) < 0:
        self._seats[shard][number] = None
    self.completion[ended] = -1
    self.written[ended] = 0
    self._place[ended] = 0

  def shrink(self, slots: int) -> np.ndarray:
    """Leaves `slots` a shard, which must hold all that are live; returns the slots that stay, i32[shards, slots], within the shard."""
    live = self.live.reshape(self.room.shards, -1)
    order = np.argsort(~live, axis=1, kind="stable")[:, :slots].astype(np.int32)
    keep = (order + np.arange(self.room.shards)[:, None] * self.room.slots).ravel()
    for shard, prompt_cache in enumerate(self._seats):
      new = {int(old): i for i, old in enumerate(order[shard])}
      for seat in filter(None, prompt_cache):
        seat.rows = [-1 if slot < 0 else new[slot] for slot in seat.rows]
    self.room = self.room._replace(slots=slots)
    self.completion = self.completion[keep]
    self.written = self.written[keep]
    self._place = self._place[keep]
    return order

  def _assign(self, shard: int) -> int:
    """Gives the shard's free slots completions of prompts that are seated; returns how many stay idle."""
    first = shard * self.room.slots
    free = np.flatnonzero(~self.live[first : first + self.room.slots]).tolist()[::-1]
    for number, seat in enumerate(self._seats[shard]):
      while free and seat and seat.begun < self._group and -1 in seat.rows:
        local = free.pop()
        row = seat.rows.index(-1)
        slot = first + local
        seat.rows[row] = local
        self.completion[slot] = seat.prompt, seat.begun
        self._place[slot] = number * self.room.rows + row
        self.written[slot] = 0
        seat.begun += 1
    return len(free)
