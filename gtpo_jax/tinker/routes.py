"""The paths of the server. Requests are written to the journal before they are acknowledged."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.serving.http import answering, read_body, starlette_app
from gtpo_jax.serving.requests import Fields, one_line, shown
from gtpo_jax.tinker.ledger import CREATE, LARGEST_SEQ, LOAD, SAMPLE, Ledger
from gtpo_jax.tinker.models import ServedBase, Spec, read_spec
from gtpo_jax.tinker.sampler import Sampler, SamplingRequest
from gtpo_jax.tinker.saved_weights import Saved, Store, describe_run
from gtpo_jax.tinker.trainer import (
  FORWARD_BACKWARD,
  OPTIM_STEP,
  REFUSED,
  SAVE,
  SAVE_FOR_SAMPLER,
  read_loss,
)
from gtpo_jax.tinker.wire import ERROR, PROTO, Submission, parse_batch

PREFIX = "/api/v1/"
POLL_S = 30.0  # that a poll waits for a result
MAX_BATCH_BYTES = 256 << 20
MAX_DATA = 65_536  # of a request
WARNING = (
  "train_unembed has no effect here: adapters are on attention and MLP matrices, not the head"
)


class Routes:
  """The paths of a server.

  Attributes:
    asgi: the application that a server runs.
  """

  def __init__(
    self,
    base: ServedBase,
    ledger: Ledger,
    store: Store,
    sampler: Sampler,
    max_rank: int,
    queue: int,
    secret: str,
    only_loopback: bool,
  ):
    """Args:
    base: the model that others begin with.
    ledger: takes requests.
    store: has saved weights.
    sampler: that of the ledger, which cancels samples.
    max_rank: the highest rank of adapters.
    queue: how many samples a client may have under way.
    secret: the key that clients must have; "" for any, each of which sees only its own.
    only_loopback: as in `answering`.
    """
    self._base = base
    self._ledger = ledger
    self._store = store
    self._sampler = sampler
    self._max_rank = max_rank
    self._queue = queue
    answer = functools.partial(answering, only_loopback=only_loopback, token=secret, sent=_key)
    posts: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
      "client/config": self._client_config,
      "create_session": self._create_session,
      "session_heartbeat": self._heartbeat,
      "create_sampling_session": self._create_sampler,
      "create_model": self._create_model,
      "load_weights": self._load_weights,
      "get_info": self._get_info,
      "forward_backward": self._forward_backward,
      "weights_info": self._weights_info,
      "asample": self._asample,
      "retrieve_future": self._retrieve,
      "cancel_future": self._cancel,
      "telemetry": self._telemetry,
      "sessions/{id}/finish": self._finish_session,
      **{op: functools.partial(self._training, op) for op in (OPTIM_STEP, SAVE, SAVE_FOR_SAMPLER)},
    }
    gets: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
      "healthz": self._health,
      "get_server_capabilities": self._capabilities,
      "samplers/{id}": self._sampler_info,
      "training_runs": self._runs,
      "training_runs/{id}": self._run,
      "training_runs/{id}/checkpoints": self._checkpoints,
      "checkpoints": self._all_checkpoints,
    }
    one = "training_runs/{id}/checkpoints/{kind}/{name}"
    routes = [
      *(Route(PREFIX + path, answer(x), methods=["POST"]) for path, x in posts.items()),
      *(Route(PREFIX + path, answer(x), methods=["GET"]) for path, x in gets.items()),
      Route(PREFIX + one, answer(self._delete), methods=["DELETE"]),
    ]
    self.asgi = starlette_app(routes)

  # Sessions.

  async def _health(self, http: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})

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

  async def _create_session(self, http: HttpRequest) -> Response:
    await _fields(http)
    session, size = self._ledger.open_session(_owner(http))
    await asyncio.to_thread(self._ledger.sync, size)
    return JSONResponse(
      {"session_id": session.id, "warning_message": WARNING, "type": "create_session"}
    )

  async def _heartbeat(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    self._ledger.session(_owner(http), fields.take("session_id"))
    return JSONResponse({"type": "session_heartbeat"})

  async def _finish_session(self, http: HttpRequest) -> Response:
    self._ledger.finish_session(_owner(http), http.path_params["id"])
    return JSONResponse({})

  async def _telemetry(self, http: HttpRequest) -> Response:
    await read_body(http)
    return JSONResponse({"status": "accepted"})  # and not kept

  # Models.

  async def _create_model(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    session = self._ledger.session(_owner(http), fields.take("session_id"))
    self._ledger.use(session)
    name = f"{session.id}:train:{_number(fields, 'model_seq_id')}"
    default = self._ledger.seed_for(name, 0)
    spec = read_spec(fields, self._max_rank, default)
    self._check_base(spec.base_model)
    described = dataclasses.asdict(spec)
    self._ledger.describe(name, described)
    body = json.dumps({"spec": described}).encode()
    return await self._accept(Submission(f"{name}:0", CREATE, name, 0, body))

  async def _load_weights(self, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = Fields(body)
    owner = _owner(http)
    if fields.take("weights_access_token"):
      raise bad("weights_access_token is not supported: keys read only their own weights")
    saved = self._store.find(owner, fields.take("path"))
    if (given := fields.take("session_id")) is not None:
      session = self._ledger.session(owner, given)
      self._ledger.use(session)
      name = f"{session.id}:train:{_number(fields, 'model_seq_id')}"
      self._ledger.describe(name, saved.about["spec"])
      return await self._accept(Submission(f"{name}:0", LOAD, name, 0, body))
    name = self._model_of(owner, fields)
    seq = _number(fields, "seq_id", 1)
    return await self._accept(Submission(f"{name}:{seq}", LOAD, name, seq, body))

  async def _get_info(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    name = self._model_of(_owner(http), fields)
    spec = Spec(**self._ledger.specs[name])
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

  def _model_of(self, owner: str, fields: Fields) -> str:
    """Returns the id of a client's model.

    Raises:
      ApiError: there is none.
    """
    name = fields.take("model_id")
    self._ledger.session_of(owner, name)
    if name not in self._ledger.queues:
      raise ApiError(410, "there is no such model; create it again")
    return name

  def _check_base(self, name: Any) -> None:
    if not self._base.is_called(name):
      raise bad(f"this server has {self._base.name!r}, not {shown(name)}", "base_model")

  # Training.

  async def _forward_backward(self, http: HttpRequest) -> Response:
    body = await read_body(http, MAX_BATCH_BYTES)
    message = await asyncio.to_thread(parse_batch, body)
    name, seq = message.model_id, message.seq_id
    self._model_of(_owner(http), Fields(json.dumps({"model_id": name}).encode()))
    if seq < 1:
      raise bad(f"seq_id must be at least 1, got {seq}", "seq_id")

    request = Submission(f"{name}:{seq}", FORWARD_BACKWARD, name, seq, body)
    return await self._accept_or_refuse(request, functools.partial(read_loss, message, self._base))

  async def _training(self, op: str, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = Fields(body)
    name = self._model_of(_owner(http), fields)
    seq = _number(fields, "seq_id", 1)
    return await self._accept(Submission(f"{name}:{seq}", op, name, seq, body))

  async def _accept_or_refuse(self, request: Submission, check: Callable[[], Any]) -> Response:
    """Accepts a request that is right; another one too, if its model's next ones wait for it."""
    try:
      await asyncio.to_thread(check)
    except (ApiError, UserError) as error:
      error = error if isinstance(error, ApiError) else one_line(error)
      await self._accept(
        dataclasses.replace(request, op=REFUSED, body=error.message.encode(errors="replace"))
      )
      raise error from None
    return await self._accept(request)

  async def _accept(self, request: Submission, **more: Any) -> Response:
    size = self._ledger.submit(request)
    await asyncio.to_thread(self._ledger.sync, size)
    return JSONResponse({"request_id": request.id, "model_id": request.target, **more})

  # Sampling.

  async def _create_sampler(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    owner = _owner(http)
    session = self._ledger.session(owner, fields.take("session_id"))
    self._ledger.use(session)
    name = f"{session.id}:sample:{_number(fields, 'sampling_session_seq_id')}"
    path = fields.take("model_path")
    if path is None:
      model = fields.take("base_model")
      self._check_base(model)
      source = {"run": "", "kind": "", "name": "", "live": False, "model": model}
    else:
      saved = self._store.find(owner, path)
      run, kind = saved.about["run"], saved.folder.parent.name
      model = saved.about["spec"]["base_model"]
      source = {"run": run, "kind": kind, "name": saved.folder.name, "live": False, "model": model}
    await asyncio.to_thread(self._ledger.add_sampler, name, source)
    return JSONResponse({"sampling_session_id": name, "type": "create_sampling_session"})

  async def _sampler_info(self, http: HttpRequest) -> Response:
    name = http.path_params["id"]
    source = self._sampler_source(_owner(http), name)
    path = f"tinker://{source['run']}/{source['kind']}/{source['name']}" if source["run"] else None
    return JSONResponse({"sampler_id": name, "base_model": source["model"], "model_path": path})

  def _sampler_source(self, owner: str, name: Any) -> dict[str, Any]:
    self._ledger.session_of(owner, name)
    source = self._ledger.samplers.get(name)
    if source is None:
      raise ApiError(410, "there is no such sampling session")
    return source

  async def _asample(self, http: HttpRequest) -> Response:
    body = await read_body(http)
    fields = await asyncio.to_thread(Fields, body)
    owner = _owner(http)
    name = fields.take("sampling_session_id")
    if name is None:
      raise bad("sampling_session_id is missing; make a sampling client")
    self._sampler_source(owner, name)
    seq = _number(fields, "seq_id")
    ask = await asyncio.to_thread(SamplingRequest, self._base, fields, 0)
    request = Submission(f"{name}:{seq}", SAMPLE, name, seq, body)
    ids = [f"{request.id}:{i}" for i in range(ask.count)]
    return await self._accept(request, sample_sequence_ids=ids)

  async def _cancel(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    name = fields.take("request_id")
    await asyncio.to_thread(self._ledger.cancel, _owner(http), name)
    self._sampler.cancel(name)
    return JSONResponse({})

  async def _retrieve(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    outcome = await self._ledger.wait(_owner(http), fields.take("request_id"), POLL_S)
    if outcome is None:
      return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
    if outcome.kind == ERROR:
      message = outcome.body.decode(errors="replace")
      return JSONResponse({"error": message, "category": outcome.fault})
    kind = "application/x-protobuf" if outcome.kind == PROTO else "application/json"
    return Response(outcome.body, media_type=kind)

  # Saved weights.

  async def _weights_info(self, http: HttpRequest) -> Response:
    fields = await _fields(http)
    spec = self._store.find(_owner(http), fields.take("tinker_path")).about["spec"]
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
    runs = await asyncio.to_thread(self._store.runs, _owner(http))
    listed = [describe_run(run, saved) for run, saved in runs.items() if saved]
    cursor = {"offset": 0, "limit": len(listed), "total_count": len(listed)}
    return JSONResponse({"training_runs": listed, "cursor": cursor})

  async def _saved_of(self, http: HttpRequest) -> list[Saved]:
    runs = await asyncio.to_thread(self._store.runs, _owner(http))
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
    runs = await asyncio.to_thread(self._store.runs, _owner(http))
    listed = [x.describe() for saved in runs.values() for x in saved]
    cursor = {"offset": 0, "limit": len(listed), "total_count": len(listed)}
    return JSONResponse({"checkpoints": listed, "cursor": cursor})

  async def _delete(self, http: HttpRequest) -> Response:
    names = http.path_params
    saved = self._store.find(
      _owner(http), f"tinker://{names['id']}/{names['kind']}/{names['name']}"
    )
    await asyncio.to_thread(self._store.delete, saved)
    return Response(status_code=204)


def _key(http: HttpRequest) -> str:
  """Returns the key of a client.

  Raises:
    ApiError: it has sent none.
  """
  key = http.headers.get("x-api-key", "")
  if not key:
    raise ApiError(401, "the key is missing; set TINKER_API_KEY to tml- and any text")
  return key


def _owner(http: HttpRequest) -> str:
  return hashlib.sha256(_key(http).encode("latin-1")).hexdigest()


async def _fields(http: HttpRequest) -> Fields:
  """Returns the fields of a body. Those that this server does not know are left alone."""
  return Fields(await read_body(http) or b"{}")


def _number(fields: Fields, name: str, least: int = 0) -> int:
  value = fields.integer(name, None, least, LARGEST_SEQ)
  if value is None:
    raise bad(f"{name} is missing", name)
  return value
