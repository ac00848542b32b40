"""The thread that generates: completions of all requests run together, and join between chunks.

What a completion draws depends on its prompt, its key and its own settings, not on the others.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.chunk import Chunk
from gtpo_jax.sampling.engine import REFILL_FRACTION, Engine
from gtpo_jax.sampling.filters import RowSampling
from gtpo_jax.sampling.schedule.slots import DecodeInputs
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.serving.jobs import Completion, ScoreJob
from gtpo_jax.serving.outputs import FAILED, Part
from gtpo_jax.serving.scorer import Scorer

# Slots are dropped once so many chunks in a row have not needed them.
PATIENCE = 16
# What comes waits for the end of a chunk, so a chunk has fewer tokens if these take longer.
CHUNK_S = 0.2
MEASURED_CHUNKS = 4  # the fastest of the last ones counts: others may have compiled


class Full(Exception):
  """Raised when too many completions wait already."""


class Generator:
  """Generates completions on a thread of its own.

  Attributes:
    slots: the completions that run at once.
    counts: how many completions, tokens and so on there were, by name.
  """

  def __init__(self, engine: Engine, params: DecodeParams, max_waiting: int):
    """Args:
    engine: an engine with `Demand.serves`.
    params: the policy, in its layout.
    max_waiting: the most completions that wait for a slot.
    """
    self.slots = engine.programs.longest_at_once
    self.counts: collections.Counter[str] = collections.Counter()
    self._programs = engine.programs
    self._params = params
    self._scorer = Scorer(engine, params)
    self._max_waiting = max_waiting
    self._waiting: collections.deque[Completion] = collections.deque()
    self._scores: collections.deque[ScoreJob] = collections.deque()
    self._scoring: list[ScoreJob] = []
    self._running: dict[int, Completion] = {}  # by the scheduler's number
    self._added = 0
    self._needed: collections.deque[int] = collections.deque(maxlen=PATIENCE)
    self._token_s: collections.deque[float] = collections.deque(maxlen=MEASURED_CHUNKS)
    self._scheduler: Any = None
    self._state: Any = None
    self._changed = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._run, name="gtpo generator", daemon=True)
    self._thread.start()

  @property
  def running(self) -> int:
    """How many completions have a slot."""
    return len(self._running)

  @property
  def waiting(self) -> int:
    """How many completions and texts to score wait."""
    return len(self._waiting) + len(self._scores)

  def submit(self, completions: Sequence[Completion], scores: Sequence[ScoreJob] = ()) -> None:
    """Adds completions, and texts to score, which are done first.

    Raises:
      Full: there is no space for all of them; none was added.
    """
    count = len(completions) + len(scores)
    with self._changed:
      if self.running + self.waiting + count > self.slots + self._max_waiting:
        raise Full
      self._waiting.extend(completions)
      self._scores.extend(scores)
      self.counts["completions"] += len(completions)
      self.counts["prompt_tokens"] += sum(len(x.prompt) for x in completions)
      self._changed.notify()

  def cancel(self, jobs: Sequence[Completion | ScoreJob]) -> None:
    """Ends what nobody waits for any more; slots are free after the current chunk."""
    with self._changed:
      for job in jobs:
        job.cancelled = True
      self._waiting = collections.deque(x for x in self._waiting if not x.cancelled)
      self._scores = collections.deque(x for x in self._scores if not x.cancelled)

  def close(self) -> None:
    """Ends the thread after the current chunk."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    self._thread.join()

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._closed or self.waiting or self._running)
        if self._closed:
          return
      try:
        self._round()
      except Exception:  # of the devices: out of memory, for example
        print("gtpo: generation failed; its requests get an error", file=sys.stderr)
        traceback.print_exc()
        self._fail()

  def _round(self) -> None:
    """Scores what waits, then generates one chunk."""
    with self._changed:
      scores = [self._scores.popleft() for _ in range(min(len(self._scores), self._scorer.rows))]
      self._scoring = scores
    if scores:
      self._scorer.run(scores)
      self.counts["scored_tokens"] += sum(len(job.tokens) for job in scores)
      self._scoring = []
    self._free_cancelled()
    self._admit()
    if self._running:
      self._chunk()
    if not self._running:
      self._scheduler = self._state = None

  def _fail(self) -> None:
    """Ends everything that was under way with an error; the arrays may be gone."""
    failed = [*self._running.values(), *self._scoring]
    self._running = {}
    self._scoring = []
    self._scheduler = self._state = None
    self.counts["failed"] += len(failed)
    for job in failed:
      job.deliver(FAILED)

  def _free_cancelled(self) -> None:
    if any(completion.cancelled for completion in self._running.values()):
      of_slot = self._of_slots()
      left = np.asarray([bool(x and x.cancelled) for x in of_slot])
      self.counts["cancelled"] += int(left.sum())
      self._leave(np.zeros(len(left), np.int32), left)

  def _admit(self) -> None:
    """Gives slots to completions that wait."""
    with self._changed:
      count = min(len(self._waiting), self.slots - self.running)
      new = [self._waiting.popleft() for _ in range(count)]
      numbers = range(self._added, self._added + count)
      self._running.update(zip(numbers, new, strict=True))
    if not new:
      return
    if self._scheduler is None:
      self._scheduler = self._programs.serving_scheduler()
      self._added = 0
      self._running = dict(enumerate(new))
    self._added += count
    self._scheduler.add(
      np.asarray([len(x.prompt) for x in new], np.int32),
      np.asarray([[x.limit] for x in new], np.int32),
      np.stack([x.key for x in new])[:, None],
    )

  def _chunk(self) -> None:
    """Generates the next tokens of all completions."""
    programs = self._programs
    scheduler = self._scheduler
    prompts = {number: x.prompt for number, x in self._running.items()}
    longest = max(map(len, prompts.values()))
    width = programs.prompt_width(longest)
    if self._state is None:
      self._state = programs.new_state(scheduler, width, SamplingParams())
    self._needed.append(len(self._running))
    state = programs.fit(self._state, scheduler, max(self._needed), longest)
    state = programs.prefill_assigned(self._params, state, scheduler, prompts, width)
    state = programs.resize(state, scheduler, keep_slots=True)
    inputs = scheduler.inputs()
    of_slot = self._of_slots()
    active = int(inputs.active.sum())
    with self._changed:
      some_wait = bool(self._waiting)
    most_finished = max(active // REFILL_FRACTION, 1) if some_wait else active
    began = time.perf_counter()
    self._state, chunk = programs.decode(
      self._params, state, inputs, self._chunk_tokens(inputs), most_finished, _row_sampling(of_slot)
    )
    chunk = jax.device_get(chunk)
    steps = max(int(chunk.mask.any(1).sum()), 1)
    self._token_s.append((time.perf_counter() - began) / steps)
    self.counts["chunks"] += 1
    tokens = np.zeros(len(of_slot), np.int32)
    left = np.zeros(len(of_slot), bool)
    for slot in np.flatnonzero(inputs.active):
      part = self._take(of_slot[slot], chunk, slot)
      tokens[slot] = len(part.tokens)
      left[slot] = bool(part.finish)
    self.counts["generated_tokens"] += int(tokens.sum())
    self._leave(tokens, left)

  def _chunk_tokens(self, inputs: DecodeInputs) -> int:
    """Returns the tokens of the next chunk: one if somebody waits for a first token."""
    if (inputs.active & inputs.is_new).any() or not self._token_s:
      return 1
    return int(np.clip(CHUNK_S / min(self._token_s), 1, self._programs.chunk))

  def _take(self, completion: Completion, chunk: Chunk, slot: int) -> Part:
    """Adds a chunk's tokens to a completion, up to its end, and delivers them."""
    steps = np.flatnonzero(chunk.mask[:, slot])
    before = len(completion.tokens)
    completion.tokens += chunk.tokens[steps, slot].tolist()
    finish = "stop" if chunk.stopped[slot] else ""
    if completion.search and len(steps):
      end = completion.search.end((0, 0), np.asarray(completion.tokens, np.int32))
      if end is not None:
        finish = "stop"
        del completion.tokens[end:]
        steps = steps[: end - before]
    if not finish and len(completion.tokens) >= completion.limit:
      finish = "length"
    alternatives = []
    if completion.wants_alternatives:
      ids, log_probs = (x[steps, slot].tolist() for x in chunk.alternatives)
      alternatives = list(zip(ids, log_probs, strict=True))
    log_probs = chunk.plain_log_probs[steps, slot].tolist()
    part = Part(completion.tokens[before:], log_probs, alternatives, finish)
    if part.tokens or finish:
      completion.deliver(part)
    return part

  def _leave(self, tokens: np.ndarray, left: np.ndarray) -> None:
    """Counts tokens i32[s], and frees the slots that completions have left, bool[s]."""
    numbers = self._scheduler.slots.completions[left, 0].tolist()
    self._scheduler.advance(tokens, left)
    for number in numbers:
      self._scheduler.forget(number)
      del self._running[number]

  def _of_slots(self) -> list[Completion | None]:
    """Returns the completion in each slot."""
    numbers = self._scheduler.slots.completions[:, 0].tolist()
    return [self._running.get(number) for number in numbers]


def _row_sampling(completions: Sequence[Completion | None]) -> RowSampling:
  rows = [x.sampling if x else (1.0, 0, 1.0, 0.0) for x in completions]
  temperature, top_k, top_p, min_p = zip(*rows, strict=True)
  return RowSampling(
    np.asarray(temperature, np.float32),
    np.asarray(top_k, np.int32),
    np.asarray(top_p, np.float32),
    np.asarray(min_p, np.float32),
    np.bool_(any(x.wants_alternatives for x in completions if x)),
  )
