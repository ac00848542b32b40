"""What the requests of a model do to it."""

from __future__ import annotations

import json
import shutil
import sys
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
from gtpo_jax.tinker.ledger import CREATE, LOAD, REFUSED, Ledger
from gtpo_jax.tinker.losses import Loss, make_loss
from gtpo_jax.tinker.models import ServedBase, TrainedModel
from gtpo_jax.tinker.models_in_training import ModelsInTraining
from gtpo_jax.tinker.saved_weights import EPHEMERAL, SAMPLER, TRAINING, Spec, Store, read_saved
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


class Operations:
  """Carries out requests, each by the function of its operation."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, models: ModelsInTraining):
    """Args:
    base: the model that others begin with.
    ledger: takes the sessions of samplers, and knows what was sampled.
    store: where weights are saved.
    models: in training.
    """
    self._base = base
    self._ledger = ledger
    self._store = store
    self._models = models
    self._by_name: dict[str, Callable[[Submission], StoredResult]] = {
      CREATE: self._create,
      LOAD: self._load,
      FORWARD_BACKWARD: self._loss,
      OPTIM_STEP: self._step,
      SAVE: self._save,
      SAVE_FOR_SAMPLER: self._save_for_sampler,
      REFUSED: lambda request: StoredResult(ERROR, b"the request was refused", "user"),
    }

  def carry_out(self, request: Submission) -> StoredResult:
    """Returns the result of a request, or why it has failed."""
    try:
      return self._by_name[request.op](request)
    except Exception as error:
      return refusal(error, request.op)

  def _create(self, request: Submission) -> StoredResult:
    spec = Spec(**self._ledger.spec(request.target))
    self._models.make_space(request.target, full=not spec.rank)
    self._models.add(request.target, TrainedModel(self._base, spec))
    return _json({"model_id": request.target, "type": "create_model"})

  def _load(self, request: Submission) -> StoredResult:
    body = checked(LoadBody, parse_object(request.body))
    if self._ledger.snapshots[request.target] < request.seq:
      saved = self._store.find(self._ledger.owner(request.target), body.path)
      if request.seq == 0:
        spec = Spec(**self._ledger.spec(request.target))
        self._models.make_space(request.target, full=not spec.rank)
        self._models.add(request.target, TrainedModel(self._base, spec, saved, body.optimizer))
      else:
        spec = saved.about.spec
        self._models.get(request.target).load(spec, saved, body.optimizer)
      # What was read may change, so its effect is saved before the client hears of it.
      self._models.snapshot_surely(request.target, request.seq)
    return _json({"path": body.path, "type": "load_weights"})

  def _loss(self, request: Submission) -> StoredResult:
    batch, loss, algorithm = read_loss(parse_batch(request.body), self._base)
    data, metrics = batch.data, {}
    if algorithm:
      ends = np.cumsum([len(datum.tokens) for datum in data])
      entropies = np.split(np.frombuffer(request.drawn, np.float32), ends[:-1])
      data, metrics = shape(algorithm, data, entropies)
    outputs, total = self._models.get(request.target).run(data, loss, batch.forward_only)
    metrics["loss:sum"] = total
    return StoredResult(PROTO, loss_output(outputs, len(data), metrics))

  def _step(self, request: Submission) -> StoredResult:
    params = checked(StepBody, parse_object(request.body)).adam_params
    settings = StepSettings(*(np.float32(value) for _, value in params))
    return _json({"metrics": self._models.get(request.target).step(settings)})

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
    model = self._models.get(request.target)
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
