"""The thread that trains: it carries out the requests of all models, one after the other."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.serving.api_errors import bad
from gtpo_jax.serving.requests import Fields
from gtpo_jax.tinker.entropy_credit import shape, split_credit
from gtpo_jax.tinker.ledger import CREATE, LARGEST_SEQ, LOAD, Ledger
from gtpo_jax.tinker.losses import Loss, make_loss
from gtpo_jax.tinker.models import ServedBase, Spec, TrainedModel
from gtpo_jax.tinker.saved_weights import (
  EPHEMERAL,
  KINDS,
  SAMPLER,
  STATE,
  TRAINING,
  Store,
  check_name,
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

LONGEST_TTL_S = 1e9  # that weights may be kept for
SNAPSHOT_S = 60.0  # of computing, after which a model's state is saved
FORWARD_BACKWARD, OPTIM_STEP = "forward_backward", "optim_step"
SAVE, SAVE_FOR_SAMPLER, REFUSED = "save_weights", "save_weights_for_sampler", "refused"
CHANGES = (CREATE, LOAD, FORWARD_BACKWARD, OPTIM_STEP)  # what is carried out again
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
OFF = {"weight_decay": 0.0, "grad_clip_norm": 0.0}


class Trainer:
  """Carries out the requests of a ledger."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, most_models: int):
    """Args:
    base: the model that others begin with.
    ledger: the requests.
    store: where weights are saved.
    most_models: how many models there may be.
    """
    self._base = base
    self._ledger = ledger
    self._store = store
    self._most_models = most_models
    self._models: dict[str, TrainedModel] = {}
    self._since_snapshot: dict[str, float] = {}  # seconds of computing
    self._operations: dict[str, Callable[[Submission], StoredResult]] = {
      CREATE: self._create,
      LOAD: self._load,
      FORWARD_BACKWARD: self._loss,
      OPTIM_STEP: self._step,
      SAVE: self._save,
      SAVE_FOR_SAMPLER: self._save_for_sampler,
      REFUSED: lambda request: StoredResult(ERROR, request.body, "user"),
    }
    self._thread = threading.Thread(target=self._run, name="gtpo trainer", daemon=True)
    self._thread.start()

  def join(self) -> None:
    """Waits until the thread has ended, once the ledger is closed."""
    self._thread.join()

  def _run(self) -> None:
    while taken := self._ledger.take():
      request, known = taken
      began = time.perf_counter()
      again = known is not None
      if again and (known.kind == ERROR or not self._changes(request)):
        self._ledger.finish(request, known)
        continue
      outcome = self._carried_out(request)
      self._ledger.finish(request, known or outcome)
      seconds = time.perf_counter() - began
      self._after(request, outcome, seconds)

  def _changes(self, request: Submission) -> bool:
    """Whether a request changes its model, so that it is carried out again after a restart."""
    if request.op == FORWARD_BACKWARD:
      return not parse_batch(request.body).forward_only
    return request.op in CHANGES

  def _carried_out(self, request: Submission) -> StoredResult:
    try:
      return self._operations[request.op](request)
    except Exception as error:
      return refusal(error, request.op)

  def _after(self, request: Submission, outcome: StoredResult, seconds: float) -> None:
    """Saves a model's state from time to time, and forgets those that are gone."""
    for name in [x for x in self._models if x not in self._ledger.queues]:
      del self._models[name]
    name = request.target
    if name not in self._models:
      return
    self._since_snapshot[name] = self._since_snapshot.get(name, 0.0) + seconds
    loaded = request.op == LOAD and outcome.kind != ERROR  # what it has read may change
    if loaded or self._since_snapshot[name] > SNAPSHOT_S:
      self._snapshot(name, request.seq)

  def _snapshot(self, name: str, seq: int) -> None:
    self._since_snapshot[name] = 0.0
    folder = self._store.folder(name, STATE, str(seq))
    if not folder.exists():
      about = {"run": name, "owner": self._owner(name)}
      self._models[name].save(folder, about, moments=True, export=False)
    self._ledger.saved(name, seq)
    self._store.tidy(name, seq)

  def save_all(self) -> None:
    """Saves the state of every model, once the thread has ended."""
    for name in self._models:
      if name in self._ledger.queues:
        self._snapshot(name, self._ledger.queues[name].next - 1)

  def _owner(self, name: str) -> str:
    return self._ledger.queues[name].session.owner

  def _model(self, request: Submission) -> TrainedModel:
    """Returns the model of a request, which is read from its snapshot after a restart."""
    name = request.target
    if name not in self._models:
      saved = self._store.snapshot(name)
      if saved is None:
        raise bad("the model was not created")
      self._models[name] = TrainedModel(self._base, Spec(**saved.about["spec"]), saved)
    return self._models[name]

  # Operations.

  def _make_space(self, full: bool) -> None:
    """Raises ApiError if there are too many models, after those whose clients are gone."""
    if len(self._models) >= self._most_models:
      self._ledger.drop_silent()
    self._models = {name: x for name, x in self._models.items() if name in self._ledger.queues}
    if len(self._models) >= self._most_models:
      raise bad(
        f"this server has {len(self._models)} models already; finish another client, or start the "
        "server with a higher --models"
      )
    if full and any(not x.spec.rank for x in self._models.values()):
      raise bad("this server trains all weights of one model at a time; set a rank")

  def _create(self, request: Submission) -> StoredResult:
    spec = Spec(**json.loads(request.body)["spec"])
    self._make_space(full=not spec.rank)
    self._models[request.target] = TrainedModel(self._base, spec)
    return _json({"model_id": request.target, "type": "create_model"})

  def _load(self, request: Submission) -> StoredResult:
    fields = json.loads(request.body)
    saved = self._store.find(self._owner(request.target), fields["path"])
    spec = Spec(**saved.about["spec"])
    moments = fields.get("optimizer") is True
    if request.seq == 0:
      spec = dataclasses.replace(spec, metadata=fields.get("user_metadata") or {})
      self._make_space(full=not spec.rank)
      self._models[request.target] = TrainedModel(self._base, spec, saved, moments)
    else:
      self._model(request).load(spec, saved, moments)
    return _json({"path": fields["path"], "type": "load_weights"})

  def _loss(self, request: Submission) -> StoredResult:
    batch, loss, algorithm = read_loss(parse_batch(request.body), self._base)
    data, metrics = batch.data, {}
    if algorithm:
      owner = self._owner(request.target)
      data, metrics = shape(algorithm, data, lambda name: self._ledger.sample(owner, name))
    outputs, total = self._model(request).run(data, loss, batch.forward_only)
    metrics["loss:sum"] = total
    return StoredResult(PROTO, loss_output(outputs, len(data), metrics))

  def _step(self, request: Submission) -> StoredResult:
    fields = json.loads(request.body)
    if fields.get("optimizer_params"):
      raise bad("optimizer_params are not supported; use AdamParams")
    params = Fields(json.dumps(fields.get("adam_params") or {}).encode())
    bound = float(np.finfo(np.float32).max)
    values = {
      name: np.float32(params.number(name, default, 0.0, 1.0 if name in BETAS else bound))
      for name, default in (ADAM | OFF).items()
    }
    params.end()
    return _json({"metrics": self._model(request).step(StepSettings(*values.values()))})

  def _save(self, request: Submission) -> StoredResult:
    fields = Fields(request.body)
    name = check_name(fields.take("path") or f"{request.seq:06d}")
    return _json({"path": self._write(request, TRAINING, name, fields), "type": "save_weights"})

  def _save_for_sampler(self, request: Submission) -> StoredResult:
    fields = Fields(request.body)
    kind = fields.take("kind", "snapshot")
    if kind not in ("snapshot", "inflight"):
      raise bad(f"kind must be snapshot or inflight, got {kind!r:.80}", "kind")
    name = fields.take("path")
    number = fields.integer("sampling_session_seq_id", None, 0, LARGEST_SEQ)
    answer = {"type": "save_weights_for_sampler"}
    path = self._write(request, SAMPLER, check_name(name) if name else None, fields)
    if name:
      answer["path"] = path
    if number is not None:
      session = request.target.split(":")[0]
      sampler = f"{session}:sample:{number}"
      live = kind == "inflight"
      source = {"run": request.target, "kind": SAMPLER, "name": path.split("/")[-1], "live": live}
      source["model"] = self._model(request).spec.base_model
      source["saved_by"] = f"{request.target.partition(':')[2]}:{request.seq}"
      self._ledger.add_sampler(sampler, source)
      answer["sampling_session_id"] = sampler
    return _json(answer)

  def _write(self, request: Submission, kind: str, name: str | None, fields: Fields) -> str:
    """Saves weights under a name, or under the number of the request; returns their path."""
    run = request.target
    overwrite = fields.flag("overwrite")
    seconds = fields.number("ttl_seconds", 0.0, 0.0, LONGEST_TTL_S)
    folder = self._store.folder(run, kind, name or f"{EPHEMERAL}{request.seq}")
    if saved := self._store.read(folder):
      if saved.about["seq"] == request.seq:
        return saved.path  # written by a process that was killed before it could say so
      if not overwrite:
        raise bad(f"{saved.path} exists; give another name, or overwrite=True", "path")
      self._store.delete(saved)
    about = {"run": run, "owner": self._owner(run), "kind": KINDS[kind], "seq": request.seq}
    about["metadata"] = fields.take("user_metadata")
    if seconds:
      about["expires"] = time.time() + seconds
    self._store.expire()
    model = self._model(request)
    model.save(folder, about, moments=kind == TRAINING, export=bool(name))
    return f"tinker://{run}/{kind}/{folder.name}"


BETAS = ("beta1", "beta2")


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
  return batch, loss, algorithm


def _json(values: dict[str, Any]) -> StoredResult:
  return StoredResult(JSON, json.dumps(values).encode())
