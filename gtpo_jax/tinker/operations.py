"""What the requests of a model do to it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.serving.api_errors import bad
from gtpo_jax.serving.requests import Fields
from gtpo_jax.tinker.entropy_credit import shape, split_credit
from gtpo_jax.tinker.ledger.entries import CREATE, LARGEST_SEQ, LOAD
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.losses import Loss, make_loss
from gtpo_jax.tinker.models import ServedBase, Spec, TrainedModel
from gtpo_jax.tinker.models_in_training import ModelsInTraining
from gtpo_jax.tinker.saved_weights import (
  EPHEMERAL,
  KINDS,
  SAMPLER,
  TRAINING,
  Store,
  check_name,
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

LONGEST_TTL_S = 1e9  # that weights may be kept for
FORWARD_BACKWARD, OPTIM_STEP = "forward_backward", "optim_step"
SAVE, SAVE_FOR_SAMPLER, REFUSED = "save_weights", "save_weights_for_sampler", "refused"
CHANGES = (CREATE, LOAD, FORWARD_BACKWARD, OPTIM_STEP)  # what is carried out again
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
BETAS = ("beta1", "beta2")
OFF = {"weight_decay": 0.0, "grad_clip_norm": 0.0}


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
      REFUSED: lambda request: StoredResult(ERROR, request.body, "user"),
    }

  def carry_out(self, request: Submission) -> StoredResult:
    """Returns the result of a request, or why it has failed."""
    try:
      return self._by_name[request.op](request)
    except Exception as error:
      return refusal(error, request.op)

  def _create(self, request: Submission) -> StoredResult:
    spec = Spec(**json.loads(request.body)["spec"])
    self._models.make_space(full=not spec.rank)
    self._models.add(request.target, TrainedModel(self._base, spec))
    return _json({"model_id": request.target, "type": "create_model"})

  def _load(self, request: Submission) -> StoredResult:
    fields = json.loads(request.body)
    saved = self._store.find(self._ledger.entries.queues[request.target].owner, fields["path"])
    spec = Spec(**saved.about["spec"])
    moments = fields.get("optimizer") is True
    if request.seq == 0:
      spec = dataclasses.replace(spec, metadata=fields.get("user_metadata") or {})
      self._models.make_space(full=not spec.rank)
      self._models.add(request.target, TrainedModel(self._base, spec, saved, moments))
    else:
      self._models.get(request.target).load(spec, saved, moments)
    return _json({"path": fields["path"], "type": "load_weights"})

  def _loss(self, request: Submission) -> StoredResult:
    batch, loss, algorithm = read_loss(parse_batch(request.body), self._base)
    data, metrics = batch.data, {}
    if algorithm:
      owner = self._ledger.entries.queues[request.target].owner
      data, metrics = shape(
        algorithm, data, lambda name: self._ledger.submissions.sampled(owner, name)
      )
    outputs, total = self._models.get(request.target).run(data, loss, batch.forward_only)
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
    return _json({"metrics": self._models.get(request.target).step(StepSettings(*values.values()))})

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
      source["model"] = self._models.get(request.target).spec.base_model
      source["saved_by"] = f"{request.target.partition(':')[2]}:{request.seq}"
      self._ledger.sessions.add_sampler(sampler, source)
      answer["sampling_session_id"] = sampler
    return _json(answer)

  def _write(self, request: Submission, kind: str, name: str | None, fields: Fields) -> str:
    """Saves weights under a name, or under the number of the request; returns their path."""
    run = request.target
    overwrite = fields.flag("overwrite")
    seconds = fields.number("ttl_seconds", 0.0, 0.0, LONGEST_TTL_S)
    folder = self._store.folder(run, kind, name or f"{EPHEMERAL}{request.seq}")
    if saved := read_saved(folder):
      if saved.about["seq"] == request.seq:
        return saved.path  # written by a process that was killed before it could say so
      if not overwrite:
        raise bad(f"{saved.path} exists; give another name, or overwrite=True", "path")
      saved.delete()
    owner = self._ledger.entries.queues[run].owner
    about = {"run": run, "owner": owner, "kind": KINDS[kind], "seq": request.seq}
    about["metadata"] = fields.take("user_metadata")
    if seconds:
      about["expires"] = time.time() + seconds
    self._store.expire()
    model = self._models.get(request.target)
    model.save(folder, about, moments=kind == TRAINING, export=bool(name))
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
  return batch, loss, algorithm


def _json(values: dict[str, Any]) -> StoredResult:
  return StoredResult(JSON, json.dumps(values).encode())
