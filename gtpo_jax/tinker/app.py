"""The paths of the server. A request is in the ledger, on disk, before it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gtpo_jax.serving.http import Handler, answering, read_body, read_fields, starlette_app
from gtpo_jax.serving.requests import (
  MAX_BODY,
  ApiError,
  Body,
  Lenient,
  bad,
  checked,
  parse_object,
  shown,
)
from gtpo_jax.tinker.bodies import (
  OF_MODELS,
  LoadBody,
  ModelBody,
  NewModelBody,
  Page,
  PathBody,
  RequestBody,
  SamplerBody,
  SessionBody,
  read_sample,
)
from gtpo_jax.tinker.entropy_credit import recorded
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.sampler import Sampler
from gtpo_jax.tinker.saved_weights import Saved, Spec, Store, describe_run
from gtpo_jax.tinker.trainer import read_batch
from gtpo_jax.tinker.wire import (
  CREATE,
  ERROR,
  FORWARD_BACKWARD,
  LOAD,
  PROTO,
  REFUSED,
  SAMPLE,
  SAVE_FOR_SAMPLER,
  Submission,
  parse_batch,
  refusal,
)

PREFIX = "/api/v1/"
POLL_S = 30.0  # that a poll waits for a result
MAX_DATA = 65_536  # of a request
MAX_BATCH_BYTES = 256 << 20
WARNING = (
  "train_unembed has no effect here: adapters are on attention and MLP matrices, not the head"
)
Read = Callable[[str, bytes], Submission]  # reads the body that a client has sent
# Where a request names its model and its number, also if the rest is wrong or cut off.
_MODEL = re.compile(rb'"model_id"\s*:\s*"([\w:]+)"')
_SEQ = re.compile(rb'"seq_id"\s*:\s*(\d{1,18})\b')
_SAMPLER = re.compile(rb'"sampling_session_seq_id"\s*:\s*\d+')
_PROTO = re.compile(rb"\n[\x01-\x7f]([\w:]+)\x10([\x80-\xff]{0,4}[\x00-\x7f])")


def key_of(http: HttpRequest) -> str:
  """Returns the key of a client."""
  key = http.headers.get("x-api-key", "")
  if not key:
    raise ApiError(401, "the key is missing; set TINKER_API_KEY to tml- and any text")
  return key


def owner_of(http: HttpRequest) -> str:
  """Returns who a client is: a digest of its key."""
  return hashlib.sha256(key_of(http).encode("latin-1")).hexdigest()


def addressed(body: bytes) -> tuple[str, int] | None:
  """Returns the model and the number that a body names, even if the rest of it is wrong."""
  if found := _PROTO.match(body):
    digits = enumerate(found[2])
    return found[1].decode(), sum((digit & 127) << 7 * i for i, digit in digits)
  with contextlib.suppress(ApiError):
    values = parse_object(body)
    model, seq = values.get("model_id"), values.get("seq_id")
    return (model, seq) if isinstance(model, str) and type(seq) is int else None
  model, seq = _MODEL.search(body), _SEQ.search(body)
  return (model[1].decode(), int(seq[1])) if model and seq else None


class TinkerApp:
  """The application of a server.

  Attributes:
    asgi: what a server runs.
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
    base, ledger, store, sampler: what requests are about, and who takes them.
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
    read: dict[str, Read] = {op: functools.partial(self._read_simple, op) for op in OF_MODELS}
    read |= {CREATE: self._read_new_model, LOAD: self._read_load}
    read[FORWARD_BACKWARD] = self._read_batch
    # A group in one request shares its prompt, and gets its credit together.
    limits = {"fwdbwd_max_chunk_len": MAX_DATA, "sample_max_concurrent_requests": queue}
    limits["fwdbwd_max_chunk_bytes_count"] = MAX_BATCH_BYTES // 2
    served = {"model_name": base.name, "max_context_length": base.longest}
    served |= {"trainable": True, "sampleable": True}
    posts = {
      "client/config": _handler(lambda *_: limits, Lenient),
      "create_session": _handler(self._create_session, Lenient),
      "session_heartbeat": _handler(self._heartbeat, SessionBody),
      "sessions/{id}/finish": _handler(self._finish_session),
      "telemetry": _handler(lambda *_: {"status": "accepted"}, Lenient),  # and not kept
      "get_info": _handler(self._get_info, ModelBody),
      "create_sampling_session": _handler(self._create_sampler, SamplerBody),
      "asample": self._asample,
      "retrieve_future": self._retrieve,
      "cancel_future": _handler(self._cancel, RequestBody),
      "weights_info": _handler(self._weights_info, PathBody),
      **{op: functools.partial(self._submit, op, read[op]) for op in read},
    }
    gets = {
      "healthz": _handler(lambda *_: {"status": "ok"}),
      "get_server_capabilities": _handler(lambda *_: {"supported_models": [served]}),
      "samplers/{id}": _handler(self._sampler_info),
      "training_runs": _handler(self._runs),
      "training_runs/{id}": _handler(self._run),
      "training_runs/{id}/checkpoints": _handler(self._checkpoints),
      "checkpoints": _handler(self._all_checkpoints),
    }
    deletes = {"training_runs/{id}/checkpoints/{kind}/{name}": self._delete}
    answer = lambda handler: answering(handler, only_loopback, secret, sent=key_of)
    self.asgi: Starlette = starlette_app(
      [
        Route(PREFIX + path, answer(handler), methods=[method])
        for method, handlers in (("POST", posts), ("GET", gets), ("DELETE", deletes))
        for path, handler in handlers.items()
      ]
    )

  def _create_session(self, owner: str, body: Lenient) -> dict[str, Any]:
    name = self._ledger.open_session(owner)
    return {"session_id": name, "warning_message": WARNING, "type": "create_session"}

  def _heartbeat(self, owner: str, body: SessionBody) -> dict[str, Any]:
    self._ledger.session(owner, body.session_id)  # which is heard of
    return {"type": "session_heartbeat"}

  def _finish_session(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    self._ledger.finish_session(owner, http.path_params["id"])
    return {}

  # Models and their training.

  async def _submit(self, op: str, read: Read, http: HttpRequest) -> Response:
    """Acknowledges a request of a model, once it is on disk; a refused one has its error there."""
    owner = owner_of(http)
    most = MAX_BATCH_BYTES if op == FORWARD_BACKWARD else MAX_BODY
    body = await read_body(http, most, whole=False)
    request = await asyncio.to_thread(self._accept, op, read, owner, body, most)
    return JSONResponse({"request_id": request.id, "model_id": request.target})

  def _accept(self, op: str, read: Read, owner: str, body: bytes, most: int) -> Submission:
    # A client that repeats a request gives the sampler that it asks for another number.
    same = _SAMPLER.sub(b"", body) if op == SAVE_FOR_SAMPLER else body
    digest = hashlib.sha256(f"{op} ".encode() + same).digest()
    named = addressed(body)
    theirs = named is not None and self._ledger.owner(named[0]) == owner
    first = Submission(REFUSED, *named, b"", digest=digest) if named and theirs else None
    try:
      if first and self._ledger.is_known(first):
        return first
      if len(body) > most:
        raise ApiError(413, f"the body is over the limit of {most} bytes; send less at once")
      request = dataclasses.replace(read(owner, body), digest=digest)
      self._ledger.submit(request)
      return request
    except Exception as error:
      # The number counts as answered, so that the next ones of its model do not wait for it.
      if first and first.target in self._ledger.next and getattr(error, "status", 400) < 429:
        with contextlib.suppress(ApiError):
          self._ledger.submit(first, answer=refusal(error, op))
      raise

  def _read_new_model(self, owner: str, body: bytes) -> Submission:
    given = checked(NewModelBody, parse_object(body))
    name = self._new_name(owner, given.session_id, given.model_seq_id)
    self._check_base(given.base_model)
    lora = given.lora_config
    rank = lora.rank if lora else 0
    if rank > self._max_rank:
      raise bad(f"rank {rank} is over this server's limit of {self._max_rank}; lower it", "rank")
    if not rank and self._base.worker.model.config.lora.rank:
      raise bad(
        "rank 0 trains all weights, of which this server keeps one copy: set a rank, or start it "
        "with --merge_adapters=always",
        "rank",
      )
    if rank and not (lora.train_mlp or lora.train_attn):
      raise bad("adapters of the head alone are not supported; set train_attn or train_mlp")
    if lora and not rank and not (lora.train_mlp and lora.train_attn):
      raise bad("rank 0 trains all weights, so train_mlp and train_attn must be true; set a rank")
    seed = lora.seed if lora and lora.seed is not None else self._ledger.seed_for(name, 0)
    flags = (lora.train_mlp, lora.train_attn) if lora else ()
    spec = Spec(given.base_model, rank, seed, *flags, metadata=given.user_metadata)
    return Submission(CREATE, name, 0, b"", spec=dataclasses.asdict(spec))

  def _read_load(self, owner: str, body: bytes) -> Submission:
    given = checked(LoadBody, parse_object(body))
    if given.weights_access_token:
      raise bad(
        "weights_access_token is not supported: keys read only their own weights; leave it out",
        "weights_access_token",
      )
    if given.base_model is not None:
      self._check_base(given.base_model)
    new = (given.session_id, given.model_seq_id)
    known = (given.model_id, given.seq_id)
    if None in (new if known == (None, None) else known) or (*new, *known).count(None) != 2:
      raise bad("load_weights needs either model_id and seq_id, or session_id and model_seq_id")
    if given.user_metadata and given.model_id:
      raise bad("user_metadata belong to new models; leave them out", "user_metadata")
    saved = self._store.find(owner, given.path)
    if given.model_id is not None:
      return Submission(LOAD, self._model(owner, given.model_id), given.seq_id, body)
    name = self._new_name(owner, *new)
    spec = dataclasses.replace(saved.about.spec, metadata=given.user_metadata)
    return Submission(LOAD, name, 0, body, spec=dataclasses.asdict(spec))

  def _new_name(self, owner: str, session: str, number: int) -> str:
    """Returns the id of a model that a session gets."""
    found = self._ledger.session(owner, session)
    self._ledger.number_session(found)
    return f"{found}:train:{number}"

  def _model(self, owner: str, name: str) -> str:
    """Returns the id of a client's model."""
    self._ledger.session(owner, name)
    if name not in self._ledger.next:
      raise ApiError(410, "there is no such model; create it again")
    return name

  def _check_base(self, name: str) -> None:
    if not self._base.is_called(name):
      raise bad(
        f"this server has {self._base.name!r}, not {shown(name)}; name that one", "base_model"
      )

  def _read_batch(self, owner: str, body: bytes) -> Submission:
    message = parse_batch(body)
    name, seq = self._model(owner, message.model_id), message.seq_id
    if seq < 1:
      raise bad(f"seq_id must be at least 1, got {seq}", "seq_id")
    batch = read_batch(message, self._base)
    drawn = b""
    if batch.credit:
      find = functools.lru_cache(functools.partial(self._ledger.sampled, owner))
      drawn = np.concatenate(recorded(batch.data, find)).tobytes()
    return Submission(FORWARD_BACKWARD, name, seq, body, drawn)

  def _read_simple(self, op: str, owner: str, body: bytes) -> Submission:
    values = parse_object(body)
    if "optimizer_params" in values:
      raise bad("optimizer_params are not supported; use AdamParams", "optimizer_params")
    name = values.get("model_id")
    self._model(owner, name if isinstance(name, str) else "")
    given = checked(OF_MODELS[op], values)
    return Submission(op, given.model_id, given.seq_id, body)

  def _get_info(self, owner: str, body: ModelBody) -> dict[str, Any]:
    name = self._model(owner, body.model_id)
    spec = Spec(**self._ledger.spec(name))
    data = {"arch": self._base.worker.model.config.model_type, "model_name": spec.base_model}
    return {
      "type": "get_info",
      "model_data": data | {"tokenizer_id": self._base.tokenizer_of(spec.base_model)},
      "model_id": name,
      "is_lora": bool(spec.rank),
      "lora_rank": spec.rank or None,
      "model_name": spec.base_model,
    }

  # Sampling, and results.

  def _create_sampler(self, owner: str, body: SamplerBody) -> dict[str, Any]:
    session = self._ledger.session(owner, body.session_id)
    name = f"{session}:sample:{body.sampling_session_seq_id}"
    if body.base_model is not None or body.model_path is None:
      self._check_base(body.base_model or "")
    source = {"path": None, "live": False, "model": body.base_model}
    if body.model_path is not None:
      saved = self._store.find(owner, body.model_path)
      source |= {"path": saved.path, "model": saved.about.spec.base_model}
    self._ledger.number_session(session)
    self._ledger.add_sampler(name, source)
    return {"sampling_session_id": name, "type": "create_sampling_session"}

  def _source(self, owner: str, name: str) -> dict[str, Any]:
    self._ledger.session(owner, name)
    source = self._ledger.sampler(name)
    if source is None:
      raise ApiError(410, "there is no such sampling session")
    return source

  def _sampler_info(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    name = http.path_params["id"]
    source = self._source(owner, name)
    # A client that has only the path of weights reads the tokenizer of this name.
    base = self._base.tokenizer_of(source["model"])
    return {"sampler_id": name, "base_model": base, "model_path": source["path"]}

  async def _asample(self, http: HttpRequest) -> Response:
    owner = owner_of(http)
    body = await read_body(http)
    return await asyncio.to_thread(self._accept_sample, owner, body)

  def _accept_sample(self, owner: str, body: bytes) -> Response:
    given, _ = read_sample(parse_object(body), self._base, self._sampler.capacity)
    name = given.sampling_session_id
    self._source(owner, name)
    digest = hashlib.sha256(body).digest()
    request = Submission(SAMPLE, name, given.seq_id, body, digest=digest)
    self._ledger.submit(request)
    ids = [f"{request.id}:{i}" for i in range(given.num_samples)]
    return JSONResponse({"request_id": request.id, "model_id": name, "sample_sequence_ids": ids})

  def _cancel(self, owner: str, body: RequestBody) -> dict[str, Any]:
    self._ledger.cancel(owner, body.request_id)
    self._sampler.cancel(body.request_id)
    return {}

  async def _retrieve(self, http: HttpRequest) -> Response:
    name = checked(RequestBody, await read_fields(http)).request_id
    outcome = await self._ledger.wait(owner_of(http), name, POLL_S)
    if outcome is None:
      return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
    if outcome.kind == ERROR:
      message = outcome.body.decode(errors="replace")
      return JSONResponse({"error": message, "category": outcome.fault})
    kind = "application/x-protobuf" if outcome.kind == PROTO else "application/json"
    return Response(outcome.body, media_type=kind)

  # Saved weights, by training run.

  def _weights_info(self, owner: str, body: PathBody) -> dict[str, Any]:
    spec = self._store.find(owner, body.tinker_path).about.spec
    return {
      "base_model": spec.base_model,
      "is_lora": bool(spec.rank),
      "lora_rank": spec.rank or None,
      "train_unembed": False,
      "train_mlp": spec.train_mlp,
      "train_attn": spec.train_attn,
    }

  def _runs(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    saved = [item for item in self._store.runs(owner).items() if item[1]]
    return _page(http, "training_runs", saved, lambda item: describe_run(*item))

  def _run(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    run = http.path_params["id"]
    if saved := self._saved_of(owner, run):
      return describe_run(run, saved)
    raise ApiError(404, "this training run has saved no weights")

  def _checkpoints(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    saved = self._saved_of(owner, http.path_params["id"])
    return _page(http, "checkpoints", saved, Saved.describe)

  def _all_checkpoints(self, owner: str, http: HttpRequest) -> dict[str, Any]:
    listed = [x for saved in self._store.runs(owner).values() for x in saved]
    return _page(http, "checkpoints", listed, Saved.describe)

  def _saved_of(self, owner: str, run: str) -> list[Saved]:
    runs = self._store.runs(owner)
    if run not in runs:
      raise ApiError(404, f"there is no training run {shown(run)}")
    return runs[run]

  async def _delete(self, http: HttpRequest) -> Response:
    names = http.path_params
    path = f"tinker://{names['id']}/{names['kind']}/{names['name']}"
    saved = self._store.find(owner_of(http), path)
    if any(json.loads(x.body)["path"] == path for x in self._ledger.loads()):
      raise ApiError(409, f"{path} is being loaded; delete it once that is done")
    await asyncio.to_thread(shutil.rmtree, saved.folder)
    return Response(status_code=204)


def _handler(
  answer: Callable[[str, Any], dict[str, Any]], kind: type[Body] | None = None
) -> Handler:
  """Returns a handler of bodies, or of requests without one; its thread may wait for a disk."""

  async def handle(http: HttpRequest) -> Response:
    given = checked(kind, await read_fields(http, empty=True)) if kind else http
    return JSONResponse(await asyncio.to_thread(answer, owner_of(http), given))

  return handle


def _page(
  http: HttpRequest, name: str, found: Sequence[Any], describe: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
  """Returns the part of a list that a client has asked for."""
  page = checked(Page, dict(http.query_params))
  limit = len(found) if page.limit is None else page.limit
  chosen = found[page.offset : page.offset + limit]
  cursor = {"offset": page.offset, "limit": limit, "total_count": len(found)}
  return {name: [describe(x) for x in chosen], "cursor": cursor}
