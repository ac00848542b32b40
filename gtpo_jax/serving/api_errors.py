"""Errors that a client gets as the protocol's error object."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
  """A request that is not answered; the message is one line and says nothing of the machine.

  Attributes:
    status: the HTTP status.
    message: what is wrong, and what to do.
    param: the field of the request that is wrong; None if it is no field.
    code: a name for programs; None for none.
  """

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    self.status = status
    self.message = message
    self.param = param
    self.code = code

  def body(self) -> dict[str, Any]:
    """Returns the error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    other = "server_error" if self.status >= 500 else "invalid_request_error"
    kind = kinds.get(self.status, other)
    error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
    return {"error": error}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
  """Returns the error of a request that is wrong."""
  return ApiError(400, message, param, code)
