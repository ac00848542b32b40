"""The thread that trains: it carries out the requests of all models, one after the other."""

from __future__ import annotations

import threading
import time

from gtpo_jax.tinker.ledger.entries import LOAD
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models_in_training import ModelsInTraining
from gtpo_jax.tinker.operations import Operations, is_change
from gtpo_jax.tinker.wire import ERROR, StoredResult, Submission

SNAPSHOT_S = 60.0  # of computing, after which a model's state is saved


class Trainer:
  """Carries out the requests of a ledger."""

  def __init__(self, ledger: Ledger, models: ModelsInTraining, operations: Operations):
    """Args:
    ledger: the requests.
    models: in training.
    operations: what the requests do to them.
    """
    self._ledger = ledger
    self._models = models
    self._operations = operations
    self._since_snapshot: dict[str, float] = {}  # seconds of computing
    self._thread = threading.Thread(target=self._run, name="gtpo trainer", daemon=True)
    self._thread.start()

  def join(self) -> None:
    """Waits until the thread has ended, once the ledger is closed."""
    self._thread.join()

  def _run(self) -> None:
    while taken := self._ledger.submissions.take():
      request, known = taken
      began = time.perf_counter()
      again = known is not None
      if again and (known.kind == ERROR or not is_change(request)):
        self._ledger.submissions.finish(request, known)
        continue
      outcome = self._operations.carry_out(request)
      self._ledger.submissions.finish(request, known or outcome)
      seconds = time.perf_counter() - began
      self._after(request, outcome, seconds)

  def _after(self, request: Submission, outcome: StoredResult, seconds: float) -> None:
    """Saves a model's state from time to time, and forgets models that are gone."""
    self._models.forget_gone()
    name = request.target
    if name not in self._models:
      return
    self._since_snapshot[name] = self._since_snapshot.get(name, 0.0) + seconds
    loaded = request.op == LOAD and outcome.kind != ERROR  # what it has read may change
    if loaded or self._since_snapshot[name] > SNAPSHOT_S:
      self._since_snapshot[name] = 0.0
      self._models.snapshot(name, request.seq)
