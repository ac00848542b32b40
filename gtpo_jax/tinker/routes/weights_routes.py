"""The paths of saved weights."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.serving.requests import shown
from gtpo_jax.tinker.routes.client_requests import Endpoint, fields_of, owner_of
from gtpo_jax.tinker.saved_weights import Saved, Store, describe_run


class WeightsRoutes:
  """The weights that a client has saved, by training run."""

  def __init__(self, store: Store):
    self._store = store
    self.endpoints = [
      Endpoint("POST", "weights_info", self._weights_info),
      Endpoint("GET", "training_runs", self._runs),
      Endpoint("GET", "training_runs/{id}", self._run),
      Endpoint("GET", "training_runs/{id}/checkpoints", self._checkpoints),
      Endpoint("GET", "checkpoints", self._all_checkpoints),
      Endpoint("DELETE", "training_runs/{id}/checkpoints/{kind}/{name}", self._delete),
    ]

  async def _weights_info(self, http: HttpRequest) -> Response:
    fields = await fields_of(http)
    spec = self._store.find(owner_of(http), fields.take("tinker_path")).about["spec"]
    return JSONResponse(
      {
        "base_model": spec["base_model"],
        "is_lora": bool(spec["rank"]),
        "lora_rank": spec["rank"] or None,
        "train_unembed": False,
        "train_mlp": spec["train_mlp"],
        "train_attn": spec["train_attn"],
      }
    )

  async def _runs(self, http: HttpRequest) -> Response:
    runs = await asyncio.to_thread(self._store.runs, owner_of(http))
    listed = [describe_run(run, saved) for run, saved in runs.items() if saved]
    return _whole("training_runs", listed)

  async def _saved_of(self, http: HttpRequest) -> list[Saved]:
    runs = await asyncio.to_thread(self._store.runs, owner_of(http))
    run = http.path_params["id"]
    if run not in runs:
      raise ApiError(404, f"there is no training run {shown(run)}")
    return runs[run]

  async def _run(self, http: HttpRequest) -> Response:
    saved = await self._saved_of(http)
    if not saved:
      raise ApiError(404, "this training run has saved no weights")
    return JSONResponse(describe_run(http.path_params["id"], saved))

  async def _checkpoints(self, http: HttpRequest) -> Response:
    return JSONResponse({"checkpoints": [x.describe() for x in await self._saved_of(http)]})

  async def _all_checkpoints(self, http: HttpRequest) -> Response:
    runs = await asyncio.to_thread(self._store.runs, owner_of(http))
    listed = [x.describe() for saved in runs.values() for x in saved]
    return _whole("checkpoints", listed)

  async def _delete(self, http: HttpRequest) -> Response:
    names = http.path_params
    path = f"tinker://{names['id']}/{names['kind']}/{names['name']}"
    saved = self._store.find(owner_of(http), path)
    await asyncio.to_thread(saved.delete)
    return Response(status_code=204)


def _whole(name: str, listed: list[dict[str, Any]]) -> Response:
  """Returns a list that has only one page."""
  cursor = {"offset": 0, "limit": len(listed), "total_count": len(listed)}
  return JSONResponse({name: listed, "cursor": cursor})
