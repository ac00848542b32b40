"""Who asked for what, and what became of it; all journalled.

A request has the same id whenever it is sent again, so it is carried out once. Requests of a model
are carried out in the order of their numbers, in whatever order they arrive. After a restart, a
model's requests since its last snapshot are carried out again; the same programs give the same
bits, and results that clients may have seen already are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gtpo_jax.tinker.ledger.book import Book
from gtpo_jax.tinker.ledger.client_sessions import Sessions
from gtpo_jax.tinker.ledger.submissions import Submissions


class Ledger:
  """The books of a server.

  Attributes:
    book: the journal.
    entries: what is written in it.
    sessions: of clients.
    submissions: their requests.
  """

  def __init__(self, file: Path, seed: int, most_samples: int, snapshot_of: Callable[[str], int]):
    """Args:
    file: the journal.
    seed: of requests that have none.
    most_samples: how many samples may have no result yet.
    snapshot_of: returns the number of the last request of a model whose effect is saved.
    """
    self.book = Book(file, snapshot_of)
    self.entries = self.book.entries
    self.sessions = Sessions(self.book, seed)
    self.submissions = Submissions(self.book, self.sessions, most_samples)
