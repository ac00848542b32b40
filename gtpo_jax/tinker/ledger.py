"""Who asked for what, and what became of it: sessions, queues by model, results; all journalled.

A request has the same id whenever it is sent again, so it is carried out once. Requests of a model
are carried out in the order of their numbers, in whatever order they arrive. After a restart, a
model's requests since its last snapshot are carried out again; the same programs give the same
bits, and results that clients may have seen already are kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.storage.record_log import Record, RecordLog
from gtpo_jax.tinker.wire import (
  ERROR,
  PROTO,
  ClientSession,
  Sample,
  StoredResult,
  Submission,
  read_samples,
)

MOST_RESULT_BYTES = 512 << 20  # of results that are kept
COMPACT_BYTES = 1 << 30  # a journal of this size is rewritten
GONE_S = 600  # without a sign of life, a session's models may give up their places
MAX_AHEAD = 4096  # numbers by which a request may be ahead of its model's next one
LARGEST_SEQ = 2**63  # of the numbers that clients give
SAMPLE = "asample"
CREATE, LOAD = "create_model", "load_weights"


class Queue:
  """The requests of a model.

  Attributes:
    session: whose it is.
    next: the number of the request that is carried out next.
    snapshot: that of the last one whose effect is saved; -1 for none.
    waiting: requests that have arrived, by number.
  """

  def __init__(self, session: ClientSession, snapshot: int):
    self.session = session
    self.snapshot = snapshot
    self.next = snapshot + 1
    self.waiting: dict[int, Submission] = {}


class Ledger:
  """The books of a server.

  Attributes:
    queues: the models of sessions that are not finished, by id.
    samplers: what each sampling session samples from, by id.
    specs: what clients have asked models to be, by id.
    closed: whether the server ends.
  """

  def __init__(self, file: Path, seed: int, most_samples: int, snapshot_of: Callable[[str], int]):
    """Args:
    file: the journal.
    seed: of requests that have none.
    most_samples: how many samples may have no result yet.
    snapshot_of: returns the number of the last request of a model whose effect is saved.
    """
    self._journal = RecordLog(file)
    self._seed = seed
    self._most_samples = most_samples
    self._snapshot_of = snapshot_of
    self._lock = threading.RLock()
    self._work = threading.Condition(self._lock)
    self._sessions: dict[str, ClientSession] = {}
    self.queues: dict[str, Queue] = {}
    self.samplers: dict[str, dict[str, Any]] = {}
    self.specs: dict[str, dict[str, Any]] = {}
    self._outcomes: collections.OrderedDict[str, StoredResult] = collections.OrderedDict()
    self._outcome_bytes = 0
    self._samples: dict[str, Submission] = {}  # those without an outcome
    self._dropped: set[str] = set()  # cancelled
    self._events: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
    self._order: collections.deque[str] = collections.deque()
    self._compact_at = COMPACT_BYTES
    self.closed = False
    with self._lock:
      for record in self._journal.records():
        self._replay(record)
    self._journal.rewrite(self._is_needed)

  def _replay(self, record: Record) -> None:
    head = record.head
    kind = head["kind"]
    if kind == "session":
      self._sessions[head["id"]] = ClientSession(head["id"], head["owner"])
    elif kind == "use":
      self._sessions[head["id"]].number = head["number"]
    elif kind == "finish":
      self._forget(head["id"])
    elif kind == "sampler":
      self.samplers[head["id"]] = head["source"]
    elif kind == "spec":
      self.specs[head["id"]] = head["spec"]
    elif kind == "request":
      self._add(Submission(head["id"], head["op"], head["target"], head["seq"], record.body))
    elif kind == "result":
      count = head.get("entropies", 0)
      entropy = np.frombuffer(record.body[len(record.body) - 4 * count :], np.float32)
      body = record.body[: len(record.body) - 4 * count]
      self._store(head["id"], StoredResult(head["as"], body, head["fault"], entropy))
      self._samples.pop(head["id"], None)

  # Sessions.

  def open_session(self, owner: str) -> tuple[ClientSession, int]:
    """Begins a session of the client with a key; also returns what `sync` must wait for."""
    with self._lock:
      session = ClientSession(secrets.token_hex(8), owner)
      self._sessions[session.id] = session
      return session, self._write("session", id=session.id, owner=owner)

  def use(self, session: ClientSession) -> None:
    """Numbers a session that gets a model or a sampler. One that is never used has no number."""
    with self._lock:
      if session.number < 0:
        session.number = sum(x.number >= 0 for x in self._sessions.values())
        self._write("use", id=session.id, number=session.number)

  def session(self, owner: str, name: Any) -> ClientSession:
    """Returns a client's session.

    Raises:
      ApiError: it has none of this name (410), or has finished it.
    """
    session = self._sessions.get(name) if isinstance(name, str) else None
    if session is None or session.owner != owner:
      raise ApiError(410, "there is no such session; start the client again")
    if session.finished:
      raise ApiError(410, "this session is finished")
    session.seen = time.monotonic()
    return session

  def finish_session(self, owner: str, name: str) -> None:
    """Ends a session; its models are dropped, and what they have saved stays."""
    session = self.session(owner, name)
    with self._lock:
      self._write("finish", id=session.id)
      self._forget(session.id)

  def session_of(self, owner: str, name: Any) -> ClientSession:
    """Returns the session of a client's model or sampler.

    Raises:
      ApiError: there is none.
    """
    return self.session(owner, name.split(":")[0] if isinstance(name, str) else None)

  def _forget(self, name: str) -> None:
    self._sessions[name].finished = True
    for names in (self.queues, self.samplers, self.specs, self._samples, self._outcomes):
      for other in [x for x in names if x.split(":")[0] == name]:
        del names[other]
    self._outcome_bytes = sum(len(x.body) for x in self._outcomes.values())

  def drop_silent(self) -> None:
    """Ends the sessions with models whose clients have not been heard of for long."""
    now = time.monotonic()
    for session in {x.session.id: x.session for x in self.queues.values()}.values():
      if now - session.seen > GONE_S:
        self.finish_session(session.owner, session.id)

  def submit(self, request: Submission) -> int:
    """Adds a request, unless it is known; returns what `sync` must wait for.

    Raises:
      ApiError: its number is far ahead of its model's, or too many samples wait.
    """
    with self._lock:
      if self._knows(request):
        return self._journal.size
      if request.op == SAMPLE and len(self._samples) >= self._most_samples:
        raise ApiError(429, "the server is busy; try again later")
      queue = self.queues.get(request.target)
      if queue is None and request.op not in (SAMPLE, CREATE, LOAD):
        raise ApiError(410, "there is no such model; create it again")
      if queue and not queue.next <= request.seq < queue.next + MAX_AHEAD:
        raise bad(f"seq_id {request.seq} is not near the model's next one", "seq_id")
      self._add(request)
      fields = {"id": request.id, "op": request.op, "target": request.target, "seq": request.seq}
      return self._write("request", request.body, **fields)

  def sync(self, size: int) -> None:
    """Returns once what was written before is on disk."""
    self._journal.sync(size)

  def seed_for(self, target: str, seq: int) -> int:
    """Returns the seed of a request that has none, below 2**32.

    It is the same whenever the same requests are made of a server, which has the same seed. The
    number of a sampler is not part of it: clients take another one when they repeat a request.
    """
    session, _, rest = target.partition(":")
    rest = self.samplers.get(target, {}).get("saved_by", rest)
    number = self._sessions[session].number
    digest = hashlib.sha256(f"{self._seed} {number} {rest} {seq}".encode()).digest()
    return int.from_bytes(digest[:4], "little")

  def describe(self, model: str, spec: dict[str, Any]) -> None:
    """Notes what a client has asked a model to be; the request itself follows."""
    with self._lock:
      if model not in self.specs:
        self.specs[model] = spec
        self._write("spec", id=model, spec=spec)

  def add_sampler(self, name: str, source: dict[str, Any]) -> None:
    """Adds a sampling session."""
    with self._lock:
      if name not in self.samplers:
        self.samplers[name] = source
        self.sync(self._write("sampler", id=name, source=source))

  def _knows(self, request: Submission) -> bool:
    if request.id in self._outcomes or request.id in self._samples:
      return True
    queue = self.queues.get(request.target)
    return bool(queue) and (request.seq < queue.next or request.seq in queue.waiting)

  def _add(self, request: Submission) -> None:
    if request.op == SAMPLE:
      self._samples[request.id] = request
      self._order.append(request.id)
    else:
      if request.op in (CREATE, LOAD) and request.target not in self.queues:
        session = self._sessions[request.target.split(":")[0]]
        self.queues[request.target] = Queue(session, self._snapshot_of(request.target))
      queue = self.queues[request.target]
      if request.seq >= queue.next:
        queue.waiting[request.seq] = request
    self._work.notify_all()

  def take(self) -> tuple[Submission, StoredResult | None] | None:
    """Waits for the next request of a model; None once the ledger is closed.

    Returns:
      The request, and its result if it is carried out again after a restart.
    """
    with self._work:
      while not self.closed:
        for name, queue in self.queues.items():
          if queue.next in queue.waiting:
            self.queues[name] = self.queues.pop(name)  # the others come first next time
            request = queue.waiting[queue.next]
            return request, self._outcomes.get(request.id)
        self._work.wait()
    return None

  def take_sample(self) -> Submission | None:
    """Waits for the next request to sample; None once the ledger is closed."""
    with self._work:
      while not self.closed:
        while self._order:
          if request := self._samples.get(self._order.popleft()):
            return request
        self._work.wait()
    return None

  def finish(self, request: Submission, outcome: StoredResult) -> None:
    """Records a result, and tells those that wait for it."""
    with self._lock:
      session = self._sessions[request.target.split(":")[0]]
      is_new = request.id not in self._outcomes and not session.finished
      if is_new:
        entropies = b"" if outcome.entropy is None else outcome.entropy.tobytes()
        fields = {"id": request.id, "as": outcome.kind, "fault": outcome.fault}
        body = outcome.body + entropies
        size = self._write("result", body, entropies=len(entropies) // 4, **fields)
    if is_new:
      self.sync(size)
    with self._lock:
      if is_new and not session.finished:
        self._store(request.id, outcome)
      self._samples.pop(request.id, None)
      if queue := self.queues.get(request.target):
        queue.waiting.pop(request.seq, None)
        queue.next = max(queue.next, request.seq + 1)
      event = self._events.pop(request.id, None)
    if event:
      loop, ready = event
      with contextlib.suppress(RuntimeError):  # the server ends
        loop.call_soon_threadsafe(ready.set)

  def saved(self, model: str, seq: int) -> None:
    """Notes that a model's state after a request is saved; the journal may forget earlier ones."""
    with self._lock:
      if model in self.queues:
        self.queues[model].snapshot = seq
      if self._journal.size > self._compact_at:
        self._journal.rewrite(self._is_needed)
        self._compact_at = max(COMPACT_BYTES, 2 * self._journal.size)

  async def wait(self, owner: str, name: Any, seconds: float) -> StoredResult | None:
    """Returns what became of a request; None if nothing did within some seconds.

    Raises:
      ApiError: there is no such request, or its result was dropped.
    """
    self.session_of(owner, name)
    with self._lock:
      if name in self._outcomes:
        return self._outcomes[name]
      if not self._is_pending(name):
        raise ApiError(410, "there is no such request, or its result is no longer kept")
      loop = asyncio.get_running_loop()
      _, ready = self._events.setdefault(name, (loop, asyncio.Event()))
    try:
      await asyncio.wait_for(ready.wait(), seconds)
    except TimeoutError:
      return None
    return self._outcomes.get(name)

  def _is_pending(self, name: str) -> bool:
    waiting = (x.id for queue in self.queues.values() for x in queue.waiting.values())
    return name in self._samples or name in waiting

  def cancel(self, owner: str, name: Any) -> None:
    """Drops a request to sample that nobody waits for any more."""
    self.session_of(owner, name)
    with self._lock:
      request = self._samples.get(name)
    if request:
      self.finish(request, StoredResult(ERROR, b"the request was cancelled", "user"))

  def is_wanted(self, name: str) -> bool:
    """Whether a sample has no result yet, and its session is not over."""
    return name in self._samples

  def sample(self, owner: str, sequence: str) -> Sample:
    """Returns a sampled sequence by its id.

    Raises:
      ApiError: there is none, or it is another client's, or no longer kept.
    """
    name, _, index = sequence.rpartition(":")
    session = self._sessions.get(name.split(":")[0])
    outcome = self._outcomes.get(name)
    if not outcome or outcome.kind != PROTO or session.owner != owner or ":sample:" not in name:
      raise bad(f"there is no sample {sequence[:80]!r} here, or it is no longer kept")
    samples = read_samples(outcome.body, outcome.entropy)
    if not index.isdigit() or int(index) >= len(samples):
      raise bad(f"there is no sample {sequence[:80]!r}")
    return samples[int(index)]

  def _store(self, name: str, outcome: StoredResult) -> None:
    self._outcomes[name] = outcome
    self._outcome_bytes += len(outcome.body)
    while self._outcome_bytes > MOST_RESULT_BYTES and len(self._outcomes) > 1:
      _, old = self._outcomes.popitem(last=False)
      self._outcome_bytes -= len(old.body)

  def _is_needed(self, head: dict[str, Any]) -> bool:
    """Whether a record of the journal is still needed."""
    kind = head["kind"]
    if kind in ("session", "use", "finish"):
      return True  # numbers go on
    if self._sessions[head.get("target", head["id"]).split(":")[0]].finished:
      return False
    if kind == "result":
      return head["id"] in self._outcomes
    if kind == "request" and head["op"] == SAMPLE:
      return head["id"] in self._samples
    if kind == "request":
      # The first one says that there is the model.
      return head["seq"] == 0 or head["seq"] > self.queues[head["target"]].snapshot
    return True

  def _write(self, kind: str, body: bytes = b"", **fields: Any) -> int:
    return self._journal.append(Record({"kind": kind, **fields}, body))

  def close(self) -> None:
    """Ends the work."""
    with self._work:
      self.closed = True
      self._work.notify_all()

  def close_journal(self) -> None:
    """Closes the file, after the last result."""
    self._journal.close()
