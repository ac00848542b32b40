"""Who asked for what, and the answers, in a SQLite database.

A request has the same id whenever it is sent again, so it is carried out once. Requests of a model
are carried out in the order of their numbers, in whatever order they arrive. After a restart, a
model's requests since its last snapshot are carried out again; the same programs give the same
bits, and results that clients may have seen already are kept.

Every change is one transaction, on disk before the call returns. A row has a checksum of its
values, because SQLite itself does not notice a changed bit within a value.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import sqlite3
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.requests import ApiError, bad
from gtpo_jax.tinker.wire import (
  ERROR,
  LOAD,
  PROTO,
  SAMPLE,
  Sample,
  StoredResult,
  Submission,
  read_samples,
)

MAX_AHEAD = 4096  # numbers by which a request may be ahead of its model's next one
MOST_RESULTS = 100_000  # that are kept, the newest ones
MOST_RESULT_BYTES = 512 << 20  # of them
GONE_S = 600  # without a sign of life, a session's models may give up their places
DROPPED_S = 86_400.0  # after which a session without a sign of life is ended
RETRY_S = 1.0  # until a full disk may have space again

_TABLES = {
  "about": "id TEXT PRIMARY KEY, value TEXT",
  "sessions": "id TEXT PRIMARY KEY, owner TEXT, number INTEGER",
  "models": "id TEXT PRIMARY KEY, spec TEXT",
  "samplers": "id TEXT PRIMARY KEY, source TEXT",
  "requests": "id TEXT PRIMARY KEY, op TEXT, target TEXT, seq INTEGER, digest BLOB",
  "bodies": "id TEXT PRIMARY KEY, body BLOB, drawn BLOB",  # of what may be carried out
  "results": """number INTEGER PRIMARY KEY, id TEXT UNIQUE, kind TEXT, fault TEXT, body BLOB,
    entropy BLOB""",
}
_SUBMISSION = """op, target, seq, body, drawn, digest FROM requests JOIN bodies
  ON requests.id = bodies.id"""


class Ledger:
  """The requests of a server: clients submit them and wait, threads take and finish them.

  Attributes:
    changed: the lock; threads that wait for work are woken up.
    closed: whether the server ends.
    next: by model, the number of the request that is carried out next.
    snapshots: by model, the number of the last request whose effect is saved.
    ended: the models whose sessions are over, until their files are deleted.
  """

  def __init__(
    self,
    file: Path,
    identity: str,
    seed: int,
    most_samples: int,
    most_models: int,
    snapshot_of: Callable[[str], int],
  ):
    """Opens or makes the database.

    Args:
      file: the database.
      identity: tells the base model from all others.
      seed: of requests that have none.
      most_samples: how many samples may have no result yet.
      most_models: how many models may be in training.
      snapshot_of: returns the number of the last request of a model whose effect is saved.

    Raises:
      UserError: it is open already, damaged, belongs to another base model, has more models, or
        cannot be written.
    """
    self.changed = threading.Condition(threading.RLock())
    self.closed = False
    self._seed = seed
    self._most_samples = most_samples
    # By the requests whose results somebody waits for.
    self._awaited: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
    self._lock_file = _lock(file.with_suffix(".lock"))
    self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    try:
      self._open()
      self._check(file, identity, most_models)
    except UserError:
      self.close_file()
      raise
    except sqlite3.Error as error:
      self.close_file()
      raise UserError(
        f"{str(file)!r} cannot be read: {error}; restore a copy, or name another --workdir"
      ) from None
    self._count_result_bytes()
    unanswered = "op = ? AND id NOT IN (SELECT id FROM results)"
    rows = self._db.execute(f"SELECT id FROM requests WHERE {unanswered} ORDER BY rowid", [SAMPLE])
    self._untaken = collections.deque(name for (name,) in rows)
    self._open_samples = set(self._untaken)
    rows = self._db.execute("SELECT id FROM sessions")
    self._seen = {name: time.monotonic() for (name,) in rows}  # when a session was last heard of
    self.next: dict[str, int] = {}
    self.snapshots: dict[str, int] = {}
    self.ended: collections.deque[str] = collections.deque()
    for (name,) in self._db.execute("SELECT id FROM models ORDER BY rowid").fetchall():
      self.snapshots[name] = snapshot_of(name)
      # A load is saved before it has a result.
      last = f"{name}:{self.snapshots[name]}"
      self.next[name] = self.snapshots[name] + (self.snapshots[name] < 0 or self._answered(last))

  def _open(self) -> None:
    self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # so that it needs no shared memory
    self._db.execute("PRAGMA journal_mode = WAL")
    self._db.execute("PRAGMA synchronous = FULL")
    self._db.execute("PRAGMA journal_size_limit = 67108864")
    for table, columns in _TABLES.items():
      self._db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}, checksum INTEGER)")
    self._db.execute("CREATE INDEX IF NOT EXISTS by_target ON requests (target, seq)")

  def _check(self, file: Path, identity: str, most_models: int) -> None:
    """Raises UserError unless all values are as they were written, by a server like this one."""
    damaged = self._one("PRAGMA integrity_check")[0] != "ok"
    for table in _TABLES:
      rows = self._db.execute(f"SELECT * FROM {table}")
      names = [x[0] for x in rows.description]
      for row in rows:
        values = dict(zip(names, row, strict=True))
        damaged |= _checksum(values) != values["checksum"]
    if damaged:
      raise UserError(
        f"{str(file)!r} is damaged; restore a copy, or name another --workdir (saved weights are "
        "in its folder runs)"
      )
    # SQLite drops the end of its log, from the first damaged place on, without a word.
    self._commits = int(self._about("commits") or 0)
    self._lock_file.seek(0)
    acknowledged = self._lock_file.read()
    if acknowledged.isdigit() and self._commits < int(acknowledged):
      raise UserError(
        f"{str(file)!r} has {self._commits} of {int(acknowledged)} changes; restore it with its "
        f"-wal file, or accept the loss by deleting {self._lock_file.name!r}"
      )
    known = self._about("identity") or identity
    if known != identity:
      raise UserError(
        f"{str(file.parent)!r} was begun with another base model; name that one, or another "
        "--workdir"
      )
    failed = "SELECT id FROM results WHERE kind = ?"
    query = f"SELECT count(*) FROM models WHERE id || ':0' NOT IN ({failed})"
    models = self._one(query, ERROR)[0]
    # With as many as before, a model that is one too many is refused in its turn.
    if most_models < models and most_models < int(self._about("models") or 0):
      raise UserError(
        f"{str(file.parent)!r} has {models} models in training, over --models={most_models}; start "
        f"with at least --models={models}"
      )
    with self._transaction():
      self._insert("about", id="identity", value=identity)
      self._insert("about", id="models", value=str(most_models))

  def close(self) -> None:
    """Ends the work."""
    with self.changed:
      self.closed = True
      self.changed.notify_all()

  def close_file(self) -> None:
    """Closes the database, after the last result."""
    with self.changed:
      self._db.close()
      self._lock_file.close()

  # Rows.

  def _one(self, query: str, *values: Any) -> Any:
    return self._db.execute(query, values).fetchone()

  def _about(self, name: str) -> str | None:
    row = self._one("SELECT value FROM about WHERE id = ?", name)
    return row and row[0]

  def _count_result_bytes(self) -> None:
    self._result_bytes = self._one("SELECT total(length(body)) FROM results")[0]

  def _insert(self, table: str, **values: Any) -> None:
    values["checksum"] = _checksum(values)
    names = ", ".join(values)
    places = ", ".join("?" * len(values))
    self._db.execute(
      f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({places})", [*values.values()]
    )

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    """What happens within is on disk afterwards, or did not happen."""
    with self.changed:
      try:
        self._db.execute("BEGIN IMMEDIATE")
        yield
        self._insert("about", id="commits", value=str(self._commits + 1))
        self._db.execute("COMMIT")
        self._commits += 1
        with contextlib.suppress(OSError):
          os.pwrite(self._lock_file.fileno(), b"%020d" % self._commits, 0)
      except BaseException as error:
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")
        self._count_result_bytes()
        if isinstance(error, sqlite3.Error):
          raise ApiError(503, f"the server cannot write its ledger: {error}; try again") from None
        raise

  # Sessions, and what belongs to them.

  def open_session(self, owner: str) -> str:
    """Begins a session of the client with a key; returns its id."""
    name = secrets.token_hex(8)
    self.drop_silent(list(self._seen), DROPPED_S)
    with self._transaction():
      self._insert("sessions", id=name, owner=owner, number=-1)
    self._seen[name] = time.monotonic()
    return name

  def number_session(self, name: str) -> None:
    """Numbers a session that gets a model or a sampler. One that is never used has no number."""
    with self.changed:
      owner, number = self._session(name)
      if owner and number < 0:
        with self._transaction():
          number = int(self._about("sessions") or 0)
          self._insert("sessions", id=name, owner=owner, number=number)
          self._insert("about", id="sessions", value=str(number + 1))

  def _session(self, name: str) -> tuple[str, int]:
    """Returns the owner and the number of a session; "" and -1 if it is over."""
    with self.changed:
      query = "SELECT owner, number FROM sessions WHERE id = ?"
      return self._one(query, name.split(":")[0]) or ("", -1)

  def session(self, owner: str, name: str) -> str:
    """Returns the id of a client's session, by that of its model, sampler or request.

    Raises:
      ApiError: it has none of this name (410), or has finished it.
    """
    if self.owner(name) != owner:
      raise ApiError(410, "there is no such session, or it is finished; start the client again")
    found = name.split(":")[0]
    self._seen[found] = time.monotonic()
    return found

  def finish_session(self, owner: str, name: str) -> None:
    """Ends a session; its models are dropped, and the weights that they have saved stay."""
    session = self.session(owner, name)
    with self._transaction():
      for table in _TABLES.keys() - {"about", "sessions"}:
        begins = "id >= ? AND id < ?"  # with the session's id: ";" follows ":"
        self._db.execute(f"DELETE FROM {table} WHERE {begins}", [f"{session}:", f"{session};"])
      self._db.execute("DELETE FROM sessions WHERE id = ?", [session])
      self._count_result_bytes()
    with self.changed:
      theirs = lambda name: name.split(":")[0] == session
      self.ended.extend(filter(theirs, self.next))
      for named in (self.next, self.snapshots, self._seen):
        for name in [x for x in named if theirs(x)]:
          del named[name]
      self._open_samples = {x for x in self._open_samples if not theirs(x)}
      for name in [x for x in self._awaited if theirs(x)]:
        self._wake(name)

  def drop_silent(self, sessions: Iterable[str], seconds: float) -> None:
    """Ends those of some sessions whose clients have not been heard of for so long."""
    for name in sessions:
      if time.monotonic() - self._seen.get(name, time.monotonic()) > seconds:
        with contextlib.suppress(ApiError):  # its client has just finished it, or the disk is full
          self.finish_session(self.owner(name), name)

  def created(self) -> list[str]:
    """Returns the models that were made, and whose sessions are not over."""
    made = "SELECT models.id FROM models JOIN results ON results.id = models.id || ':0'"
    with self.changed:
      return [name for (name,) in self._db.execute(f"{made} WHERE kind != ?", [ERROR])]

  def owner(self, name: str) -> str:
    """Returns the client whose model, sampler or request it is; "" once its session is over."""
    return self._session(name)[0]

  def spec(self, model: str) -> dict[str, Any]:
    """Returns what a client has asked a model to be."""
    with self.changed:
      row = self._one("SELECT spec FROM models WHERE id = ?", model)
    if row is None:
      raise ApiError(410, "there is no such model; create it again")
    return json.loads(row[0])

  def add_sampler(self, name: str, source: dict[str, Any]) -> None:
    """Adds a sampling session."""
    with self.changed:
      known = self.sampler(name)
      if known is None and self.owner(name):
        with self._transaction():
          self._insert("samplers", id=name, source=json.dumps(source))
      elif known is not None and known != source:
        raise bad("this sampling_session_seq_id is taken; use the next", "sampling_session_seq_id")

  def sampler(self, name: str) -> dict[str, Any] | None:
    """Returns the weights that a sampling session samples from; None if there is no such one."""
    with self.changed:
      row = self._one("SELECT source FROM samplers WHERE id = ?", name)
    return json.loads(row[0]) if row else None

  def seed_for(self, target: str, seq: int) -> int:
    """Returns the seed of a request that has none, below 2**32.

    It is the same whenever the same requests are made of a server, which has the same seed. The
    number of a sampler is not part of it: clients take another one when they repeat a request.
    """
    rest = target.partition(":")[2]
    rest = (self.sampler(target) or {}).get("saved_by", rest)
    _, number = self._session(target)
    digest = hashlib.sha256(f"{self._seed} {number} {rest} {seq}".encode()).digest()
    return int.from_bytes(digest[:4], "little")

  # Requests.

  def is_known(self, request: Submission) -> bool:
    """Whether a request has arrived before."""
    with self.changed:
      row = self._one("SELECT digest FROM requests WHERE id = ?", request.id)
    if row and row[0] != request.digest:
      raise bad(
        f"seq_id {request.seq} was another request of {request.target}; use the next", "seq_id"
      )
    return bool(row)

  def submit(self, request: Submission, answer: StoredResult | None = None) -> None:
    """Adds a request, unless it is known; with its answer if it is refused.

    Raises:
      ApiError: another request has its number, its number is far from its model's next one, or too
        many samples wait.
    """
    with self.changed:
      if self.is_known(request):
        return
      if request.op == SAMPLE:
        if len(self._open_samples) >= self._most_samples:
          raise ApiError(429, "the server is busy; try again later")
      elif request.spec is None:
        following = self.next.get(request.target)
        if following is None:
          raise ApiError(410, "there is no such model; create it again")
        if not following <= request.seq < following + MAX_AHEAD:
          raise bad(
            f"seq_id {request.seq} is far from the model's next one, {following}; count from there",
            "seq_id",
          )
      with self._transaction():
        if request.spec is not None:
          self._insert("models", id=request.target, spec=json.dumps(request.spec))
        head = {name: getattr(request, name) for name in ("id", "op", "target", "seq", "digest")}
        self._insert("requests", **head)
        self._insert("bodies", id=request.id, body=request.body, drawn=request.drawn)
        if answer:
          self._add_result(request, answer)
      if request.op == SAMPLE:
        self._open_samples.add(request.id)
        self._untaken.append(request.id)
      elif request.spec is not None:
        self.snapshots[request.target] = -1
        self.next[request.target] = 0
      self.changed.notify_all()

  def take(self) -> tuple[Submission, StoredResult | None] | None:
    """Waits for the next request of a model; None once the ledger is closed.

    Returns:
      The request, and its result if it has one: it was refused, or is carried out again.
    """
    with self.changed:
      while not self.closed:
        for name, following in list(self.next.items()):
          if request := self._request(f"{name}:{following}"):
            self.next[name] = self.next.pop(name)  # the others come first next time
            return request, self._result(request.id)
        self.changed.wait()
    return None

  def take_sample(self) -> Submission | None:
    """Waits for the next request to sample; None once the ledger is closed."""
    with self.changed:
      while not self.closed:
        while self._untaken:
          name = self._untaken.popleft()
          if name in self._open_samples:
            return self._request(name)
        self.changed.wait()
    return None

  def is_wanted(self, name: str) -> bool:
    """Whether a sample has no result yet, its session is not over, and the server does not end."""
    return name in self._open_samples and not self.closed

  def finish(self, request: Submission, outcome: StoredResult) -> None:
    """Records a result, and tells whoever waits for it. On a full disk, it waits for space."""
    while not self._try_to_finish(request, outcome):
      if self.closed:
        return  # it is carried out again
      time.sleep(RETRY_S)

  def _try_to_finish(self, request: Submission, outcome: StoredResult) -> bool:
    with self.changed:
      try:
        if self._request(request.id) and not self._answered(request.id):
          with self._transaction():
            self._add_result(request, outcome)
            if request.op == SAMPLE:
              self._db.execute("DELETE FROM bodies WHERE id = ?", [request.id])
            self._forget_old_results()
      except (ApiError, sqlite3.Error) as error:
        print(f"gtpo: {error}", file=sys.stderr)
        return False
      self._open_samples.discard(request.id)
      if request.op != SAMPLE and request.target in self.next:
        self.next[request.target] = max(self.next[request.target], request.seq + 1)
      self._wake(request.id)
    return True

  def _add_result(self, request: Submission, outcome: StoredResult) -> None:
    values = dataclasses.asdict(outcome)
    values["entropy"] = b"" if outcome.entropy is None else outcome.entropy.tobytes()
    number = self._one("SELECT ifnull(max(number), 0) + 1 FROM results")[0]
    self._insert("results", number=number, id=request.id, **values)
    self._result_bytes += len(outcome.body)

  def _forget_old_results(self) -> None:
    """Deletes the oldest results beyond those that are kept, and the requests that had them."""
    first, last = self._one("SELECT min(number), max(number) FROM results")
    while first < last and (self._result_bytes > MOST_RESULT_BYTES or last - first >= MOST_RESULTS):
      name, size = self._one("SELECT id, length(body) FROM results WHERE number = ?", first)
      self._db.execute("DELETE FROM results WHERE number = ?", [first])
      done = "id = ? AND id NOT IN (SELECT id FROM bodies)"
      self._db.execute(f"DELETE FROM requests WHERE {done}", [name])
      self._result_bytes -= size
      (first,) = self._one("SELECT min(number) FROM results")

  def _wake(self, name: str) -> None:
    if awaited := self._awaited.pop(name, None):
      loop, ready = awaited
      with contextlib.suppress(RuntimeError):  # the server ends
        loop.call_soon_threadsafe(ready.set)

  def _request(self, name: str) -> Submission | None:
    row = self._one(f"SELECT {_SUBMISSION} WHERE requests.id = ?", name)
    return Submission(*row) if row else None

  def _answered(self, name: str) -> bool:
    return self._one("SELECT 1 FROM results WHERE id = ?", name) is not None

  def _result(self, name: str) -> StoredResult | None:
    row = self._one("SELECT kind, body, fault, entropy FROM results WHERE id = ?", name)
    return StoredResult(*row[:3], np.frombuffer(row[3], np.float32)) if row else None

  def loads(self) -> list[Submission]:
    """Returns the requests to load weights that have no result yet."""
    unanswered = "op = ? AND requests.id NOT IN (SELECT id FROM results)"
    with self.changed:
      query = f"SELECT {_SUBMISSION} WHERE {unanswered}"
      return [Submission(*row) for row in self._db.execute(query, [LOAD])]

  def cancel(self, owner: str, name: str) -> None:
    """Drops a request to sample that nobody waits for any more."""
    self.session(owner, name)
    with self.changed:
      request = self._request(name) if name in self._open_samples else None
    if request:
      self.finish(request, StoredResult(ERROR, b"the request was cancelled", "user"))

  async def wait(self, owner: str, name: str, seconds: float) -> StoredResult | None:
    """Returns the result of a request; None if it has none within some seconds."""
    loop = asyncio.get_running_loop()
    found = await asyncio.to_thread(self._find, owner, name, loop)
    if isinstance(found, asyncio.Event):
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(found.wait(), seconds)
      found = await asyncio.to_thread(self._find, owner, name, loop)
    return None if isinstance(found, asyncio.Event) else found

  def _find(
    self, owner: str, name: str, loop: asyncio.AbstractEventLoop
  ) -> StoredResult | asyncio.Event:
    """Returns the result of a request, or the event of its end, which others may wait for too."""
    self.session(owner, name)
    with self.changed:
      if result := self._result(name):
        return result
      request = self._request(name)
      # Requests of a model whose results are no longer kept may be carried out again.
      if request is None or request.seq < self.next.get(request.target, 0):
        raise ApiError(410, "there is no such request, or its result is no longer kept")
      return self._awaited.setdefault(name, (loop, asyncio.Event()))[1]

  def saved(self, model: str, seq: int) -> None:
    """Notes that a model's state after a request is saved, and forgets what led to it."""
    with self.changed:
      if model not in self.snapshots:
        return
      with self._transaction():
        led = "SELECT id FROM requests WHERE target = ? AND seq <= ?"
        answered = "id IN (SELECT id FROM results)"
        query = f"DELETE FROM bodies WHERE id IN ({led}) AND {answered}"
        self._db.execute(query, [model, seq])
      self.snapshots[model] = seq

  def sampled(self, owner: str, sequence: str) -> Sample:
    """Returns a sampled sequence by its id."""
    name, _, index = sequence.rpartition(":")
    with self.changed:
      outcome = self._result(name)
    if not outcome or outcome.kind != PROTO or self.owner(name) != owner or ":sample:" not in name:
      raise bad(f"there is no sample {sequence[:80]!r} here, or it is no longer kept")
    samples = read_samples(outcome.body, outcome.entropy)
    if not index.isdecimal() or int(index) >= len(samples):
      raise bad(f"there is no sample {sequence[:80]!r}")
    return samples[int(index)]


def _lock(file: Path) -> BinaryIO:
  """Claims a workdir for this process."""
  import fcntl

  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    opened = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
  except OSError as error:
    raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from error
  try:
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    opened.close()
    raise UserError(
      f"another process serves {str(file.parent)!r}; stop it, or name another --workdir"
    ) from None
  return opened


def _checksum(values: Mapping[str, Any]) -> int:
  """Returns the checksum of a row."""
  total = 0
  for name in sorted(set(values) - {"checksum"}):
    value = values[name]
    total = zlib.crc32(value if isinstance(value, bytes) else repr(value).encode(), total)
  return total
