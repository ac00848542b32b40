"""The paths of models and their training."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.serving.http import read_body
from gtpo_jax.serving.requests import Fields, one_line
from gtpo_jax.tinker.ledger.entries import CREATE, LOAD
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase, Spec, read_spec
from gtpo_jax.tinker.operations import (
  FORWARD_BACKWARD,
  OPTIM_STEP,
  REFUSED,
  SAVE,
  SAVE_FOR_SAMPLER,
  read_loss,
)
from gtpo_jax.tinker.routes.client_requests import (
  Endpoint,
  accept,
  check_base,
  fields_of,
  model_of,
  number_of,
  owner_of,
)
from gtpo_jax.tinker.saved_weights import Store
from gtpo_jax.tinker.wire import Submission, parse_batch

MAX_BATCH_BYTES = 256 << 20


class TrainingRoutes:
  """Models, and what clients do with them."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, max_rank: int):
    self._base = base
    self._ledger = ledger
    self._store = store
    self._max_rank = max_rank
    self.endpoints = [
      Endpoint("POST", "create_model", self._create_model),
      Endpoint("POST", "load_weights", self._load_weights),
      Endpoint("POST", "get_info", self._get_info),
      Endpoint("POST", FORWARD_BACKWARD, self._forward_backward),
      *(
        Endpoint("POST", op, functools.partial(self._other, op))
        for op in (OPTIM_STEP, SAVE, SAVE_FOR_SAMPLER)
      ),
    ]

  async def _create_model(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    name = self._new_name(owner_of(http), fields.take("session_id"), fields)
    default = self._ledger.sessions.seed_for(name, 0)
    spec = read_spec(fields, self._max_rank, default)
    check_base(self._base, spec.base_model)
    described = dataclasses.asdict(spec)
    self._ledger.sessions.describe(name, described)
    body = json.dumps({"spec": described}).encode()
    return await accept(self._ledger, Submission(CREATE, name, 0, body))

  async def _load_weights(self, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = Fields(body)
    owner = owner_of(http)
    if fields.take("weights_access_token"):
      raise bad("weights_access_token is not supported: keys read only their own weights")
    saved = self._store.find(owner, fields.take("path"))
    if (session_id := fields.take("session_id")) is not None:
      name = self._new_name(owner, session_id, fields)
      self._ledger.sessions.describe(name, saved.about["spec"])
      return await accept(self._ledger, Submission(LOAD, name, 0, body))
    name = model_of(self._ledger, owner, fields.take("model_id"))
    seq = number_of(fields, "seq_id", 1)
    return await accept(self._ledger, Submission(LOAD, name, seq, body))

  def _new_name(self, owner: str, session_id: Any, fields: Fields) -> str:
    """Returns the id of a model that a session gets."""
    session = self._ledger.sessions.find(owner, session_id)
    self._ledger.sessions.use(session)
    return f"{session.id}:train:{number_of(fields, 'model_seq_id')}"

  async def _get_info(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    name = model_of(self._ledger, owner_of(http), fields.take("model_id"))
    spec = Spec(**self._ledger.entries.specs[name])
    data = {"arch": self._base.worker.model.config.model_type, "model_name": spec.base_model}
    return JSONResponse(
      {
        "type": "get_info",
        "model_data": data | {"tokenizer_id": spec.base_model},
        "model_id": name,
        "is_lora": bool(spec.rank),
        "lora_rank": spec.rank or None,
        "model_name": spec.base_model,
      }
    )

  async def _forward_backward(self, http: HttpRequest) -> Response:
    body = await read_body(http, MAX_BATCH_BYTES)
    message = await asyncio.to_thread(parse_batch, body)
    name, seq = message.model_id, message.seq_id
    model_of(self._ledger, owner_of(http), name)
    if seq < 1:
      raise bad(f"seq_id must be at least 1, got {seq}", "seq_id")
    request = Submission(FORWARD_BACKWARD, name, seq, body)
    try:
      await asyncio.to_thread(read_loss, message, self._base)
    except (ApiError, UserError) as error:
      error = error if isinstance(error, ApiError) else one_line(error)
      # It is accepted too: the next ones of its model wait for it.
      said = error.message.encode(errors="replace")
      await accept(self._ledger, dataclasses.replace(request, op=REFUSED, body=said))
      raise error from None
    return await accept(self._ledger, request)

  async def _other(self, op: str, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = Fields(body)
    name = model_of(self._ledger, owner_of(http), fields.take("model_id"))
    seq = number_of(fields, "seq_id", 1)
    return await accept(self._ledger, Submission(op, name, seq, body))
