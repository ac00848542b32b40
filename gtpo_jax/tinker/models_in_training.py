"""The models that are in memory, and their snapshots."""

from __future__ import annotations

import sys
import time

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.tinker.ledger import GONE_S, RETRY_S, Ledger
from gtpo_jax.tinker.models import ServedBase, TrainedModel
from gtpo_jax.tinker.saved_weights import STATE, Store


class ModelsInTraining:
  """The models of a ledger's queues by name, as far as they are in memory."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, most: int):
    """Args:
    base: the model that others begin with.
    ledger: knows which models there are.
    store: where snapshots are saved.
    most: how many models there may be.
    """
    self._base = base
    self._ledger = ledger
    self._store = store
    self._most = most
    self._models: dict[str, TrainedModel] = {}

  def __contains__(self, name: str) -> bool:
    return name in self._models

  def add(self, name: str, model: TrainedModel) -> None:
    """Adds a model; see `make_space`."""
    self._models[name] = model

  def get(self, name: str) -> TrainedModel:
    """Returns a model, which is read from its snapshot after a restart.

    Raises:
      ApiError: there is none.
    """
    if name not in self._models:
      saved = self._store.snapshot(name)
      if saved is None:
        raise bad("the model was not created")
      self._models[name] = TrainedModel(self._base, saved.about.spec, saved)
    return self._models[name]

  def forget_gone(self) -> None:
    """Forgets the models whose sessions are over, and deletes their states."""
    while self._ledger.ended:
      name = self._ledger.ended.popleft()
      self._models.pop(name, None)
      self._store.drop(name)

  def make_space(self, name: str, full: bool) -> None:
    """Makes space for one more model, if clients are gone.

    Args:
      name: the model.
      full: whether all of its weights are trained.

    Raises:
      ApiError: there are too many models.
    """
    others = lambda: [x for x in self._ledger.created() if x != name]
    if len(others()) >= self._most:
      self._ledger.drop_silent({x.split(":")[0] for x in others()}, GONE_S)
    self.forget_gone()
    if len(others()) >= self._most:
      raise bad(
        f"this server has {len(others())} models already; finish another client, or start the "
        "server with a higher --models"
      )
    if full and not all(self._ledger.spec(x)["rank"] for x in others()):
      raise bad("this server trains all weights of one model at a time; set a rank")

  def snapshot(self, name: str, seq: int) -> None:
    """Saves the state of a model after the request `seq`."""
    folder = self._store.folder(name, STATE, str(seq))
    if not folder.exists():
      about = {"run": name, "owner": self._ledger.owner(name)}
      self._models[name].save(folder, about, moments=True, export=False)
    self._ledger.saved(name, seq)
    self._store.tidy(name, seq)

  def snapshot_surely(self, name: str, seq: int) -> None:
    """Saves the state of a model, once a full disk has space."""
    while True:
      try:
        return self.snapshot(name, seq)
      except (UserError, ApiError, OSError) as error:
        print(f"gtpo: the state of a model was not saved: {first_line(error)}", file=sys.stderr)
        if self._ledger.closed:
          raise
        time.sleep(RETRY_S)

  def snapshot_all(self) -> None:
    """Saves the state of every model, as far as the disk has space: the ledger has the rest."""
    self.forget_gone()
    for name in self._models:
      try:
        self.snapshot(name, self._ledger.next[name] - 1)
      except (UserError, ApiError, OSError) as error:
        print(f"gtpo: the state of a model was not saved: {first_line(error)}", file=sys.stderr)
