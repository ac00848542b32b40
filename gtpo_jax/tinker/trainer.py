"""The thread that trains: it carries out the requests of all models, one after the other."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.serving.requests import ApiError, bad, checked, parse_object
from gtpo_jax.tinker.bodies import OF_MODELS, LoadBody, SaveBody, SaveForSamplerBody, StepBody
from gtpo_jax.tinker.entropy_credit import shape, split_credit
from gtpo_jax.tinker.ledger import GONE_S, RETRY_S, Ledger
from gtpo_jax.tinker.losses import Loss, make_loss
from gtpo_jax.tinker.models import ServedBase, StepSettings, TrainedModel
from gtpo_jax.tinker.saved_weights import (
  EPHEMERAL,
  SAMPLER,
  STATE,
  TRAINING,
  Spec,
  Store,
  read_saved,
)
from gtpo_jax.tinker.wire import (
  CREATE,
  ERROR,
  FORWARD_BACKWARD,
  JSON,
  LOAD,
  OPTIM_STEP,
  PROTO,
  REFUSED,
  SAVE,
  SAVE_FOR_SAMPLER,
  Datum,
  StoredResult,
  Submission,
  loss_output,
  parse_batch,
  read_config,
  read_data,
  refusal,
)

CHANGES = (CREATE, LOAD, FORWARD_BACKWARD, OPTIM_STEP)  # what is carried out again
SNAPSHOT_S = 60.0  # of computing, after which a model's state is saved
SNAPSHOT_RATIO = 30.0  # or so many times the time that this takes, if that is less


class Trainer:
  """Carries out the requests of a ledger, each by the function of its operation.

  There are at most `most` models, which begin with `base`, and whose weights are saved in `store`.
  """

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, most: int):
    self._base = base
    self._ledger = ledger
    self._store = store
    self._most = most
    self._models: dict[str, TrainedModel] = {}  # in memory
    self._by_name: dict[str, Callable[[Submission, Any], StoredResult]] = {
      CREATE: self._create,
      LOAD: self._load,
      FORWARD_BACKWARD: self._loss,
      OPTIM_STEP: self._step,
      SAVE: self._save,
      SAVE_FOR_SAMPLER: self._save_for_sampler,
      REFUSED: lambda *_: StoredResult(ERROR, b"the request was refused", "user"),
    }
    self._thread = threading.Thread(target=self._run, name="gtpo trainer", daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Waits for the thread, once the ledger is closed, and saves the state of every model."""
    self._thread.join()
    self._forget_ended()
    for name in self._models:
      self.snapshot(name, self._ledger.next[name] - 1)

  def _run(self) -> None:
    while taken := self._ledger.take():
      request, known = taken
      began = time.perf_counter()
      again = known and known.kind != ERROR and request.op in CHANGES
      if again and request.op == FORWARD_BACKWARD:
        again = not parse_batch(request.body).forward_only
      if known and not again:
        self._ledger.finish(request, known)
        continue
      try:
        kind = OF_MODELS.get(request.op)
        body = kind and checked(kind, parse_object(request.body))
        outcome = self._by_name[request.op](request, body)
      except Exception as error:
        outcome = refusal(error, request.op)
      self._ledger.finish(request, known or outcome)
      self._forget_ended()
      if model := self._models.get(request.target):
        model.since_snapshot_s += time.perf_counter() - began
        if model.since_snapshot_s > min(SNAPSHOT_S, SNAPSHOT_RATIO * model.snapshot_s):
          self.snapshot(request.target, request.seq)

  # Models in memory, and their snapshots.

  def _get(self, name: str) -> TrainedModel:
    """Returns a model, which is read from its snapshot after a restart."""
    if name not in self._models:
      saved = self._store.snapshot(name)
      self._models[name] = TrainedModel(self._base, saved.about.spec, saved)
    return self._models[name]

  def _forget_ended(self) -> None:
    """Forgets the models whose sessions are over, and deletes their states."""
    while self._ledger.ended:
      name = self._ledger.ended.popleft()
      self._models.pop(name, None)
      self._store.drop(name)

  def _make_space(self, name: str, full: bool) -> None:
    """Makes space for a new model, of which all weights are trained or not, if clients are gone."""
    others = lambda: [x for x in self._ledger.created() if x != name]
    if len(others()) >= self._most:
      self._ledger.drop_silent({x.split(":")[0] for x in others()}, GONE_S)
    self._forget_ended()
    if len(others()) >= self._most:
      raise bad(
        f"this server has {len(others())} models already; finish another client, or start the "
        "server with a higher --models"
      )
    if full and not all(self._ledger.spec(x)["rank"] for x in others()):
      raise bad("this server trains all weights of one model at a time; set a rank")

  def snapshot(self, name: str, seq: int) -> bool:
    """Saves the state of a model after the request `seq`; returns whether it could."""
    began = time.perf_counter()
    model = self._models[name]
    try:
      folder = self._store.folder(name, STATE, str(seq))
      if not folder.exists():
        about = {"run": name, "owner": self._ledger.owner(name)}
        model.save(folder, about, moments=True, export=False)
      self._ledger.saved(name, seq)
      self._store.tidy(name, seq)
    except Exception as error:  # of disks, and of devices; its requests stay in the ledger
      print(f"gtpo: the state of a model was not saved: {first_line(error)}", file=sys.stderr)
      return False
    finally:
      model.since_snapshot_s = 0.0
      model.snapshot_s = time.perf_counter() - began
    return True

  # Operations.

  def _create(self, request: Submission, body: None) -> StoredResult:
    spec = Spec(**self._ledger.spec(request.target))
    self._make_space(request.target, full=not spec.rank)
    self._models[request.target] = TrainedModel(self._base, spec)
    return _json({"model_id": request.target, "type": "create_model"})

  def _load(self, request: Submission, body: LoadBody) -> StoredResult:
    name = request.target
    if self._ledger.snapshots[name] < request.seq:
      saved = self._store.find(self._ledger.owner(name), body.path)
      if request.seq == 0:
        spec = Spec(**self._ledger.spec(name))
        self._make_space(name, full=not spec.rank)
        self._models[name] = TrainedModel(self._base, spec, saved, body.optimizer)
      else:
        self._get(name).load(saved, body.optimizer)
      # What was read may change, so its effect is saved before the client hears of it.
      while not self.snapshot(name, request.seq):
        if self._ledger.closed:
          raise ApiError(503, "the server has ended")
        time.sleep(RETRY_S)
    return _json({"path": body.path, "type": "load_weights"})

  def _loss(self, request: Submission, body: None) -> StoredResult:
    batch = read_batch(parse_batch(request.body), self._base)
    data, metrics = batch.data, {}
    if batch.credit:
      ends = np.cumsum([len(datum.tokens) for datum in data])
      entropies = np.split(np.frombuffer(request.drawn, np.float32), ends[:-1])
      data, metrics = shape(batch.credit, data, entropies)
    outputs, total = self._get(request.target).run(data, batch.loss, batch.forward_only)
    metrics["loss:sum"] = total
    return StoredResult(PROTO, loss_output(outputs, len(data), metrics))

  def _step(self, request: Submission, body: StepBody) -> StoredResult:
    settings = StepSettings(*(np.float32(value) for _, value in body.adam_params))
    return _json({"metrics": self._get(request.target).step(settings)})

  def _save(self, request: Submission, body: SaveBody) -> StoredResult:
    path = self._write(request, TRAINING, body.path or f"{request.seq:06d}", body)
    return _json({"path": path, "type": "save_weights"})

  def _save_for_sampler(self, request: Submission, body: SaveForSamplerBody) -> StoredResult:
    answer = {"type": "save_weights_for_sampler"}
    path = self._write(request, SAMPLER, body.path, body)
    if body.path:
      answer["path"] = path
    if body.sampling_session_seq_id is not None:
      sampler = f"{request.target.split(':')[0]}:sample:{body.sampling_session_seq_id}"
      source = {"path": path, "live": body.kind == "inflight"}
      source["model"] = self._ledger.spec(request.target)["base_model"]
      source["saved_by"] = f"{request.target.partition(':')[2]}:{request.seq}"
      self._ledger.add_sampler(sampler, source)
      answer["sampling_session_id"] = sampler
    return _json(answer)

  def _write(self, request: Submission, kind: str, name: str | None, body: SaveBody) -> str:
    """Saves weights under a name, or under the number of the request; returns their path."""
    run = request.target
    folder = self._store.folder(run, kind, name or f"{EPHEMERAL}{request.seq}")
    if saved := read_saved(folder):
      if saved.about.seq == request.seq:
        return saved.path  # written by a process that was killed before it could say so
      if not body.overwrite:
        raise bad(f"{saved.path} exists; give another name, or overwrite=True", "path")
    about = {"run": run, "owner": self._ledger.owner(run), "seq": request.seq}
    about["metadata"] = body.user_metadata
    if body.ttl_seconds:
      about["expires"] = time.time() + body.ttl_seconds
    self._store.expire()
    model = self._get(run)
    new = folder.with_name(f".{folder.name}.new")
    try:
      shutil.rmtree(new, ignore_errors=True)
      model.save(new, about, moments=kind == TRAINING, export=bool(name))
      self._store.replace(new, folder)
    except (OSError, UserError) as error:
      print(f"gtpo: {first_line(error)}", file=sys.stderr)
      shutil.rmtree(new, ignore_errors=True)
      raise ApiError(503, "the server cannot write weights; its log says why") from None
    return f"tinker://{run}/{kind}/{folder.name}"


class Batch(NamedTuple):
  """A request to compute a loss."""

  data: Sequence[Datum]  # the sequences
  loss: Loss  # the loss with its settings
  credit: Algorithm | None  # the recipe that makes the advantages; None for those that were sent
  forward_only: bool  # whether no gradient is wanted


def read_batch(message: Any, base: ServedBase) -> Batch:
  """Returns a request to compute a loss, from the message of `parse_batch`."""
  name = message.loss_fn
  data = read_data(message, base.vocab, base.longest)
  algorithm, config = split_credit(name, read_config(message))
  loss = make_loss(name, config)
  for i, datum in enumerate(data):
    if missing := [x for x in loss.needs if x not in datum.inputs]:
      raise bad(f"data[{i}]: {name} needs {', '.join(missing)}")
    if unread := [x for x in datum.inputs if x not in loss.reads]:
      raise bad(f"data[{i}]: {name} does not read {unread[0][:80]}; leave it out")
  return Batch(data, loss, algorithm, message.forward_only)


def _json(values: dict[str, Any]) -> StoredResult:
  return StoredResult(JSON, json.dumps(values).encode())
