"""The paths of the server itself and of sessions."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from gtpo_jax.serving.http import read_body
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.routes.client_requests import Endpoint, fields_of, owner_of
from gtpo_jax.tinker.routes.training_routes import MAX_BATCH_BYTES

MAX_DATA = 65_536  # of a request
WARNING = (
  "train_unembed has no effect here: adapters are on attention and MLP matrices, not the head"
)


class SessionRoutes:
  """What the server has, and the sessions of clients."""

  def __init__(self, base: ServedBase, ledger: Ledger, queue: int):
    self._base = base
    self._ledger = ledger
    self._queue = queue
    self.endpoints = [
      Endpoint("GET", "healthz", _health),
      Endpoint("POST", "client/config", self._client_config),
      Endpoint("GET", "get_server_capabilities", self._capabilities),
      Endpoint("POST", "create_session", self._create),
      Endpoint("POST", "session_heartbeat", self._heartbeat),
      Endpoint("POST", "sessions/{id}/finish", self._finish),
      Endpoint("POST", "telemetry", _telemetry),
    ]

  async def _client_config(self, http: HttpRequest) -> Response:
    # A group in one request shares its prompt, and gets its credit together.
    limits = {
      "fwdbwd_max_chunk_len": MAX_DATA,
      "fwdbwd_max_chunk_bytes_count": MAX_BATCH_BYTES // 2,
    }
    return JSONResponse(limits | {"sample_max_concurrent_requests": self._queue})

  async def _capabilities(self, http: HttpRequest) -> Response:
    name, longest = self._base.name, self._base.longest
    model = {"model_name": name, "max_context_length": longest}
    return JSONResponse({"supported_models": [model | {"trainable": True, "sampleable": True}]})

  async def _create(self, http: HttpRequest) -> Response:
    await fields_of(http)
    session, size = self._ledger.sessions.open(owner_of(http))
    await asyncio.to_thread(self._ledger.book.sync, size)
    return JSONResponse(
      {"session_id": session.id, "warning_message": WARNING, "type": "create_session"}
    )

  async def _heartbeat(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    self._ledger.sessions.find(owner_of(http), fields.take("session_id"))
    return JSONResponse({"type": "session_heartbeat"})

  async def _finish(self, http: HttpRequest) -> Response:
    self._ledger.sessions.finish(owner_of(http), http.path_params["id"])
    return JSONResponse({})


async def _health(http: HttpRequest) -> Response:
  return JSONResponse({"status": "ok"})


async def _telemetry(http: HttpRequest) -> Response:
  await read_body(http)
  return JSONResponse({"status": "accepted"})  # and not kept
