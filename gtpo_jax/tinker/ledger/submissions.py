"""What clients ask for, from the arrival of a request to its result."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.tinker.ledger.book import Book
from gtpo_jax.tinker.ledger.client_sessions import Sessions
from gtpo_jax.tinker.ledger.entries import CREATE, LOAD, SAMPLE
from gtpo_jax.tinker.wire import ERROR, PROTO, Sample, StoredResult, Submission, read_samples

MAX_AHEAD = 4096  # numbers by which a request may be ahead of its model's next one


class Submissions:
  """The requests of a book: clients submit them and wait, threads take and finish them."""

  def __init__(self, book: Book, sessions: Sessions, most_samples: int):
    """Args:
    book: where they are written.
    sessions: the clients'.
    most_samples: how many samples may have no result yet.
    """
    self._book = book
    self._entries = book.entries
    self._sessions = sessions
    self._most_samples = most_samples
    self._events: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

  def submit(self, request: Submission) -> int:
    """Adds a request, unless it is known; returns what `Book.sync` must wait for.

    Raises:
      ApiError: its number is far ahead of its model's, or too many samples wait.
    """
    entries = self._entries
    with self._book.changed:
      if entries.knows(request):
        return self._book.size
      if request.op == SAMPLE and len(entries.samples) >= self._most_samples:
        raise ApiError(429, "the server is busy; try again later")
      queue = entries.queues.get(request.target)
      if queue is None and request.op not in (SAMPLE, CREATE, LOAD):
        raise ApiError(410, "there is no such model; create it again")
      if queue and not queue.next <= request.seq < queue.next + MAX_AHEAD:
        raise bad(f"seq_id {request.seq} is not near the model's next one", "seq_id")
      fields = {"id": request.id, "op": request.op, "target": request.target, "seq": request.seq}
      return self._book.write("request", request.body, **fields)

  def take(self) -> tuple[Submission, StoredResult | None] | None:
    """Waits for the next request of a model; None once the book is closed.

    Returns:
      The request, and its result if it is carried out again after a restart.
    """
    queues = self._entries.queues
    with self._book.changed:
      while not self._book.closed:
        for name, queue in queues.items():
          if queue.next in queue.waiting:
            queues[name] = queues.pop(name)  # the others come first next time
            request = queue.waiting[queue.next]
            return request, self._entries.results.get(request.id)
        self._book.changed.wait()
    return None

  def take_sample(self) -> Submission | None:
    """Waits for the next request to sample; None once the book is closed."""
    entries = self._entries
    with self._book.changed:
      while not self._book.closed:
        while entries.untaken:
          if request := entries.samples.get(entries.untaken.popleft()):
            return request
        self._book.changed.wait()
    return None

  def is_wanted(self, name: str) -> bool:
    """Whether a sample has no result yet, its session is not over, and the server does not end."""
    return name in self._entries.samples and not self._book.closed

  def finish(self, request: Submission, outcome: StoredResult) -> None:
    """Records a result, and tells whoever waits for it."""
    entries = self._entries
    with self._book.changed:
      session = entries.session_of(request.target)
      is_new = request.id not in entries.results and not session.finished
      if is_new:
        entropies = b"" if outcome.entropy is None else outcome.entropy.tobytes()
        fields = {"id": request.id, "as": outcome.kind, "fault": outcome.fault}
        body = outcome.body + entropies
        size = self._book.write_ahead("result", body, entropies=len(entropies) // 4, **fields)
    if is_new:
      self._book.sync(size)
    with self._book.changed:
      if is_new and not session.finished:
        entries.results.put(request.id, outcome)
      entries.samples.pop(request.id, None)
      if queue := entries.queues.get(request.target):
        queue.waiting.pop(request.seq, None)
        queue.next = max(queue.next, request.seq + 1)
      event = self._events.pop(request.id, None)
    if event:
      loop, ready = event
      with contextlib.suppress(RuntimeError):  # the server ends
        loop.call_soon_threadsafe(ready.set)

  def cancel(self, owner: str, name: Any) -> None:
    """Drops a request to sample that nobody waits for any more."""
    self._sessions.of(owner, name)
    with self._book.changed:
      request = self._entries.samples.get(name)
    if request:
      self.finish(request, StoredResult(ERROR, b"the request was cancelled", "user"))

  async def wait(self, owner: str, name: Any, seconds: float) -> StoredResult | None:
    """Returns what became of a request; None if nothing did within some seconds.

    Raises:
      ApiError: there is no such request, or its result was dropped.
    """
    self._sessions.of(owner, name)
    with self._book.changed:
      if result := self._entries.results.get(name):
        return result
      if not self._entries.is_pending(name):
        raise ApiError(410, "there is no such request, or its result is no longer kept")
      loop = asyncio.get_running_loop()
      _, ready = self._events.setdefault(name, (loop, asyncio.Event()))
    try:
      await asyncio.wait_for(ready.wait(), seconds)
    except TimeoutError:
      return None
    return self._entries.results.get(name)

  def saved(self, model: str, seq: int) -> None:
    """Notes that a model's state after a request is saved; the journal may forget earlier ones."""
    with self._book.changed:
      if model in self._entries.queues:
        self._entries.queues[model].snapshot = seq
      self._book.compact()

  def sampled(self, owner: str, sequence: str) -> Sample:
    """Returns a sampled sequence by its id.

    Raises:
      ApiError: there is none, or it is another client's, or no longer kept.
    """
    name, _, index = sequence.rpartition(":")
    session = self._entries.sessions.get(name.split(":")[0])
    outcome = self._entries.results.get(name)
    if not outcome or outcome.kind != PROTO or session.owner != owner or ":sample:" not in name:
      raise bad(f"there is no sample {sequence[:80]!r} here, or it is no longer kept")
    samples = read_samples(outcome.body, outcome.entropy)
    if not index.isdigit() or int(index) >= len(samples):
      raise bad(f"there is no sample {sequence[:80]!r}")
    return samples[int(index)]
