"""The one loop that decodes: completions come at any time, and all that run get tokens together.

What a completion draws depends on the parameters, its tokens and its key. It does not depend on its
slot, on the mesh or on other completions.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.chunk import Chunk
from gtpo_jax.sampling.completion import Completion, Prompt
from gtpo_jax.sampling.filters import PLAIN, RowSampling
from gtpo_jax.sampling.prefill.batches import RoutesRead, routes_of
from gtpo_jax.sampling.prefill.reading import Reader
from gtpo_jax.sampling.programs import Programs, SamplerState
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import DecodeInputs
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.sampling.spans import Span

# While completions wait, or join their prompts again, a chunk ends once 1/8 of the active slots
# have finished. With a smaller fraction the host round trips cost more than they gain; with a
# larger one too many slots idle.
REFILL_FRACTION = 8
MEASURED_CHUNKS = 4  # the fastest of the last ones counts: others may have compiled
# Slots are dropped once so many chunks in a row have not needed them.
PATIENCE = 16


class Pace:
  """Decides where chunks end, and nothing else does."""

  def __init__(self, most_tokens: int, chunk_s: float | None = None, fixed: bool = False):
    """Args:
    most_tokens: the most tokens of a chunk.
    chunk_s: for completions that come at any time, seconds after which a chunk ends, because what
      comes waits for that; None for chunks that depend on the completions only.
    fixed: whether all chunks have `most_tokens`. Keys of a chunk and earlier ones are summed one
      after another, so what a completion draws depends on the ends of its chunks, in rounding.
    """
    self._fixed = fixed
    self._most_tokens = most_tokens
    self._chunk_s = chunk_s
    self._token_s: collections.deque[float] = collections.deque(maxlen=MEASURED_CHUNKS)

  def limits(self, inputs: DecodeInputs, refills: bool) -> tuple[int, int]:
    """Returns the most tokens of the next chunk, and how many finished slots end it.

    Args:
      inputs: of the chunk.
      refills: whether finished slots get other completions; without them, all slots may finish.
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
  """Completions that are sampled together, from one set of parameters. It belongs to one thread."""

  def __init__(
    self,
    programs: Programs,
    params: DecodeParams,
    scheduler: Scheduler,
    pace: Pace,
    sampling_params: SamplingParams | None = None,
    longest_prompt: int | None = None,
    spans: collections.deque[Span] | None = None,
    statistics: dict[str, float] | None = None,
  ):
    """Args:
    programs: of the engine.
    params: the policy, in its layout.
    scheduler: an empty schedule, from `programs`.
    pace: decides where chunks end.
    sampling_params: how tokens are drawn; None if each completion says it.
    longest_prompt: the most tokens of a prompt; None to follow what runs, see `Programs.fit`.
    spans: receives when prompts were prefilled and chunks were decoded.
    statistics: receives metrics by name, of how well slots and pages were used.
    """
    self.statistics = {} if statistics is None else statistics
    self._spans = collections.deque(maxlen=0) if spans is None else spans
    self._programs = programs
    self._params = params
    self._scheduler = scheduler
    self._reader = Reader(programs, params, scheduler)
    self._pace = pace
    self._sampling_params = sampling_params
    self._longest_prompt = longest_prompt
    self._state: SamplerState | None = None
    self._prompts: dict[int, Prompt] = {}  # by the scheduler's numbers
    self._numbers: dict[Prompt, int] = {}
    self._added = 0
    self._in_flight: dict[tuple[int, int], Completion] = {}  # by the scheduler's places
    self._places: dict[Completion, tuple[int, int]] = {}
    self._had_ended: list[Completion] = []
    self._have_joined = False
    self._needed: collections.deque[int] = collections.deque(maxlen=PATIENCE)
    self._slots = len(scheduler.slots.active)
    self._tokens_and_steps = np.zeros(2, np.int64)

  @property
  def busy(self) -> bool:
    """Whether the next `step` returns or samples anything."""
    return bool(self._in_flight or self._had_ended)

  def submit(self, prompt: Prompt, completions: Iterable[Completion]) -> None:
    """Adds completions of a prompt behind the waiting ones.

    Completions that have tokens already resume after them, possibly with other parameters: these
    tokens are read in one pass. The next `step` returns completions that have ended already.
    """
    number = self._added
    self._added += 1
    self._prompts[number] = prompt
    self._numbers[prompt] = number
    new: list[Completion] = []
    for completion in completions:
      (new if completion.begin_turn() else self._had_ended).append(completion)
    self._scheduler.add(
      np.asarray([len(prompt.tokens)], np.int32),
      np.asarray([[completion.limit for completion in new]], np.int32),
      np.asarray([completion.key for completion in new], np.uint32).reshape(1, -1, 2),
      np.asarray([[completion.length for completion in new]], np.int32),
    )
    for index, completion in enumerate(new):
      self._place(completion, number, index)

  def had_ended(self) -> list[Completion]:
    """Returns the completions that had ended when they were submitted, once."""
    had_ended, self._had_ended = self._had_ended, []
    return had_ended

  def join(self, completion: Completion) -> None:
    """Adds the next turn of a completion, before everything that waits.

    Its prompt was submitted. It is read again only if the cache has given it up.
    """
    if not completion.begin_turn():
      self._had_ended.append(completion)
      return
    prompt = self._numbers[completion.prompt]
    index = self._scheduler.join(prompt, completion.length, completion.limit, completion.key)
    self._place(completion, prompt, index)
    self._have_joined = True

  def cancel(self, completion: Completion) -> None:
    """Removes a completion that has not ended; its slot is free."""
    place = self._places.pop(completion)
    held = (self._scheduler.slots.completions == place).all(1)
    if held.any():
      self._scheduler.advance(np.zeros(len(held), np.int32), held)
    else:
      self._scheduler.withdraw(*place)
    del self._in_flight[place]

  def forget(self, prompt: Prompt) -> None:
    """Forgets a prompt, whose completions have all ended and which no other one joins."""
    number = self._numbers.pop(prompt)
    del self._prompts[number]
    self._scheduler.forget(number)

  def step(self, more_may_come: bool = False, some_wait: bool = False) -> list[Completion]:
    """Appends a chunk of tokens to the completions in every slot; returns those that have ended.

    If completions had ended when they were submitted, it returns these and samples nothing.

    Args:
      more_may_come: whether slots that are idle now are kept for other completions.
      some_wait: whether others wait for a slot, which were not submitted yet.
    """
    if self._had_ended or not self._in_flight:
      return self.had_ended()
    scheduler = self._scheduler
    keep_slots = more_may_come or self._have_joined
    began = time.perf_counter()
    state, prefilled, prompts, resumed = self._prefill(keep_slots)
    inputs = scheduler.inputs()  # while the devices prefill
    if prefilled:
      jax.block_until_ready(state)
      self._spans.append(Span("prefill", began, time.perf_counter(), 0.0))
    for number, routes in routes_of(prompts, lambda number: len(self._prompts[number].tokens)):
      self._prompts[number].routes = routes
    for place, routes in routes_of(resumed, lambda place: self._in_flight[place].length):
      self._in_flight[place].keep_routes(routes)
    began = time.perf_counter()
    of_slot = [self._in_flight.get((i, j)) for i, j in scheduler.slots.completions.tolist()]
    refills = some_wait or scheduler.has_waiting or self._have_joined
    limits = self._pace.limits(inputs, refills)
    sampling = self._sampling_params or RowSampling.of(
      completion.sampling if completion else PLAIN for completion in of_slot
    )
    self._state, chunk = self._programs.decode(self._params, state, inputs, *limits, sampling)
    chunk = jax.device_get(chunk)
    ended_at = time.perf_counter()
    counts, finished = up_to_stop_strings(of_slot, chunk)
    steps = int(chunk.mask.any(1).sum())
    self._pace.observe(ended_at - began, steps)
    in_chunk = np.asarray([counts.sum(), steps])
    self._spans.append(Span("decode", began, ended_at, _busy(*in_chunk, self._slots)))
    self._tokens_and_steps += in_chunk
    ended = inputs.active & (finished | (inputs.generated + counts >= inputs.max_tokens))
    scheduler.advance(counts, ended)
    for slot in np.flatnonzero(inputs.active):
      of_slot[slot].draw(chunk, slot, int(counts[slot]), bool(finished[slot]))
    have_ended = [of_slot[slot] for slot in np.flatnonzero(ended)]
    for completion in have_ended:
      del self._in_flight[self._places.pop(completion)]
    self.statistics["sampling/slots_busy"] = _busy(*self._tokens_and_steps, self._slots)
    self.statistics |= scheduler.space.statistics()
    return have_ended

  def _prefill(
    self, keep_slots: bool
  ) -> tuple[SamplerState, bool, list[RoutesRead], list[RoutesRead]]:
    """Gives slots to waiting completions, reads their tokens, and makes space for the next chunk.

    Returns:
      The state, whether anything was read, and the routes of prompts and of completions.
    """
    programs = self._programs
    scheduler = self._scheduler
    longest = self._longest_prompt or max(len(x.prompt.tokens) for x in self._places)
    if self._state is None:
      sampling_params = self._sampling_params or SamplingParams()
      self._state = programs.new_state(scheduler, longest, sampling_params)
    before = self._state
    if self._longest_prompt is None:
      self._needed.append(len(self._in_flight))
      before = programs.fit(before, scheduler, self._needed, longest)
    ids = {number: prompt.tokens for number, prompt in self._prompts.items()}
    state, prompts = self._reader.read_prompts(before, ids)
    state, resumed = self._reader.read_resumed(state, self._sequence)
    state_changed = state is not before
    return programs.resize(state, scheduler, keep_slots), state_changed, prompts, resumed

  def _place(self, completion: Completion, prompt: int, index: int) -> None:
    self._places[completion] = (prompt, index)
    self._in_flight[prompt, index] = completion

  def _sequence(self, prompt: int, index: int) -> list[int]:
    """Returns the tokens of a completion with its prompt."""
    return [*self._prompts[prompt].tokens, *self._in_flight[prompt, index].tokens.tolist()]


def up_to_stop_strings(
  completions: Sequence[Completion | None], chunk: Chunk
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens i32[s] of each slot up to a stop string, and whether it has finished."""
  counts = chunk.mask.sum(0, dtype=np.int32)
  finished = chunk.stopped.copy()
  for slot, completion in enumerate(completions):
    if completion and completion.search and counts[slot]:
      end = completion.search.add(chunk.tokens[: counts[slot], slot].tolist())
      if end is not None:
        counts[slot] = end
        finished[slot] = True
  return counts, finished


def _busy(tokens: int, steps: int, slots: int) -> float:
  """Returns the share of the slots' steps that drew a token of a completion."""
  return int(tokens) / (slots * int(steps))
