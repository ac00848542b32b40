"""The paths of sampling and of results."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.serving.http import read_body
from gtpo_jax.serving.requests import Fields
from gtpo_jax.tinker.ledger.entries import SAMPLE
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.routes.client_requests import (
  Endpoint,
  accept,
  check_base,
  fields_of,
  number_of,
  owner_of,
)
from gtpo_jax.tinker.sampler import Sampler, SamplingRequest
from gtpo_jax.tinker.saved_weights import Store
from gtpo_jax.tinker.wire import ERROR, PROTO, Submission

POLL_S = 30.0  # that a poll waits for a result


class SamplingRoutes:
  """Sampling, and the results of all requests."""

  def __init__(self, base: ServedBase, ledger: Ledger, store: Store, sampler: Sampler):
    self._base = base
    self._ledger = ledger
    self._store = store
    self._sampler = sampler
    self.endpoints = [
      Endpoint("POST", "create_sampling_session", self._create_sampler),
      Endpoint("GET", "samplers/{id}", self._sampler_info),
      Endpoint("POST", "asample", self._asample),
      Endpoint("POST", "retrieve_future", self._retrieve),
      Endpoint("POST", "cancel_future", self._cancel),
    ]

  async def _create_sampler(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    owner = owner_of(http)
    session = self._ledger.sessions.find(owner, fields.take("session_id"))
    self._ledger.sessions.use(session)
    name = f"{session.id}:sample:{number_of(fields, 'sampling_session_seq_id')}"
    path = fields.take("model_path")
    if path is None:
      model = fields.take("base_model")
      check_base(self._base, model)
      source = {"run": "", "kind": "", "name": "", "live": False, "model": model}
    else:
      saved = self._store.find(owner, path)
      run, kind = saved.about["run"], saved.folder.parent.name
      model = saved.about["spec"]["base_model"]
      source = {"run": run, "kind": kind, "name": saved.folder.name, "live": False, "model": model}
    await asyncio.to_thread(self._ledger.sessions.add_sampler, name, source)
    return JSONResponse({"sampling_session_id": name, "type": "create_sampling_session"})

  async def _sampler_info(self, http: HttpRequest) -> Response:
    name = http.path_params["id"]
    source = self._sampler_source(owner_of(http), name)
    path = f"tinker://{source['run']}/{source['kind']}/{source['name']}" if source["run"] else None
    return JSONResponse({"sampler_id": name, "base_model": source["model"], "model_path": path})

  def _sampler_source(self, owner: str, name: Any) -> dict[str, Any]:
    self._ledger.sessions.of(owner, name)
    source = self._ledger.entries.samplers.get(name)
    if source is None:
      raise ApiError(410, "there is no such sampling session")
    return source

  async def _asample(self, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = await asyncio.to_thread(Fields, body)
    owner = owner_of(http)
    name = fields.take("sampling_session_id")
    if name is None:
      raise bad("sampling_session_id is missing; make a sampling client")
    self._sampler_source(owner, name)
    seq = number_of(fields, "seq_id")
    ask = await asyncio.to_thread(SamplingRequest, self._base, fields, 0)
    request = Submission(SAMPLE, name, seq, body)
    ids = [f"{request.id}:{i}" for i in range(ask.count)]
    return await accept(self._ledger, request, sample_sequence_ids=ids)

  async def _cancel(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    name = fields.take("request_id")
    await asyncio.to_thread(self._ledger.submissions.cancel, owner_of(http), name)
    self._sampler.cancel(name)
    return JSONResponse({})

  async def _retrieve(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    outcome = await self._ledger.submissions.wait(owner_of(http), fields.take("request_id"), POLL_S)
    if outcome is None:
      return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
    if outcome.kind == ERROR:
      message = outcome.body.decode(errors="replace")
      return JSONResponse({"error": message, "category": outcome.fault})
    kind = "application/x-protobuf" if outcome.kind == PROTO else "application/json"
    return Response(outcome.body, media_type=kind)
