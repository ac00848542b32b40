"""Downloads from the Hugging Face hub: one process of a host at a time, waiting as the hub asks."""

from __future__ import annotations

import contextlib
import email.utils
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gtpo_jax.runtime.errors import UserError

T = TypeVar("T")
BUSY = {429: "too many requests", 503: "service unavailable"}
LONGEST_WAIT_S = 900.0  # for one download; a longer one is better spent in a queue of jobs
FIRST_WAIT_S = 5.0  # if the hub does not say how long to wait; doubled each time


class HubBusy(UserError):
  """Raised if the hub still answers 429 or 503 after `LONGEST_WAIT_S`, or asks to wait longer."""


def patiently(name: str, fetch: Callable[[], T]) -> T:
  """Returns `fetch()`, which downloads what a cache does not have.

  If the hub answers 429 or 503, it waits as long as the hub asks and tries again. The processes of
  a host take turns: the first downloads, and the others find the files in the cache.

  Raises:
    HubBusy: the hub asks for too long a wait.
    Exception: what `fetch` raises for any other reason.
  """
  ends = time.monotonic() + LONGEST_WAIT_S
  guess = FIRST_WAIT_S
  with _turn(name):
    while True:
      try:
        return fetch()
      except Exception as error:  # from the hub's library, or one that uses it
        response = _busy_response(error)
        if response is None:
          raise
        seconds = _seconds_to_wait(response.headers) or guess
        status = response.status_code
        if time.monotonic() + seconds > ends:
          raise HubBusy(
            f"{name!r} is not complete in the cache, and the hub answers {status} ({BUSY[status]}; "
            f"next try in {seconds:.0f} s); try again later, set HF_TOKEN, with which the hub "
            "allows more requests, or name a folder"
          ) from error
      guess *= 2
      print(
        f"the hub answers {status} ({BUSY[status]}) for {name!r}; trying again in {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
      )
      time.sleep(seconds)


@contextlib.contextmanager
def _turn(name: str) -> Iterator[None]:
  """Holds a lock on the download of `name` in this host's cache, if the cache can be written."""
  from filelock import FileLock
  from huggingface_hub import constants

  plain = re.sub(r"[^\w.-]", "--", name)
  file = Path(constants.HF_HUB_CACHE) / ".locks" / f"gtpo--{plain}.lock"
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(OSError):
      file.parent.mkdir(parents=True, exist_ok=True)
      stack.enter_context(FileLock(file))
    yield


def _busy_response(error: BaseException | None) -> Any:
  """Returns the hub's answer 429 or 503 that led to an error; None for other errors."""
  while error is not None:
    response = getattr(error, "response", None)
    if getattr(response, "status_code", None) in BUSY:
      return response
    error = error.__cause__ or error.__context__
  return None


def _seconds_to_wait(headers: Any) -> float | None:
  """Returns what Retry-After (seconds or a date) or the hub's RateLimit asks for; None if nothing.

  https://www.rfc-editor.org/rfc/rfc9110#field.retry-after
  """
  after = headers.get("Retry-After", "").strip()
  if after.isdecimal():
    return float(after)
  with contextlib.suppress(ValueError):
    return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 1.0)
  reset = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
  return float(reset[1]) if reset else None
