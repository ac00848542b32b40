"""The thread that trains: it carries out the requests of all models, one after the other."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.serving.requests import checked, parse_object
from gtpo_jax.tinker.bodies import LoadBody, SaveBody, SaveForSamplerBody, StepBody
from gtpo_jax.tinker.entropy_credit import shape, split_credit
from gtpo_jax.tinker.ledger import CREATE, GONE_S, LOAD, REFUSED, RETRY_S, Ledger
from gtpo_jax.tinker.losses import Loss, make_loss
from gtpo_jax.tinker.models import ServedBase, TrainedModel
from gtpo_jax.tinker.saved_weights import (
  EPHEMERAL,
  SAMPLER,
  STATE,
  TRAINING,
  Spec,
  Store,
  read_saved,
)
from gtpo_jax.tinker.training_programs import StepSettings
from gtpo_jax.tinker.wire import (
  ERROR,
  JSON,
  PROTO,
  Batch,
  StoredResult,
  Submission,
  loss_output,
  parse_batch,
  read_batch,
  refusal,
)

FORWARD_BACKWARD, OPTIM_STEP = "forward_backward", "optim_step"
SAVE, SAVE_FOR_SAMPLER = "save_weights", "save_weights_for_sampler"
CHANGES = (CREATE, LOAD, FORWARD_BACKWARD, OPTIM_STEP)  # what is carried out again
SNAPSHOT_S = 60.0  # of computing, after which a model's state is saved
SNAPSHOT_RATIO = 30.0  # or so many times the time that this takes, if that is less
FIRST_SNAPSHOT_S = 0.1  # what it is assumed to take


class Trainer:
  """Carries out the requests of a ledger, each by the function of its operation."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, most: int):
    """Args:
    base: the model that others begin with.
    ledger: has the requests, and knows which models there are and what was sampled.
    store: where weights and snapshots are saved.
    most: how many models there may be.
    """
    self._base = base
    self._ledger = ledger
    self._store = store
    self._most = most
    self._models: dict[str, TrainedModel] = {}  # in memory
    self._since_snapshot: dict[str, float] = {}  # seconds of computing, by model
    self._snapshot_s: dict[str, float] = {}  # how long the last one took
    self._by_name: dict[str, Callable[[Submission], StoredResult]] = {
      CREATE: self._create,
      LOAD: self._load,
      FORWARD_BACKWARD: self._loss,
      OPTIM_STEP: self._step,
      SAVE: self._save,
      SAVE_FOR_SAMPLER: self._save_for_sampler,
      REFUSED: lambda request: StoredResult(ERROR, b"the request was refused", "user"),
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
      if known and (known.kind == ERROR or not is_change(request)):
        self._ledger.finish(request, known)
        continue
      try:
        outcome = self._by_name[request.op](request)
      except Exception as error:
        outcome = refusal(error, request.op)
      self._ledger.finish(request, known or outcome)
      self._forget_ended()
      name = request.target
      if name in self._models:
        spent = self._since_snapshot.get(name, 0.0) + time.perf_counter() - began
        self._since_snapshot[name] = spent
        if spent > min(SNAPSHOT_S, SNAPSHOT_RATIO * self._snapshot_s.get(name, FIRST_SNAPSHOT_S)):
          self.snapshot(name, request.seq)

  # Models in memory, and their snapshots.

  def _get(self, name: str) -> TrainedModel:
    """Returns a model, which is read from its snapshot after a restart."""
    if name not in self._models:
      saved = self._store.snapshot(name)
      if saved is None:
        raise bad("the model was not created")
      self._models[name] = TrainedModel(self._base, saved.about.spec, saved)
    return self._models[name]

  def _forget_ended(self) -> None:
    """Forgets the models whose sessions are over, and deletes their states."""
    while self._ledger.ended:
      name = self._ledger.ended.popleft()
      for named in (self._models, self._since_snapshot, self._snapshot_s):
        named.pop(name, None)
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
    try:
      folder = self._store.folder(name, STATE, str(seq))
      if not folder.exists():
        about = {"run": name, "owner": self._ledger.owner(name)}
        self._models[name].save(folder, about, moments=True, export=False)
      self._ledger.saved(name, seq)
      self._store.tidy(name, seq)
    except Exception as error:  # of disks, and of devices; its requests stay in the ledger
      print(f"gtpo: the state of a model was not saved: {first_line(error)}", file=sys.stderr)
      return False
    finally:
      self._since_snapshot[name] = 0.0
      self._snapshot_s[name] = time.perf_counter() - began
    return True

  # Operations.

  def _create(self, request: Submission) -> StoredResult:
    spec = Spec(**self._ledger.spec(request.target))
    self._make_space(request.target, full=not spec.rank)
    self._models[request.target] = TrainedModel(self._base, spec)
    return _json({"model_id": request.target, "type": "create_model"})

  def _load(self, request: Submission) -> StoredResult:
    body = checked(LoadBody, parse_object(request.body))
    name = request.target
    if self._ledger.snapshots[name] < request.seq:
      saved = self._store.find(self._ledger.owner(name), body.path)
      if request.seq == 0:
        spec = Spec(**self._ledger.spec(name))
        self._make_space(name, full=not spec.rank)
        self._models[name] = TrainedModel(self._base, spec, saved, body.optimizer)
      else:
        self._get(name).load(saved.about.spec, saved, body.optimizer)
      # What was read may change, so its effect is saved before the client hears of it.
      while not self.snapshot(name, request.seq):
        if self._ledger.closed:
          raise ApiError(503, "the server has ended")
        time.sleep(RETRY_S)
    return _json({"path": body.path, "type": "load_weights"})

  def _loss(self, request: Submission) -> StoredResult:
    batch, loss, algorithm = read_loss(parse_batch(request.body), self._base)
    data, metrics = batch.data, {}
    if algorithm:
      ends = np.cumsum([len(datum.tokens) for datum in data])
      entropies = np.split(np.frombuffer(request.drawn, np.float32), ends[:-1])
      data, metrics = shape(algorithm, data, entropies)
    outputs, total = self._get(request.target).run(data, loss, batch.forward_only)
    metrics["loss:sum"] = total
    return StoredResult(PROTO, loss_output(outputs, len(data), metrics))

  def _step(self, request: Submission) -> StoredResult:
    params = checked(StepBody, parse_object(request.body)).adam_params
    settings = StepSettings(*(np.float32(value) for _, value in params))
    return _json({"metrics": self._get(request.target).step(settings)})

  def _save(self, request: Submission) -> StoredResult:
    body = checked(SaveBody, parse_object(request.body))
    path = self._write(request, TRAINING, body.path or f"{request.seq:06d}", body)
    return _json({"path": path, "type": "save_weights"})

  def _save_for_sampler(self, request: Submission) -> StoredResult:
    body = checked(SaveForSamplerBody, parse_object(request.body))
    answer = {"type": "save_weights_for_sampler"}
    path = self._write(request, SAMPLER, body.path, body)
    if body.path:
      answer["path"] = path
    if body.sampling_session_seq_id is not None:
      sampler = f"{request.target.split(':')[0]}:sample:{body.sampling_session_seq_id}"
      live = body.kind == "inflight"
      source = {"run": request.target, "kind": SAMPLER, "name": path.split("/")[-1], "live": live}
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


def is_change(request: Submission) -> bool:
  """Whether a request changes its model, so that it is carried out again after a restart."""
  if request.op == FORWARD_BACKWARD:
    return not parse_batch(request.body).forward_only
  return request.op in CHANGES


def read_loss(message: Any, base: ServedBase) -> tuple[Batch, Loss, Algorithm | None]:
  """Returns the arrays of a request, its loss, and the recipe of its credit.

  Args:
    message: from `parse_batch`.
    base: the model that is trained.

  Raises:
    ApiError: something is missing or wrong.
    UserError: a setting of the recipe is out of bounds.
  """
  batch = read_batch(message, base.vocab, base.longest)
  algorithm, config = split_credit(batch.loss, batch.config)
  loss = make_loss(batch.loss, config)
  for i, datum in enumerate(batch.data):
    if missing := [name for name in loss.needs if name not in datum.inputs]:
      raise bad(f"data[{i}]: {batch.loss} needs {', '.join(missing)}")
    if unread := [name for name in datum.inputs if name not in loss.reads]:
      raise bad(f"data[{i}]: {batch.loss} does not read {unread[0][:80]}; leave it out")
  return batch, loss, algorithm


def _json(values: dict[str, Any]) -> StoredResult:
  return StoredResult(JSON, json.dumps(values).encode())
