"""Completions as they are sampled, in host arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.sampling.batches import pad_prompts
from gtpo_jax.sampling.session import Progress, Request
from gtpo_jax.sampling.stop_strings import StopSearch


@dataclasses.dataclass
class CompletionBuffer:
  """Prompts with their completions so far, which `Engine.generate` fills in place.

  Rows may be added while they are being generated. `Engine.buffer` makes a buffer.

  A completion may consist of several turns. As long as it is `open`, a stop token, a stop string or
  its limit only ends its turn: it waits for its caller, who either appends tokens that it reads, so
  that it goes on with another turn, or closes it.
  """

  prompts: list[Sequence[int]]  # n lists of token ids
  keys: np.ndarray  # u32[n, g, 2], PRNG key data of each completion
  limits: np.ndarray  # i32[n, g], the most tokens of each completion, those it has already included
  tokens: np.ndarray  # i32[n, g, t]; the padding id where `present` is False
  present: np.ndarray  # bool[n, g, t], as in `Rollouts`
  mask: np.ndarray  # bool[n, g, t], as in `Rollouts`
  log_probs: np.ndarray  # f32[n, g, t], nats, as in `Rollouts`
  entropy: np.ndarray  # f32[n, g, t], nats, as in `Rollouts`
  drawn_log_probs: np.ndarray  # f32[n, g, t], nats, after penalty and filters
  plain_log_probs: np.ndarray  # f32[n, g, t], nats, at temperature 1
  # bool[n, g], True if a stop token or a stop string has ended the completion, or its latest turn
  finished: np.ndarray
  open: np.ndarray  # bool[n, g], whether further turns may follow; the caller sets it
  pad: int  # the padding id
  # (row, index) -> what finds the stop strings of its next turn; None if it has none
  new_search: Callable[[tuple[int, int]], StopSearch | None]
  begins: np.ndarray | None = None  # i32[n, g, c], as in `Rollouts`; the caller sets it

  @classmethod
  def empty(
    cls,
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    limits: np.ndarray,
    t: int,
    pad: int,
    new_search: Callable[[tuple[int, int]], StopSearch | None] = lambda pair: None,
  ) -> CompletionBuffer:
    """Returns a buffer without tokens, [n, g, t]."""
    n, g = limits.shape
    return cls(
      prompts=list(prompts),
      keys=keys,
      limits=limits,
      tokens=np.full((n, g, t), pad, np.int32),
      present=np.zeros((n, g, t), bool),
      mask=np.zeros((n, g, t), bool),
      log_probs=np.zeros((n, g, t), np.float32),
      entropy=np.zeros((n, g, t), np.float32),
      drawn_log_probs=np.zeros((n, g, t), np.float32),
      plain_log_probs=np.zeros((n, g, t), np.float32),
      finished=np.zeros((n, g), bool),
      open=np.zeros((n, g), bool),
      pad=pad,
      new_search=new_search,
    )

  @property
  def lengths(self) -> np.ndarray:
    """i32[n, g], tokens so far, those that were not drawn included."""
    return self.present.sum(-1, dtype=np.int32)

  def turned(self, at: Any = ...) -> np.ndarray:
    """Returns whether completions draw no token now, because they or their turns have ended.

    Args:
      at: an index into [n, g]; default: all completions.
    """
    return self.finished[at] | (self.present[at].sum(-1) >= self.limits[at])

  def ended(self, at: Any = ...) -> np.ndarray:
    """Returns whether completions have ended: their last turn has, and no other one may follow.

    Nothing else decides that a completion ends.

    Args:
      at: an index into [n, g]; default: all completions.
    """
    return self.turned(at) & ~self.open[at]

  def length(self, i: int, j: int) -> int:
    """Returns the tokens so far of completion j of prompt i, those that were not drawn included."""
    return int(self.present[i, j].sum())

  def turn_begin(self, i: int, j: int) -> int:
    """Returns how many tokens completion j of prompt i had when its latest turn began."""
    read = np.flatnonzero(~self.mask[i, j, : self.length(i, j)])
    return int(read[-1]) + 1 if read.size else 0

  def append(self, i: int, j: int, tokens: Sequence[int]) -> None:
    """Appends tokens that were not drawn to a completion whose turn has ended, so that it goes on.

    Raises:
      ValueError: it does not wait for them, or no token is left for another turn.
    """
    length = self.length(i, j)
    limit = int(self.limits[i, j])
    if not (self.open[i, j] and self.turned((i, j))):
      raise ValueError(f"completion {j} of prompt {i} has not ended a turn")
    end = length + len(tokens)
    if not length < end < limit:
      raise ValueError(
        f"completion {j} of prompt {i} has {length} of {limit} tokens; from 1 to "
        f"{limit - length - 1} can be appended, got {len(tokens)}"
      )
    self.tokens[i, j, length:end] = tokens
    self.present[i, j, length:end] = True
    self.finished[i, j] = False

  def take(self, i: int, j: int, length: int | None = None) -> dict[str, np.ndarray]:
    """Returns the first `length` tokens of completion j of prompt i with all that is known of them.

    None for all.
    """
    length = self.length(i, j) if length is None else length
    return {name: getattr(self, name)[i, j, :length].copy() for name in OF_TOKENS}

  def put(
    self, i: int, j: int, tokens: Mapping[str, np.ndarray], limit: int, finished: bool = False
  ) -> None:
    """Replaces the tokens of a completion that is not being sampled.

    Args:
      i: the prompt.
      j: the completion.
      tokens: in the form of `take`.
      limit: the most tokens, these included.
      finished: as the field.
    """
    length = len(tokens["tokens"])
    for name, values in tokens.items():
      row = getattr(self, name)[i, j]
      row[:length] = values
      row[length:] = self.pad if name == "tokens" else 0
    self.present[i, j] = np.arange(self.present.shape[2]) < length
    self.finished[i, j] = finished
    self.limits[i, j] = limit

  def close(self, i: int, j: int) -> None:
    """Ends a completion whose turn has ended, or that has no tokens and was not passed on yet.

    Raises:
      ValueError: it is being sampled.
    """
    length = self.length(i, j)
    if length and not self.turned((i, j)):
      raise ValueError(f"completion {j} of prompt {i} has not ended its turn")
    self.open[i, j] = False
    if not length:
      self.limits[i, j] = 0

  def extend(self, other: CompletionBuffer) -> None:
    """Adds the rows of another buffer."""
    self.prompts.extend(other.prompts)
    for name in _ARRAYS:
      setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))

  def restore(self, i: int, completions: Rollouts) -> None:
    """Puts completions [g, ...] that another buffer has begun into row i."""
    for name in ("tokens", "present", "mask", "log_probs", "entropy", "finished"):
      getattr(self, name)[i] = getattr(completions, name)
    if completions.drawn_log_probs is not None:
      self.drawn_log_probs[i] = completions.drawn_log_probs

  def completion(self, i: int, j: int) -> np.ndarray:
    """Returns the tokens so far of completion j of prompt i, i32[length]."""
    return self.tokens[i, j, self.present[i, j]]

  def rollouts(self, width: int) -> Rollouts:
    """Returns the completions with their prompts padded to `width`, in the same host arrays."""
    return Rollouts(
      prompts=pad_prompts(self.prompts, width, self.pad),
      tokens=self.tokens,
      present=self.present,
      mask=self.mask,
      log_probs=self.log_probs,
      entropy=self.entropy,
      finished=self.finished,
    )

  def request(self, i: int, j: int) -> Request | None:
    """Returns the request for the next tokens of completion j of prompt i, which it is named by.

    If its turn has tokens already, it goes on. None if these have a stop string: then it has ended.
    """
    begin = self.turn_begin(i, j)
    length = self.length(i, j)
    search = self.new_search((i, j))
    if search and (end := search.add(self.tokens[i, j, begin:length].tolist())) is not None:
      self.put(i, j, self.take(i, j, begin + end), int(self.limits[i, j]), finished=True)
      return None
    tokens = self.tokens[i, j, :length]
    return Request(self.keys[i, j], int(self.limits[i, j]), tokens, search, name=(i, j))

  def write(self, progress: Progress) -> list[tuple[int, int]]:
    """Writes what requests got; returns the (row, index) of those that have ended."""
    chunk = progress.chunk
    step, slot = np.nonzero(np.arange(len(chunk.mask))[:, None] < progress.counts)
    pairs = np.asarray([x.name if x else (-1, -1) for x in progress.requests])
    at = (*pairs[slot].T, progress.before[slot] + step)
    self.present[at] = True
    self.mask[at] = True
    for field in _FROM_CHUNK:
      getattr(self, field)[at] = getattr(chunk, field)[step, slot]
    self.finished[tuple(pairs[progress.finished].T)] = True
    return [progress.requests[slot].name for slot in np.flatnonzero(progress.ended)]


_FROM_CHUNK = ("tokens", "log_probs", "entropy", "drawn_log_probs", "plain_log_probs")
OF_TOKENS = ("mask", *_FROM_CHUNK)
_ARRAYS = tuple(
  field.name for field in dataclasses.fields(CompletionBuffer) if field.type == "np.ndarray"
)
