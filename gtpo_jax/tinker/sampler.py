"""Sampling for clients: from the base model, saved weights or live ones, all by one engine."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.completion import Prompt
from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.serving.generator import Full, Generator
from gtpo_jax.serving.jobs import ScoreJob, ServedCompletion
from gtpo_jax.serving.outputs import Part, new_search
from gtpo_jax.serving.requests import parse_object
from gtpo_jax.tinker.bodies import SamplingRequest
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.saved_weights import Spec, Store
from gtpo_jax.tinker.wire import (
  ERROR,
  MISSING,
  NO_TOKEN,
  PROTO,
  Sample,
  StoredResult,
  Submission,
  Top,
  refusal,
  sample_output,
)

RETRY_S = 0.05  # until the generator may have space again


class Policies:
  """Weights in the engine's layout, with adapters merged; those used last are kept."""

  def __init__(self, base: ServedBase, store: Store, most: int):
    self._base = base
    self._store = store
    self._most = most
    self._kept: collections.OrderedDict[str, DecodeParams] = collections.OrderedDict()

  def get(self, source: dict[str, Any]) -> DecodeParams:
    """Returns the weights that a sampler samples from.

    Raises:
      ApiError: they were deleted.
    """
    saved = None
    name = ""
    if source["run"]:
      saved = self._store.of_sampler(source)
      if saved is None:
        raise ApiError(410, "the weights of this sampler are gone; save them again")
      name = f"{saved.folder} {saved.about.created}"
    if name not in self._kept:
      while len(self._kept) >= self._most:
        self._kept.popitem(last=False)  # first, so that there is memory
      spec = saved.about.spec if saved else Spec("", 0)
      trained = self._base.read(spec, saved) if saved else None
      self._kept[name] = self._base.layout(spec, trained)
    self._kept.move_to_end(name)
    return self._kept[name]


class StopTokens:
  """Tokens that end a completion; the same as `StopStrings` and as its search."""

  def __init__(self, tokens: Sequence[int]):
    self._tokens = frozenset(tokens)

  def search(self) -> StopTokens:
    """Returns a search, which needs no state."""
    return self

  def add(self, tokens: Sequence[int]) -> int | None:
    """Returns how many of these tokens there are up to the first stop token; None without one."""
    found = (i for i, token in enumerate(tokens, 1) if token in self._tokens)
    return next(found, None)


class Pending:
  """A request under way: collects what arrives, on the generator's thread."""

  def __init__(self, ask: SamplingRequest, finish: Callable[[Pending], None]):
    """Args:
    ask: what was asked.
    finish: called once everything has arrived, or generation has failed.
    """
    self.ask = ask
    self.jobs: list[ServedCompletion | ScoreJob] = []
    self.failed = False
    self._parts: list[list[Part]] = [[] for _ in range(ask.count)]
    self._scored: Part | None = None
    self._finish = finish
    self._ended = 0

  def deliver(self, index: int, part: Part) -> None:
    """Takes the next tokens of a sample, or with index -1 the log-probs of the prompt."""
    if index < 0:
      self._scored = part
    else:
      self._parts[index].append(part)
    if not part.finish:
      return
    self._ended += 1
    self.failed |= part.finish == "error"
    if self._ended == len(self.jobs):
      self._finish(self)

  def outcome(self) -> StoredResult:
    """Returns the result."""
    if self.failed:
      return StoredResult(ERROR, b"the server has failed to sample; its log says why", "server")
    ask = self.ask
    samples = [_sample(parts, ask.top) for parts in self._parts]
    log_probs, top = None, None
    if ask.scores or ask.prompt_top:
      log_probs, top = self._of_prompt()
    body = sample_output(samples, log_probs if ask.scores else None, top)
    return StoredResult(PROTO, body, entropy=np.concatenate([x.entropy for x in samples]))

  def _of_prompt(self) -> tuple[np.ndarray, Top | None]:
    ask = self.ask
    size = len(ask.prompt)
    first = 1 if ask.last is None else size - ask.last
    log_probs = np.full(size, MISSING)
    tokens = np.zeros((size, ask.prompt_top), np.int32)
    others = np.full((size, ask.prompt_top), NO_TOKEN)
    if self._scored is not None:
      log_probs[first:] = self._scored.log_probs[first - 1 :]
      for i, (ids, values) in enumerate(self._scored.alternatives, 1):
        if i >= first:
          tokens[i] = ids[: ask.prompt_top]
          others[i] = values[: ask.prompt_top]
    return log_probs, Top(tokens, others) if ask.prompt_top else None


def _sample(parts: Sequence[Part], top: int) -> Sample:
  join = lambda name, dtype: np.asarray([x for part in parts for x in getattr(part, name)], dtype)
  alternatives = [x for part in parts for x in part.alternatives]
  found = None
  if top:
    ids = np.asarray([ids[:top] for ids, _ in alternatives], np.int32).reshape(-1, top)
    values = np.asarray([values[:top] for _, values in alternatives], np.float32)
    found = Top(ids, values.reshape(-1, top))
  return Sample(
    join("tokens", np.int32),
    join("log_probs", np.float32),
    join("entropy", np.float32),
    bool(parts) and parts[-1].finish == "stop",
    found,
  )


class Sampler:
  """Passes requests of a ledger on to a generator."""

  def __init__(self, base: ServedBase, ledger: Ledger, policies: Policies, generator: Generator):
    """Args:
    base: the model that others begin with.
    ledger: the requests.
    policies: what is sampled from.
    generator: an engine's.
    """
    self._base = base
    self._ledger = ledger
    self._policies = policies
    self._generator = generator
    self._pending: dict[str, Pending] = {}
    self._recorder = concurrent.futures.ThreadPoolExecutor(1, "gtpo recorder")
    self._thread = threading.Thread(target=self._run, name="gtpo sampler", daemon=True)
    self._thread.start()

  @property
  def capacity(self) -> int:
    """The most samples that may run and wait at once."""
    return self._generator.capacity

  def close(self) -> None:
    """Waits until the thread has ended, once the ledger is closed."""
    self._thread.join()
    self._recorder.shutdown()

  def cancel(self, name: str) -> None:
    """Ends the samples of a request that nobody waits for any more."""
    if pending := self._pending.pop(name, None):
      self._generator.cancel(pending.jobs)

  def _run(self) -> None:
    while request := self._ledger.take_sample():
      try:
        self._start(request)
      except Exception as error:
        self._ledger.finish(request, refusal(error, "sampling"))

  def _start(self, request: Submission) -> None:
    source = self._ledger.sampler(request.target)
    if source is None:
      return  # its session is over
    seed = self._ledger.seed_for(request.target, request.seq)
    ask = SamplingRequest(self._base, parse_object(request.body), seed, self.capacity)
    params = self._policies.get(source)
    pending = Pending(ask, lambda x: self._recorder.submit(self._record, request, x))
    pending.jobs = self._jobs(ask, params, pending)
    if not pending.jobs:
      self._record(request, pending)
      return
    self._pending[request.id] = pending
    self._submit(request, pending.jobs)

  def _jobs(
    self, ask: SamplingRequest, params: DecodeParams, pending: Pending
  ) -> list[ServedCompletion | ScoreJob]:
    jobs: list[ServedCompletion | ScoreJob] = []
    if (ask.scores or ask.prompt_top) and len(ask.prompt) > 1:
      jobs.append(ScoreJob(ask.prompt, functools.partial(pending.deliver, -1), params))
    if not ask.limit:
      return jobs
    keys = self._base.worker.engine.completion_keys(jax.random.key(ask.seed), 1, ask.count)[0]
    stop = None
    if ask.stop and isinstance(ask.stop[0], str):
      stop = new_search(self._base.worker.chat, ask.stop)
    elif ask.stop:
      stop = StopTokens(ask.stop)
    for i, key in enumerate(keys):
      jobs.append(
        ServedCompletion(
          prompt=Prompt(ask.prompt),
          key=np.asarray(key),
          limit=ask.limit,
          sampling=ask.sampling,
          wants_alternatives=bool(ask.top),
          stop=stop,
          deliver=functools.partial(pending.deliver, i),
          params=params,
        )
      )
    return jobs

  def _submit(self, request: Submission, jobs: Sequence[ServedCompletion | ScoreJob]) -> None:
    """Submits jobs, as soon as the generator has space."""
    completions = [job for job in jobs if isinstance(job, ServedCompletion)]
    scores = [job for job in jobs if isinstance(job, ScoreJob)]
    while self._ledger.is_wanted(request.id):
      try:
        self._generator.submit(completions, scores)
        return
      except Full:
        time.sleep(RETRY_S)

  def _record(self, request: Submission, pending: Pending) -> None:
    self._pending.pop(request.id, None)
    self._ledger.finish(request, pending.outcome())
