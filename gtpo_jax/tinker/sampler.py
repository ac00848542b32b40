"""Sampling for clients: from the base model, saved weights or live ones, all by one engine."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.completion import Prompt
from gtpo_jax.sampling.filters import RowSampling
from gtpo_jax.serving.choices import NOTHING, Part, joined, new_search
from gtpo_jax.serving.generator import Full, Generator, ScoreJob, ServedCompletion
from gtpo_jax.serving.requests import ApiError, parse_object
from gtpo_jax.tinker.bodies import SampleBody, read_sample
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.saved_weights import Spec, Store
from gtpo_jax.tinker.schema import CLASSES, LENGTH, STOP
from gtpo_jax.tinker.wire import ERROR, PROTO, StoredResult, Submission, refusal, write_top

NO_TOKEN = -99999.0  # the log-prob in a cell without a token
RETRY_S = 0.05  # until the generator may have space again


class Policies:
  """Weights in the engine's layout, with adapters merged; those used last are kept."""

  def __init__(self, base: ServedBase, store: Store, most: int):
    self._base = base
    self._store = store
    self._most = most
    self._kept: collections.OrderedDict[str, DecodeParams] = collections.OrderedDict()

  def get(self, source: dict[str, Any]) -> DecodeParams:
    """Returns the weights that a sampler samples from."""
    saved = None
    name = ""
    if source["path"]:
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
  """A request under way: collects what arrives, on the generator's thread, then calls `finish`."""

  def __init__(self, body: SampleBody, finish: Callable[[Pending], None]):
    self.jobs: list[ServedCompletion | ScoreJob] = []
    self._body = body
    self._samples = [NOTHING] * body.num_samples
    self._scored = NOTHING
    self._finish = finish
    self._ended = 0
    self._failed = False

  def deliver(self, index: int, part: Part) -> None:
    """Takes the next tokens of a sample, or with index -1 the log-probs of the prompt."""
    if index < 0:
      self._scored = part
    else:
      self._samples[index] = joined(self._samples[index], part)
    if not part.finish:
      return
    self._ended += 1
    self._failed |= part.finish == "error"
    if self._ended == len(self.jobs):
      self._finish(self)

  def outcome(self) -> StoredResult:
    """Returns the result."""
    if self._failed:
      return StoredResult(ERROR, b"the server has failed to sample; its log says why", "server")
    message = CLASSES["SampleResponse"]()
    for sample in self._samples:
      sequence = message.sequences.add(
        stop_reason=STOP if sample.finish == "stop" else LENGTH,
        tokens=np.asarray(sample.tokens, np.int32).tobytes(),
        logprobs=np.asarray(sample.log_probs, np.float32).tobytes(),
      )
      if top := self._body.topk_sample_logprobs:
        write_top(sequence.topk_sampled_logprobs, sample.alternatives, top)
    # The first token of a prompt has no log-prob, and those before the last ones are not wanted.
    size, top = len(self._body.tokens), self._body.topk_prompt_logprobs
    kept = min(self._body.prompt_logprobs_last_n or size, len(self._scored.tokens))
    if self._body.prompt_logprobs:
      log_probs = np.full(size, np.nan, np.float32)
      log_probs[size - kept :] = self._scored.log_probs[len(self._scored.tokens) - kept :]
      message.prompt_logprobs = log_probs.tobytes()
    if top:
      alternatives = self._scored.alternatives[len(self._scored.alternatives) - kept :]
      none = ([0] * top, [NO_TOKEN] * top)
      write_top(message.topk_prompt_logprobs, [none] * (size - kept) + alternatives, top)
    entropy = np.asarray([x for sample in self._samples for x in sample.entropy], np.float32)
    return StoredResult(PROTO, message.SerializeToString(deterministic=True), entropy=entropy)


class Sampler:
  """Passes requests of a ledger on to a generator."""

  def __init__(self, base: ServedBase, ledger: Ledger, policies: Policies, generator: Generator):
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
    values = parse_object(request.body)
    body, limit = read_sample(values, self._base, self.capacity)
    params = self._policies.get(source)
    pending = Pending(body, lambda x: self._recorder.submit(self._record, request, x))
    scores = []
    if (body.prompt_logprobs or body.topk_prompt_logprobs) and len(body.tokens) > 1:
      scores = [ScoreJob(body.tokens, functools.partial(pending.deliver, -1), params)]
    completions = list(self._completions(request, body, limit, params, pending)) if limit else []
    pending.jobs = [*scores, *completions]
    if not pending.jobs:
      self._record(request, pending)
      return
    self._pending[request.id] = pending
    while self._ledger.is_wanted(request.id):
      try:
        self._generator.submit(completions, scores)
        return
      except Full:
        time.sleep(RETRY_S)

  def _completions(
    self, request: Submission, body: SampleBody, limit: int, params: DecodeParams, pending: Pending
  ) -> Iterator[ServedCompletion]:
    ask, prompt = body.sampling_params, body.tokens
    seed = self._ledger.seed_for(request.target, request.seq) if ask.seed is None else ask.seed
    keys = self._base.worker.engine.completion_keys(jax.random.key(seed), 1, body.num_samples)[0]
    stop = None
    if ask.stop and isinstance(ask.stop[0], str):
      stop = new_search(self._base.worker.chat, ask.stop)
    elif ask.stop:
      stop = StopTokens(ask.stop)
    for i, key in enumerate(keys):
      yield ServedCompletion(
        prompt=Prompt(prompt),
        key=np.asarray(key),
        limit=limit,
        sampling=RowSampling(
          ask.temperature,
          max(ask.top_k, 0),
          ask.top_p,
          lists_alternatives=bool(body.topk_sample_logprobs),
        ),
        stop=stop,
        deliver=functools.partial(pending.deliver, i),
        params=params,
      )

  def _record(self, request: Submission, pending: Pending) -> None:
    self._pending.pop(request.id, None)
    self._ledger.finish(request, pending.outcome())
