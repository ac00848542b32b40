"""What the records of a journal say: sessions, queues by model, samplers and results."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.tinker.ledger.record_log import Record
from gtpo_jax.tinker.wire import ClientSession, StoredResult, Submission

MOST_RESULT_BYTES = 512 << 20  # of results that are kept
LARGEST_SEQ = 2**63  # of the numbers that clients give
SAMPLE = "asample"
CREATE, LOAD = "create_model", "load_weights"


class Queue:
  """The requests of a model.

  Attributes:
    session: whose it is.
    next: the number of the request that is carried out next.
    snapshot: the number of the last one whose effect is saved; -1 for none.
    waiting: requests that have arrived, by number.
  """

  def __init__(self, session: ClientSession, snapshot: int):
    self.session = session
    self.snapshot = snapshot
    self.next = snapshot + 1
    self.waiting: dict[int, Submission] = {}

  @property
  def owner(self) -> str:
    """The client whose model it is."""
    return self.session.owner


class Results:
  """The results of requests by id. The oldest give way to new ones when they have many bytes."""

  def __init__(self) -> None:
    self._kept: collections.OrderedDict[str, StoredResult] = collections.OrderedDict()
    self._bytes = 0

  def __contains__(self, name: str) -> bool:
    return name in self._kept

  def get(self, name: str) -> StoredResult | None:
    """Returns the result of a request; None if it has none, or no longer."""
    return self._kept.get(name)

  def put(self, name: str, result: StoredResult) -> None:
    """Adds a result."""
    self._kept[name] = result
    self._bytes += len(result.body)
    while self._bytes > MOST_RESULT_BYTES and len(self._kept) > 1:
      _, old = self._kept.popitem(last=False)
      self._bytes -= len(old.body)

  def forget(self, session: str) -> None:
    """Drops the results of a session."""
    _drop(self._kept, session)
    self._bytes = sum(len(x.body) for x in self._kept.values())


class Entries:
  """What is written in a journal.

  Attributes:
    sessions: all of them, by id.
    queues: the models of sessions that are not finished, by id.
    samplers: what each sampling session samples from, by id.
    specs: what clients have asked models to be, by id.
    samples: requests to sample that have no result yet, by id.
    untaken: the ids that nobody has taken, in their order.
    results: of all requests.
  """

  def __init__(self, snapshot_of: Callable[[str], int]):
    """Args:
    snapshot_of: returns the number of the last request of a model whose effect is saved.
    """
    self.sessions: dict[str, ClientSession] = {}
    self.queues: dict[str, Queue] = {}
    self.samplers: dict[str, dict[str, Any]] = {}
    self.specs: dict[str, dict[str, Any]] = {}
    self.samples: dict[str, Submission] = {}
    self.untaken: collections.deque[str] = collections.deque()
    self.results = Results()
    self._snapshot_of = snapshot_of

  def add(self, record: Record) -> None:
    """Adds what a record says."""
    head = record.head
    kind = head["kind"]
    if kind == "session":
      self.sessions[head["id"]] = ClientSession(head["id"], head["owner"])
    elif kind == "use":
      self.sessions[head["id"]].number = head["number"]
    elif kind == "finish":
      self._finish(head["id"])
    elif kind == "sampler":
      self.samplers[head["id"]] = head["source"]
    elif kind == "spec":
      self.specs[head["id"]] = head["spec"]
    elif kind == "request":
      self._enqueue(Submission(head["op"], head["target"], head["seq"], record.body))
    elif kind == "result":
      count = head.get("entropies", 0)
      entropy = np.frombuffer(record.body[len(record.body) - 4 * count :], np.float32)
      body = record.body[: len(record.body) - 4 * count]
      self.results.put(head["id"], StoredResult(head["as"], body, head["fault"], entropy))
      self.samples.pop(head["id"], None)

  def session_of(self, name: str) -> ClientSession:
    """Returns the session of a model, a sampler or a request."""
    return self.sessions[name.split(":")[0]]

  def knows(self, request: Submission) -> bool:
    """Whether a request has arrived before."""
    if request.id in self.results or request.id in self.samples:
      return True
    queue = self.queues.get(request.target)
    return bool(queue) and (request.seq < queue.next or request.seq in queue.waiting)

  def is_pending(self, name: str) -> bool:
    """Whether a request will have a result."""
    waiting = (x.id for queue in self.queues.values() for x in queue.waiting.values())
    return name in self.samples or name in waiting

  def needs(self, head: dict[str, Any]) -> bool:
    """Whether a record of the journal is still needed."""
    kind = head["kind"]
    if kind in ("session", "use", "finish"):
      return True  # numbers continue
    if self.session_of(head.get("target", head["id"])).finished:
      return False
    if kind == "result":
      return head["id"] in self.results
    if kind == "request" and head["op"] == SAMPLE:
      return head["id"] in self.samples
    if kind == "request":
      # The first one says that there is the model.
      return head["seq"] == 0 or head["seq"] > self.queues[head["target"]].snapshot
    return True

  def _enqueue(self, request: Submission) -> None:
    if request.op == SAMPLE:
      self.samples[request.id] = request
      self.untaken.append(request.id)
      return
    if request.op in (CREATE, LOAD) and request.target not in self.queues:
      session = self.session_of(request.target)
      self.queues[request.target] = Queue(session, self._snapshot_of(request.target))
    queue = self.queues[request.target]
    if request.seq >= queue.next:
      queue.waiting[request.seq] = request

  def _finish(self, name: str) -> None:
    self.sessions[name].finished = True
    for named in (self.queues, self.samplers, self.specs, self.samples):
      _drop(named, name)
    self.results.forget(name)


def _drop(named: dict[str, Any], session: str) -> None:
  """Removes what belongs to a session."""
  for name in [x for x in named if x.split(":")[0] == session]:
    del named[name]
