"""The sessions of clients, and the names and seeds of what belongs to them."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.tinker.ledger.book import Book
from gtpo_jax.tinker.wire import ClientSession

GONE_S = 600  # without a sign of life, a session's models may give up their places


class Sessions:
  """The sessions of a book, each of one client."""

  def __init__(self, book: Book, seed: int):
    """Args:
    book: where they are written.
    seed: of requests that have none.
    """
    self._book = book
    self._entries = book.entries
    self._seed = seed

  def open(self, owner: str) -> tuple[ClientSession, int]:
    """Begins a session of the client with a key; also returns what `sync` must wait for."""
    with self._book.changed:
      name = secrets.token_hex(8)
      size = self._book.write("session", id=name, owner=owner)
      return self._entries.sessions[name], size

  def use(self, session: ClientSession) -> None:
    """Numbers a session that gets a model or a sampler. One that is never used has no number."""
    with self._book.changed:
      if session.number < 0:
        number = sum(x.number >= 0 for x in self._entries.sessions.values())
        self._book.write("use", id=session.id, number=number)

  def find(self, owner: str, name: Any) -> ClientSession:
    """Returns a client's session.

    Raises:
      ApiError: it has none of this name (410), or has finished it.
    """
    session = self._entries.sessions.get(name) if isinstance(name, str) else None
    if session is None or session.owner != owner:
      raise ApiError(410, "there is no such session; start the client again")
    if session.finished:
      raise ApiError(410, "this session is finished")
    session.seen = time.monotonic()
    return session

  def of(self, owner: str, name: Any) -> ClientSession:
    """Returns the session of a client's model, sampler or request.

    Raises:
      ApiError: there is none.
    """
    return self.find(owner, name.split(":")[0] if isinstance(name, str) else None)

  def finish(self, owner: str, name: str) -> None:
    """Ends a session; its models are dropped, and what they have saved stays."""
    session = self.find(owner, name)
    with self._book.changed:
      self._book.write("finish", id=session.id)

  def drop_silent(self) -> None:
    """Ends the sessions with models whose clients have not been heard of for long."""
    now = time.monotonic()
    for session in {x.session.id: x.session for x in self._entries.queues.values()}.values():
      if now - session.seen > GONE_S:
        self.finish(session.owner, session.id)

  def describe(self, model: str, spec: dict[str, Any]) -> None:
    """Notes what a client has asked a model to be; the request itself follows."""
    with self._book.changed:
      if model not in self._entries.specs:
        self._book.write("spec", id=model, spec=spec)

  def add_sampler(self, name: str, source: dict[str, Any]) -> None:
    """Adds a sampling session."""
    with self._book.changed:
      if name not in self._entries.samplers:
        self._book.sync(self._book.write("sampler", id=name, source=source))

  def seed_for(self, target: str, seq: int) -> int:
    """Returns the seed of a request that has none, below 2**32.

    It is the same whenever the same requests are made of a server, which has the same seed. The
    number of a sampler is not part of it: clients take another one when they repeat a request.
    """
    rest = target.partition(":")[2]
    rest = self._entries.samplers.get(target, {}).get("saved_by", rest)
    number = self._entries.session_of(target).number
    digest = hashlib.sha256(f"{self._seed} {number} {rest} {seq}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
