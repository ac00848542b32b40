"""What comes back from a judge's endpoint: replies, and failures."""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Mapping
from typing import NamedTuple


class Reply(NamedTuple):
  """A judge's reply."""

  text: str  # what it wrote
  tokens: int  # prompt and reply, as the server counts them; 0 if it does not
  seconds: float  # the time that the request took
  cut_off: bool  # whether it was cut off at the maximum length


class Failure(Exception):
  """There is no reply.

  Attributes:
    kind: "connection", "timeout", "status", "reply" or the like; each is shown once.
    status: of the response, 0 without one.
    retry: whether the same request may succeed later.
    after_s: seconds after which the server wants to be asked again.
  """

  def __init__(
    self, kind: str, message: str, status: int = 0, retry: bool = True, after_s: float = 0.0
  ):
    super().__init__(message)
    self.kind = kind
    self.status = status
    self.retry = retry
    self.after_s = after_s


def read_completion(data: str) -> tuple[str, int, bool]:
  """Returns the text of a chat completion, its tokens, and whether it was cut off.

  Raises:
    Failure: the response is no chat completion.
  """
  try:
    response = json.loads(data)
    choice = response["choices"][0]
    text = choice["message"].get("content") or ""
    if not isinstance(text, str):
      raise TypeError
  except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
    raise Failure("response", "a response that is no chat completion") from None
  usage = response.get("usage")
  tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
  counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 2**31
  return text, tokens if counted else 0, choice.get("finish_reason") == "length"


def retry_after(headers: Mapping[str, str]) -> float:
  """Returns the seconds in the header Retry-After, a number or a date; 0 without one."""
  text = headers.get("retry-after", "")
  try:
    seconds = float(text)
  except ValueError:
    try:
      seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
      return 0.0
  return seconds if 0 < seconds < 86_400 else 0.0
