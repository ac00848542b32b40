"""What the paths share: who asks, for what, and the acknowledgement that it is on disk."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from gtpo_jax.serving.api_errors import ApiError, bad
from gtpo_jax.serving.http import read_body
from gtpo_jax.serving.requests import Fields, shown
from gtpo_jax.tinker.ledger.entries import LARGEST_SEQ
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.wire import Submission


class Endpoint(NamedTuple):
  """A path of the protocol, and what answers it."""

  method: str
  path: str
  handler: Callable[[HttpRequest], Awaitable[Response]]


def key_of(http: HttpRequest) -> str:
  """Returns the key of a client.

  Raises:
    ApiError: it has sent none.
  """
  key = http.headers.get("x-api-key", "")
  if not key:
    raise ApiError(401, "the key is missing; set TINKER_API_KEY to tml- and any text")
  return key


def owner_of(http: HttpRequest) -> str:
  """Returns who a client is: a digest of its key."""
  return hashlib.sha256(key_of(http).encode("latin-1")).hexdigest()


async def fields_of(http: HttpRequest) -> Fields:
  """Returns the fields of a body. Those that this server does not know are left alone."""
  return Fields(await read_body(http) or b"{}")


def number_of(fields: Fields, name: str, least: int = 0) -> int:
  """Returns a number that a client counts.

  Raises:
    ApiError: it is missing, or out of bounds.
  """
  value = fields.integer(name, None, least, LARGEST_SEQ)
  if value is None:
    raise bad(f"{name} is missing", name)
  return value


def model_of(ledger: Ledger, owner: str, name: Any) -> str:
  """Returns the id of a client's model.

  Raises:
    ApiError: there is none.
  """
  ledger.sessions.of(owner, name)
  if name not in ledger.entries.queues:
    raise ApiError(410, "there is no such model; create it again")
  return name


def check_base(base: ServedBase, name: Any) -> None:
  """Raises ApiError if a client means another model than the server has."""
  if not base.is_called(name):
    raise bad(f"this server has {base.name!r}, not {shown(name)}", "base_model")


async def accept(ledger: Ledger, request: Submission, **more: Any) -> Response:
  """Acknowledges a request, once it is on disk.

  Raises:
    ApiError: see `Submissions.submit`.
  """
  size = ledger.submissions.submit(request)
  await asyncio.to_thread(ledger.book.sync, size)
  return JSONResponse({"request_id": request.id, "model_id": request.target, **more})
