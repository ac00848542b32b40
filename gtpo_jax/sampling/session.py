"""The one loop that decodes: requests come at any time, and all that run get tokens together.

What a request draws depends on the parameters, its tokens and its key. It does not depend on its
slot, on the mesh or on other requests.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.chunk import Chunk
from gtpo_jax.sampling.filters import RowSampling
from gtpo_jax.sampling.prefill.batches import RoutesRead, routes_of
from gtpo_jax.sampling.prefill.reading import Reader
from gtpo_jax.sampling.programs import Programs, SamplerState
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import DecodeInputs
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.sampling.spans import Span
from gtpo_jax.sampling.stop_strings import StopSearch

# While requests wait, or join their prompts again, a chunk ends once 1/8 of the active slots have
# finished. With a smaller fraction the host round trips cost more than they gain; with a larger one
# too many slots idle.
REFILL_FRACTION = 8
MEASURED_CHUNKS = 4  # the fastest of the last ones counts: others may have compiled
# Slots are dropped once so many chunks in a row have not needed them.
PATIENCE = 16
IDLE_SAMPLING = (1.0, 0, 1.0, 0.0)


@dataclasses.dataclass(eq=False)
class Request:
  """A completion that is to be sampled, or the next turn of one.

  Attributes:
    key: u32[2], PRNG key data.
    limit: the most tokens after the prompt, `tokens` included.
    tokens: what follows the prompt already; the next one has the index len(tokens).
    search: finds its stop strings; None for none.
    sampling: its temperature, top-k, top-p and min-p, in a session whose requests differ in them.
    wants_alternatives: whether it reads `Chunk.alternatives`.
    name: what the caller calls it.
    place: the (prompt, index) of the schedule; the session sets it.
  """

  key: np.ndarray
  limit: int
  tokens: Sequence[int] = ()
  search: StopSearch | None = None
  sampling: tuple[float, int, float, float] = IDLE_SAMPLING
  wants_alternatives: bool = False
  name: Any = None
  place: tuple[int, int] = (-1, -1)


class Progress(NamedTuple):
  """What each slot's request got in a chunk.

  Attributes:
    requests: [s], None for a slot whose request got nothing, or that has none.
    before: i32[s], the tokens after the prompt before the chunk.
    counts: i32[s], the new tokens: the first ones of the chunk, up to a stop string.
    finished: bool[s], whether a stop token or a stop string has ended the request.
    ended: bool[s], whether it has ended, at its limit too.
    chunk: the chunk, in host arrays.
    spans: when prompts were prefilled, if any were, and when the chunk was decoded.
    prompt_routes: for each prompt that was read, by its number, the experts that computed its
      tokens [length, layers with experts, k], as in `Rollouts`.
    read_routes: the same for the tokens after the prompt, for each request whose tokens were read.
  """

  requests: list[Request | None]
  before: np.ndarray
  counts: np.ndarray
  finished: np.ndarray
  ended: np.ndarray
  chunk: Chunk
  spans: list[Span]
  prompt_routes: Mapping[int, np.ndarray] = {}
  read_routes: Sequence[tuple[Request, np.ndarray]] = ()


class Pace:
  """Decides where chunks end, and nothing else does."""

  def __init__(self, most_tokens: int, chunk_s: float | None = None, fixed: bool = False):
    """Args:
    most_tokens: the most tokens of a chunk.
    chunk_s: for requests that come at any time, seconds after which a chunk ends, because what
      comes waits for that; None for chunks that depend on the requests only.
    fixed: whether all chunks have `most_tokens`. Keys of a chunk and earlier ones are summed one
      after another, so what a request draws depends on the ends of its chunks, in rounding.
    """
    self._fixed = fixed
    self._most_tokens = most_tokens
    self._chunk_s = chunk_s
    self._token_s: collections.deque[float] = collections.deque(maxlen=MEASURED_CHUNKS)

  def limits(self, inputs: DecodeInputs, refills: bool) -> tuple[int, int]:
    """Returns the most tokens of the next chunk, and how many finished slots end it.

    Args:
      inputs: of the chunk.
      refills: whether finished slots get other requests; without them, all slots may finish.
    """
    active = int(inputs.active.sum())
    if self._fixed:
      return self._most_tokens, active
    return self._tokens(inputs), max(active // REFILL_FRACTION, 1) if refills else active

  def _tokens(self, inputs: DecodeInputs) -> int:
    if self._chunk_s is None:
      return self._most_tokens
    if (inputs.active & inputs.is_new).any() or not self._token_s:
      return 1  # somebody waits for a first token
    return int(np.clip(self._chunk_s / min(self._token_s), 1, self._most_tokens))

  def observe(self, seconds: float, steps: int) -> None:
    """Takes how long a chunk of `steps` tokens took."""
    self._token_s.append(seconds / max(steps, 1))


class Session:
  """Requests that are sampled together, from one set of parameters. It belongs to one thread.

  Attributes:
    statistics: metrics by name, of how well slots and pages were used.
  """

  def __init__(
    self,
    programs: Programs,
    params: DecodeParams,
    scheduler: Scheduler,
    pace: Pace,
    sampling_params: SamplingParams | None = None,
    longest_prompt: int | None = None,
  ):
    """Args:
    programs: of the engine.
    params: the policy, in its layout.
    scheduler: an empty schedule, from `programs`.
    pace: decides where chunks end.
    sampling_params: how tokens are drawn; None if each request says it.
    longest_prompt: the most tokens of a prompt; None to follow what runs, see `Programs.fit`.
    """
    self.statistics: dict[str, float] = {}
    self._programs = programs
    self._params = params
    self._scheduler = scheduler
    self._reader = Reader(programs, params, scheduler)
    self._pace = pace
    self._sampling_params = sampling_params
    self._longest_prompt = longest_prompt
    self._state: SamplerState | None = None
    self._prompts: dict[int, Sequence[int]] = {}  # by the scheduler's numbers
    self._added = 0
    self._requests: dict[tuple[int, int], Request] = {}  # by their places
    self._have_joined = False
    self._needed: collections.deque[int] = collections.deque(maxlen=PATIENCE)
    self._slots = len(scheduler.slots.active)
    self._tokens_and_steps = np.zeros(2, np.int64)

  @property
  def busy(self) -> bool:
    """Whether any request has not ended."""
    return bool(self._requests)

  def submit(self, prompt: Sequence[int], requests: Sequence[Request]) -> int:
    """Adds requests behind the waiting ones. They share the keys and values of their prompt.

    Args:
      prompt: token ids.
      requests: with fewer tokens than their limits. Each is its own handle.

    Returns:
      The number of the prompt, for `join` and `forget`.
    """
    number = self._added
    self._added += 1
    self._prompts[number] = prompt
    self._scheduler.add(
      np.asarray([len(prompt)], np.int32),
      np.asarray([[request.limit for request in requests]], np.int32),
      np.asarray([request.key for request in requests], np.uint32).reshape(1, -1, 2),
      np.asarray([[len(request.tokens) for request in requests]], np.int32),
    )
    for index, request in enumerate(requests):
      self._place(request, number, index)
    return number

  def join(self, prompt: int, request: Request) -> None:
    """Adds a request to an earlier prompt, before everything that waits.

    The prompt is read again only if the cache has given it up.
    """
    drawn = len(request.tokens)
    index = self._scheduler.join(prompt, drawn, request.limit, request.key)
    self._place(request, prompt, index)
    self._have_joined = True

  def cancel(self, request: Request) -> None:
    """Removes a request that has not ended; its slot is free."""
    held = (self._scheduler.slots.completions == request.place).all(1)
    if held.any():
      self._scheduler.advance(np.zeros(len(held), np.int32), held)
    else:
      self._scheduler.withdraw(*request.place)
    del self._requests[request.place]

  def forget(self, prompt: int) -> None:
    """Forgets a prompt, whose requests have all ended and which no other one joins."""
    del self._prompts[prompt]
    self._scheduler.forget(prompt)

  def step(self, more_may_come: bool = False, some_wait: bool = False) -> Progress:
    """Samples a chunk of tokens in every slot; there must be a request that has not ended.

    Args:
      more_may_come: whether slots that are idle now are kept for other requests.
      some_wait: whether others wait for a slot, which were not submitted yet.
    """
    scheduler = self._scheduler
    keep_slots = more_may_come or self._have_joined
    spans: list[Span] = []
    began = time.perf_counter()
    state, prefilled, prompts, resumed = self._prefill(keep_slots)
    inputs = scheduler.inputs()  # while the devices prefill
    if prefilled:
      jax.block_until_ready(state)
      spans.append(Span("prefill", began, time.perf_counter(), 0.0))
    prompt_routes = dict(routes_of(prompts, lambda prompt: len(self._prompts[prompt])))
    drawn = lambda place: len(self._requests[place].tokens)
    read_routes = [(self._requests[place], x) for place, x in routes_of(resumed, drawn)]
    began = time.perf_counter()
    of_slot = [self._requests.get((i, j)) for i, j in scheduler.slots.completions.tolist()]
    refills = some_wait or scheduler.has_waiting or self._have_joined
    limits = self._pace.limits(inputs, refills)
    sampling = self._sampling_params or _row_sampling(of_slot)
    self._state, chunk = self._programs.decode(self._params, state, inputs, *limits, sampling)
    chunk = jax.device_get(chunk)
    ended_at = time.perf_counter()
    counts, finished = up_to_stop_strings(of_slot, chunk)
    steps = int(chunk.mask.any(1).sum())
    self._pace.observe(ended_at - began, steps)
    in_chunk = np.asarray([counts.sum(), steps])
    spans.append(Span("decode", began, ended_at, _busy(*in_chunk, self._slots)))
    self._tokens_and_steps += in_chunk
    before = inputs.generated
    ended = inputs.active & (finished | (before + counts >= inputs.max_tokens))
    got = [x if active else None for x, active in zip(of_slot, inputs.active, strict=True)]
    scheduler.advance(counts, ended)
    for slot in np.flatnonzero(ended):
      del self._requests[of_slot[slot].place]
    busy = _busy(*self._tokens_and_steps, self._slots)
    self.statistics = {"sampling/slots_busy": busy, **scheduler.space.statistics()}
    return Progress(got, before, counts, finished, ended, chunk, spans, prompt_routes, read_routes)

  def _prefill(
    self, keep_slots: bool
  ) -> tuple[SamplerState, bool, list[RoutesRead], list[RoutesRead]]:
    """Gives slots to requests that wait, reads their tokens, and makes space for the next chunk.

    Returns:
      The state, whether anything was read, and the routes of prompts and of requests.
    """
    programs = self._programs
    scheduler = self._scheduler
    longest = self._longest_prompt or max(
      len(self._prompts[prompt]) for prompt, _ in self._requests
    )
    if self._state is None:
      sampling_params = self._sampling_params or SamplingParams()
      self._state = programs.new_state(scheduler, longest, sampling_params)
    before = self._state
    if self._longest_prompt is None:
      self._needed.append(len(self._requests))
      before = programs.fit(before, scheduler, self._needed, longest)
    state, prompts = self._reader.read_prompts(before, self._prompts)
    state, resumed = self._reader.read_resumed(state, self._sequence)
    state_changed = state is not before
    return programs.resize(state, scheduler, keep_slots), state_changed, prompts, resumed

  def _place(self, request: Request, prompt: int, index: int) -> None:
    request.place = (prompt, index)
    self._requests[request.place] = request

  def _sequence(self, prompt: int, index: int) -> list[int]:
    """Returns the tokens of a request with its prompt."""
    return [*self._prompts[prompt], *map(int, self._requests[prompt, index].tokens)]


def up_to_stop_strings(
  requests: Sequence[Request | None], chunk: Chunk
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens i32[s] of each slot up to a stop string, and whether it has finished."""
  counts = chunk.mask.sum(0, dtype=np.int32)
  finished = chunk.stopped.copy()
  for slot, request in enumerate(requests):
    if request and request.search and counts[slot]:
      end = request.search.add(chunk.tokens[: counts[slot], slot].tolist())
      if end is not None:
        counts[slot] = end
        finished[slot] = True
  return counts, finished


def _row_sampling(requests: Sequence[Request | None]) -> RowSampling:
  rows = [request.sampling if request else IDLE_SAMPLING for request in requests]
  temperature, top_k, top_p, min_p = zip(*rows, strict=True)
  return RowSampling(
    np.asarray(temperature, np.float32),
    np.asarray(top_k, np.int32),
    np.asarray(top_p, np.float32),
    np.asarray(min_p, np.float32),
    np.bool_(any(request.wants_alternatives for request in requests if request)),
  )


def _busy(tokens: int, steps: int, slots: int) -> float:
  """Returns the share of the slots' steps that drew a token of a completion."""
  return int(tokens) / (slots * int(steps))
