"""The thread that trains: it carries out the requests of all models, one after the other."""

from __future__ import annotations

import sys
import threading
import time

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models_in_training import ModelsInTraining
from gtpo_jax.tinker.operations import Operations, is_change
from gtpo_jax.tinker.wire import ERROR, Submission

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
    while taken := self._ledger.take():
      request, known = taken
      began = time.perf_counter()
      if known and (known.kind == ERROR or not is_change(request)):
        self._ledger.finish(request, known)
        continue
      outcome = self._operations.carry_out(request)
      self._ledger.finish(request, known or outcome)
      self._after(request, time.perf_counter() - began)

  def _after(self, request: Submission, seconds: float) -> None:
    """Saves a model's state from time to time, and forgets models that are gone."""
    self._models.forget_gone()
    name = request.target
    if name not in self._models:
      return
    self._since_snapshot[name] = self._since_snapshot.get(name, 0.0) + seconds
    if self._since_snapshot[name] > SNAPSHOT_S:
      self._since_snapshot[name] = 0.0
      try:
        self._models.snapshot(name, request.seq)
      except (UserError, ApiError, OSError) as error:  # its requests stay in the ledger
        print(f"gtpo: the state of a model was not saved: {first_line(error)}", file=sys.stderr)
