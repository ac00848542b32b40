"""Completions as they are sampled, in host arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.experts.routing import RouteShape, no_route
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.sampling.session import Progress, Request
from gtpo_jax.sampling.stop_strings import StopStrings

Pair = tuple[int, int]  # the (row, index) of a completion
Tokens = dict[str, np.ndarray]  # tokens with all that is known of them, by the names of `OF_TOKENS`


@dataclasses.dataclass
class CompletionBuffer:
  """Prompts with their completions so far, into which what requests get is written.

  Rows may be added while others are being sampled. `Engine.buffer` makes a buffer.
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
  finished: np.ndarray  # bool[n, g], whether a stop token or string ended the latest turn
  pad: int  # the padding id
  stop: StopStrings | None  # of every turn
  begins: np.ndarray | None = None  # i32[n, g, c], as in `Rollouts`; the caller sets it
  # As in `Rollouts`, and of prompts [n, p, ...], padded on the left; None without experts.
  routes: np.ndarray | None = None
  prompt_routes: np.ndarray | None = None

  @classmethod
  def empty(
    cls,
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    limits: np.ndarray,
    t: int,
    pad: int,
    stop: StopStrings | None = None,
    routes: RouteShape | None = None,
    prompt_width: int = 0,
  ) -> CompletionBuffer:
    """Returns a buffer without tokens, [n, g, t]; with `routes`, it has the prompts' too."""
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
      pad=pad,
      stop=stop,
      routes=routes and routes.empty(n, g, t),
      prompt_routes=routes and routes.empty(n, prompt_width),
    )

  @property
  def of_tokens(self) -> tuple[str, ...]:
    """The names of what is known of each token."""
    return OF_TOKENS if self.routes is None else (*OF_TOKENS, "routes")

  @property
  def lengths(self) -> np.ndarray:
    """i32[n, g], tokens so far, including tokens that were not drawn."""
    return self.present.sum(-1, dtype=np.int32)

  def ended(self, at: Any = ...) -> np.ndarray:
    """Returns whether completions draw no token, because they or their latest turns have ended.

    Args:
      at: an index into [n, g]; default: all completions.
    """
    return self.finished[at] | (self.present[at].sum(-1) >= self.limits[at])

  def at(self, i: int, j: int) -> BufferedCompletion:
    """Returns completion j of prompt i."""
    return BufferedCompletion(self, (i, j))

  def extend(self, other: CompletionBuffer) -> None:
    """Adds the rows of another buffer."""
    self.prompts.extend(other.prompts)
    optional = () if self.routes is None else ("routes", "prompt_routes")
    for name in (*_ARRAYS, *optional):
      setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))

  def restore(self, i: int, completions: Rollouts) -> None:
    """Puts completions [g, ...] that another buffer has begun into row i."""
    for name in ("tokens", "present", "mask", "log_probs", "entropy", "finished"):
      getattr(self, name)[i] = getattr(completions, name)
    if completions.drawn_log_probs is not None:
      self.drawn_log_probs[i] = completions.drawn_log_probs
    if self.routes is not None:
      self.routes[i] = completions.routes
      self.prompt_routes[i] = completions.prompts.routes

  def rollouts(self, width: int) -> Rollouts:
    """Returns the completions with their prompts padded to `width`, in the same host arrays."""
    return Rollouts(
      prompts=pad_prompts(self.prompts, width, self.pad).replace(routes=self.prompt_routes),
      tokens=self.tokens,
      present=self.present,
      mask=self.mask,
      log_probs=self.log_probs,
      entropy=self.entropy,
      finished=self.finished,
      routes=self.routes,
    )

  def write(self, progress: Progress, prompts: Sequence[int] = ()) -> list[Pair]:
    """Writes what requests got, which are named by pairs; returns what has ended.

    Args:
      progress: of the session.
      prompts: the session's numbers of the rows.
    """
    chunk = progress.chunk
    step, slot = np.nonzero(np.arange(len(chunk.mask))[:, None] < progress.counts)
    pairs = np.asarray([x.name if x else (-1, -1) for x in progress.requests])
    at = (*pairs[slot].T, progress.before[slot] + step)
    self.present[at] = True
    self.mask[at] = True
    for field in _FROM_CHUNK:
      getattr(self, field)[at] = getattr(chunk, field)[step, slot]
    if self.routes is not None:
      self.routes[at] = chunk.routes[step, slot]
      self._write_read(progress, prompts)
    self.finished[tuple(pairs[progress.finished].T)] = True
    return [progress.requests[slot].name for slot in np.flatnonzero(progress.ended)]

  def _write_read(self, progress: Progress, prompts: Sequence[int]) -> None:
    """Writes the routes of tokens that were read.

    The routes of a prompt are from its latest reading. Drawn tokens keep the routes of their
    drawing, with which the log-prob of the next token was computed.
    """
    for i, number in enumerate(prompts):
      if number in progress.prompt_routes:
        read = progress.prompt_routes[number]
        self.prompt_routes[i, self.prompt_routes.shape[1] - len(read) :] = read
    for request, read in progress.read_routes:
      i, j = request.name
      row = self.routes[i, j, : len(read)]
      is_context = ~self.mask[i, j, : len(read)]
      row[is_context] = read[is_context]


@dataclasses.dataclass(frozen=True)
class BufferedCompletion:
  """A completion of a buffer, which shares its arrays."""

  buffer: CompletionBuffer
  pair: Pair

  @property
  def length(self) -> int:
    """The tokens so far, including tokens that were not drawn."""
    return int(self.buffer.present[self.pair].sum())

  @property
  def ids(self) -> np.ndarray:
    """The ids of the tokens so far, i32[length]."""
    return self.buffer.tokens[self.pair][self.buffer.present[self.pair]]

  @property
  def turn_begin(self) -> int:
    """How many tokens there were when the latest turn began."""
    read = np.flatnonzero(~self.buffer.mask[self.pair][: self.length])
    return int(read[-1]) + 1 if read.size else 0

  @property
  def tokens(self) -> Tokens:
    """The tokens so far, with all that is known of them."""
    buffer = self.buffer
    present = buffer.present[self.pair]
    return {name: getattr(buffer, name)[self.pair][present] for name in buffer.of_tokens}

  def replace(self, tokens: Tokens, finished: bool) -> None:
    """Replaces the tokens; the completion is not being sampled."""
    buffer = self.buffer
    nothing = {"tokens": buffer.pad}
    if buffer.routes is not None:
      nothing["routes"] = no_route(buffer.routes.dtype)
    length = len(tokens["tokens"])
    for name, values in tokens.items():
      row = getattr(buffer, name)[self.pair]
      row[:length] = values
      row[length:] = nothing.get(name, 0)
    buffer.present[self.pair] = np.arange(buffer.present.shape[2]) < length
    buffer.finished[self.pair] = finished

  def read(self, tokens: Sequence[int]) -> None:
    """Adds tokens that were not drawn, so that the completion has another turn.

    Raises:
      ValueError: no token would be left for it.
    """
    i, j = self.pair
    buffer = self.buffer
    length = self.length
    limit = int(buffer.limits[i, j])
    end = length + len(tokens)
    if not length < end < limit:
      raise ValueError(
        f"completion {j} of prompt {i} has {length} of {limit} tokens; from 1 to "
        f"{limit - length - 1} can be added, got {len(tokens)}"
      )
    buffer.tokens[i, j, length:end] = tokens
    buffer.present[i, j, length:end] = True
    buffer.finished[i, j] = False

  def request(self) -> Request | None:
    """Returns the request for the next tokens, which is named by the (row, index).

    If its turn has tokens already, it resumes. None if these have a stop string: it has ended.
    """
    buffer = self.buffer
    begin = self.turn_begin
    ids = self.ids
    search = buffer.stop.search() if buffer.stop else None
    if search and (end := search.add(ids[begin:].tolist())) is not None:
      kept = {name: x[: begin + end] for name, x in self.tokens.items()}
      self.replace(kept, finished=True)
      return None
    key, limit = buffer.keys[self.pair], int(buffer.limits[self.pair])
    return Request(key, limit, ids, search, name=self.pair)


_FROM_CHUNK = ("tokens", "log_probs", "entropy", "drawn_log_probs", "plain_log_probs")
OF_TOKENS = ("mask", *_FROM_CHUNK)
_ARRAYS = tuple(
  field.name for field in dataclasses.fields(CompletionBuffer) if field.type == "np.ndarray"
)
