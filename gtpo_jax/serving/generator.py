"""The thread that generates: it passes requests on to a session, and what they get to clients.

Texts are scored too: the log-prob of every token given those before it, as harnesses ask.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts, array_lengths
from gtpo_jax.models.decode import DecodeParams, next_logits, sequence_states
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import batch_shards
from gtpo_jax.sampling.completion import Completion
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import Alternatives, alternatives
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.sampling.session import Pace, Session
from gtpo_jax.serving.choices import FAILED, Part

# What comes waits for the end of a chunk, so a chunk has fewer tokens if these take longer.
CHUNK_S = 0.2
# Without such a limit, what comes in the middle of a chunk waits long. So while nothing runs, a
# chunk begins once nothing has come for GRACE_S, or LONGEST_GRACE_S after the first request.
GRACE_S = 0.02
LONGEST_GRACE_S = 0.2
ROWS = 4  # texts that are scored together on a device, unless there is one
POSITIONS = 64  # of which logits exist at once


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedCompletion(Completion):
  """A completion that somebody waits for."""

  deliver: Callable[[Part], None]  # receives the parts, on the generator's thread
  # the policy, in the engine's layout; None for the generator's own
  params: DecodeParams | None = None
  cancelled: bool = False  # whether nobody waits for it any more


@dataclasses.dataclass(eq=False)
class ScoreJob:
  """A text to score."""

  tokens: Sequence[int]  # its ids
  # receives a `Part` with the log-probs of all tokens but the first, on the generator's thread;
  # one with the finish "error" if scoring failed
  deliver: Callable[[Part], None]
  params: DecodeParams | None = None  # as in `ServedCompletion`
  cancelled: bool = False  # whether nobody waits for it any more


class Full(Exception):
  """Raised when too many completions wait already."""


class Generator:
  """Generates completions on a thread of its own, with a session for each policy.

  Attributes:
    slots: the most completions that run at once; fewer if the memory does not hold them.
    counts: how many completions, tokens and so on there were, by name.
  """

  def __init__(
    self,
    engine: Engine,
    params: DecodeParams | None,
    max_waiting: int,
    chunk_s: float | None = CHUNK_S,
  ):
    """Args:
    engine: an engine with `Demand.serves`.
    params: the policy of completions that name no other, in its layout; None if all name one.
    max_waiting: the most completions that wait for a slot.
    chunk_s: as in `Pace`; it has no effect if the engine is batch-invariant.
    """
    self.slots = engine.programs.config.slots
    self.counts: collections.Counter[str] = collections.Counter()
    self._programs = engine.programs
    self._params = params
    self._scorer = Scorer(engine, params)
    self._max_waiting = max_waiting
    self._waiting: collections.deque[ServedCompletion] = collections.deque()
    self._scores: collections.deque[ScoreJob] = collections.deque()
    self._scoring: list[ScoreJob] = []
    self._running: dict[ServedCompletion, int] = {}  # each with the tokens that were delivered
    self._waits_for_more = chunk_s is None
    fixed = engine.programs.config.batch_invariant
    self._pace = Pace(engine.programs.chunk, chunk_s, fixed)
    self._sessions: dict[int, Session] = {}  # by the identity of their policies
    self._changed = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._run, name="gtpo generator", daemon=True)
    self._thread.start()

  @property
  def capacity(self) -> int:
    """The most completions that may run and wait at once."""
    return self.slots + self._max_waiting

  @property
  def running(self) -> int:
    """How many completions have a slot."""
    return len(self._running)

  @property
  def waiting(self) -> int:
    """How many completions and texts to score wait."""
    return len(self._waiting) + len(self._scores)

  def submit(
    self, completions: Sequence[ServedCompletion], scores: Sequence[ScoreJob] = ()
  ) -> None:
    """Adds completions, and texts to score, which are done first.

    Raises:
      Full: there is no space for all of them; none was added.
    """
    count = len(completions) + len(scores)
    with self._changed:
      if self.running + self.waiting + count > self.capacity:
        raise Full
      self._waiting.extend(completions)
      self._scores.extend(scores)
      self.counts["completions"] += len(completions)
      self.counts["prompt_tokens"] += sum(len(x.prompt.tokens) for x in completions)
      self._changed.notify()

  def cancel(self, jobs: Sequence[ServedCompletion | ScoreJob]) -> None:
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
        self._wait_for_more()
        if self._closed:
          return
      try:
        self._round()
      except Exception:  # of the devices: out of memory, for example
        print("gtpo: generation failed; its requests get an error", file=sys.stderr)
        traceback.print_exc()
        self._fail()

  def _wait_for_more(self) -> None:
    """While nothing runs, waits until requests that come together have come; see `GRACE_S`."""
    end = time.monotonic() + LONGEST_GRACE_S
    while self._waits_for_more and not self._running and time.monotonic() < end:
      before = self.waiting
      self._changed.wait(GRACE_S)
      if self._closed or self.waiting == before:
        return

  def _round(self) -> None:
    """Scores what waits, then generates one chunk."""
    with self._changed:
      scores = self._next_scores()
      self._scoring = scores
    if scores:
      self._scorer.run(scores)
      self.counts["scored_tokens"] += sum(len(job.tokens) for job in scores)
      self._scoring = []
    self._cancel()
    self._admit()
    with self._changed:
      some_wait = bool(self._waiting)
    for session in list(self._sessions.values()):
      self._chunk(session, some_wait)
    busy = {self._policy(completion) for completion in self._running}
    # The others are dropped, and their keys and values.
    self._sessions = {policy: x for policy, x in self._sessions.items() if policy in busy}

  def _next_scores(self) -> list[ScoreJob]:
    """Returns the next texts that are scored together: texts of one policy."""
    scores: list[ScoreJob] = []
    while self._scores and len(scores) < self._scorer.rows:
      job = self._scores[0]
      if scores and self._policy(job) != self._policy(scores[0]):
        break
      if scores and not self._scorer.fit_together(job, scores[0]):
        break
      scores.append(self._scores.popleft())
    return scores

  def _policy(self, job: ServedCompletion | ScoreJob) -> int:
    """Returns the identity of a job's policy."""
    return id(self._params if job.params is None else job.params)

  def _fail(self) -> None:
    """Ends everything that was under way with an error; the arrays may be gone."""
    failed = [*self._running, *self._scoring]
    self._running = {}
    self._scoring = []
    self._sessions = {}
    self.counts["failed"] += len(failed)
    for job in failed:
      job.deliver(FAILED)

  def _cancel(self) -> None:
    for completion in [x for x in self._running if x.cancelled]:
      self.counts["cancelled"] += 1
      session = self._sessions[self._policy(completion)]
      session.cancel(completion)
      session.forget(completion.prompt)
      del self._running[completion]

  def _admit(self) -> None:
    """Gives slots to completions that wait, in their order, as long as memory holds all."""
    with self._changed:
      size = lambda x: (len(x.prompt.tokens), x.limit)
      lengths = list(map(size, self._running))
      new: list[ServedCompletion] = []
      while self._waiting and len(lengths) < self.slots:
        lengths.append(size(self._waiting[0]))
        if len(lengths) > 1 and not self._programs.sizes.hold(lengths):
          break
        new.append(self._waiting.popleft())
      self._running |= dict.fromkeys(new, 0)  # if the next lines fail, they get an error
    for completion in new:
      policy = self._policy(completion)
      if policy not in self._sessions:
        params = self._params if completion.params is None else completion.params
        scheduler = self._programs.sizes.serving_scheduler()
        self._sessions[policy] = Session(self._programs, params, scheduler, self._pace)
      self._sessions[policy].submit(completion.prompt, [completion])

  def _chunk(self, session: Session, some_wait: bool) -> None:
    """Generates the next tokens of the completions of one policy."""
    if not session.busy:
      return
    ended = set(session.step(more_may_come=True, some_wait=some_wait))
    self.counts["chunks"] += 1
    for completion, delivered in list(self._running.items()):
      if completion.length > delivered or completion in ended:
        self.counts["generated_tokens"] += completion.length - delivered
        self._deliver(completion, delivered, completion in ended)
        if completion in ended:
          session.forget(completion.prompt)

  def _deliver(self, completion: ServedCompletion, delivered: int, ended: bool) -> None:
    """Delivers the tokens of a completion after the `delivered` first ones."""
    new = {name: x.tolist() for name, x in completion.arrays(delivered).items()}
    alternatives = zip(
      new.get("alternatives", ()), new.get("alternative_log_probs", ()), strict=True
    )
    finish = ("stop" if completion.finished else "length") if ended else ""
    if ended:
      del self._running[completion]
    else:
      self._running[completion] = completion.length
    completion.deliver(
      Part(new["tokens"], new["plain_log_probs"], list(alternatives), finish, new["entropy"])
    )


class Scorer:
  """The compiled programs, for a few lengths.

  Attributes:
    rows: how many texts are scored together.
  """

  def __init__(self, engine: Engine, params: DecodeParams | None):
    model = engine.model
    longest = min(engine.max_prompt_tokens + engine.max_tokens, model.config.max_length)
    self._shards = batch_shards(model.mesh)
    self.rows = ROWS * self._shards
    self._params = params
    self._pad = engine.pad
    self._fixed = engine.programs.config.batch_invariant
    self._widths = [-(-x // POSITIONS) * POSITIONS for x in array_lengths(longest)[::-2][::-1]]
    self._score = jax.jit(functools.partial(_score, model))

  def fit_together(self, job: ScoreJob, other: ScoreJob) -> bool:
    """Whether two texts of one policy may be scored together."""
    return not self._fixed or self._width(job) == self._width(other)

  def _width(self, *jobs: ScoreJob) -> int:
    longest = max(len(job.tokens) for job in jobs)
    return next(width for width in self._widths if width >= longest)

  def run(self, jobs: Sequence[ScoreJob]) -> None:
    """Scores at most `rows` texts with the policy of the first, and delivers the results."""
    params = jobs[0].params or self._params
    rows = self._shards if len(jobs) <= self._shards and not self._fixed else self.rows
    ids = [job.tokens for job in jobs] + [[self._pad]] * (rows - len(jobs))
    width = self._width(*jobs)
    log_probs, others = jax.device_get(self._score(params, pad_prompts(ids, width, self._pad)))
    for i, job in enumerate(jobs):
      last = slice(width - len(job.tokens), width - 1)  # what predicts the second token, and so on
      tops = zip(others.tokens[i, last].tolist(), others.log_probs[i, last].tolist(), strict=True)
      job.deliver(Part(list(job.tokens[1:]), log_probs[i, last].tolist(), list(tops), "stop"))


def _score(
  model: Transformer, params: DecodeParams, texts: Prompts
) -> tuple[jax.Array, Alternatives]:
  """Returns for each position of texts [b, w] the log-prob of the next token, and alternatives."""
  hidden = sequence_states(model, params, texts)
  b, w, d = hidden.shape
  following = jnp.roll(texts.tokens, -1, axis=1)

  def part(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Alternatives]:
    hidden, following = inputs  # [b, POSITIONS, ...]
    logits = next_logits(model, params, hidden.reshape(-1, d))
    normaliser = jax.nn.logsumexp(logits, -1)
    at = jnp.take_along_axis(logits, following.reshape(-1, 1), -1)[:, 0]
    split = lambda x: x.reshape(b, POSITIONS, *x.shape[1:])
    return jax.tree.map(split, (at - normaliser, alternatives(logits, normaliser)))

  parts = lambda x: jnp.moveaxis(x.reshape(b, w // POSITIONS, POSITIONS, *x.shape[2:]), 1, 0)
  scored = jax.lax.map(part, (parts(hidden), parts(following)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, w, *x.shape[3:]), scored)
