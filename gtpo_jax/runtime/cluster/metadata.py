"""Reads the metadata server of a Google Cloud machine. Importing this module imports no JAX."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable

TIMEOUT_S = 10  # for each attempt
PAUSES_S = (0.5, 1, 2, 4)  # between attempts
HTTP_UNKNOWN = (403, 404)  # the machine has no such attribute, or may not read it
ABSENT = (ConnectionRefusedError, socket.gaierror)  # nobody listens; the name is not resolved


class NoAnswerError(Exception):
  """Raised when there is a metadata server, but an attribute cannot be read from it."""


def read_attributes(server: str, keys: Iterable[str]) -> dict[str, str] | None:
  """Returns attributes of this machine.

  A server that is slow or fails for a moment is asked again. So a machine is never taken for one
  without a server because its server was busy.

  Args:
    server: host, or host:port.
    keys: names below `instance/attributes`.

  Returns:
    The value of each key; None if there is no server, or if it does not know the first key.

  Raises:
    NoAnswerError: the server fails again and again, or knows the first key but not another one.
  """
  values = {}
  for key in keys:
    value = _read(server, key, found=bool(values))
    if value is None and values:
      raise NoAnswerError(f"the metadata server {server} knows {next(iter(values))}, but not {key}")
    if value is None:
      return None
    values[key] = value
  return values


def _read(server: str, key: str, found: bool) -> str | None:
  """Returns an attribute, or None; `found` says that the server has answered before."""
  request = urllib.request.Request(
    f"http://{server}/computeMetadata/v1/instance/attributes/{key}",
    headers={"Metadata-Flavor": "Google"},
  )
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  for pause in (*PAUSES_S, None):
    try:
      with opener.open(request, timeout=TIMEOUT_S) as reply:
        return reply.read().decode(errors="replace").strip()
    except urllib.error.HTTPError as error:
      error.close()
      if error.code in HTTP_UNKNOWN:
        return None
      problem = f"HTTP status {error.code}"
    except (OSError, http.client.HTTPException) as error:
      cause = error.reason if isinstance(error, urllib.error.URLError) else error
      if isinstance(cause, ABSENT) and not found:
        return None
      problem = str(cause) or type(cause).__name__
    found = True
    if pause is not None:
      time.sleep(pause)
  raise NoAnswerError(
    f"the metadata server {server} does not say {key} in {len(PAUSES_S) + 1} attempts ({problem})"
  )
