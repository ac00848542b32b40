"""Tools of servers that speak the Model Context Protocol, by the package `mcp`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.event_loop import EventLoop
from gtpo_jax.runtime.installing import require_package

SERVER_START_S = 60.0


class McpTools:
  """The tools of some servers, which all episodes of a run share.

  A thread keeps the connections. A server that is a command runs until `close`.

  Attributes:
    functions: the tools, as async functions that have their schema as `json_schema`.
  """

  def __init__(self, servers: Sequence[str], timeout_s: float):
    """Connects, and asks for the tools.

    Args:
      servers: commands such as "python server.py", or addresses that begin with http.
      timeout_s: the seconds within which each server must answer.

    Raises:
      UserError: the package `mcp` is missing, a server cannot be started or does not answer, or it
        has no tools.
    """
    require_package("mcp", "env.mcp", "mcp")
    import mcp

    self.functions: list[Callable[..., Any]] = []
    self._loop = EventLoop("mcp")
    self._failed: set[str] = set()
    for server in servers:
      target = server
      if not server.startswith(("http://", "https://")):
        command, *arguments = shlex.split(server)
        target = mcp.StdioServerParameters(command=command, args=arguments)
      connected: concurrent.futures.Future[Any] = concurrent.futures.Future()
      self._loop.start(self._connection(mcp.Client(target), connected))
      try:
        client, tools = connected.result(timeout_s)
      except Exception as error:  # the package and its transports have errors of many types
        self.close()
        reason = first_line(error) or f"no answer within {timeout_s:g} s"
        raise UserError(f"env.mcp: the server {server!r} cannot be used: {reason}") from error
      if not tools:
        self.close()
        raise UserError(f"env.mcp: the server {server!r} has no tools")
      self.functions += [self._function(server, client, tool) for tool in tools]

  async def _connection(self, client: Any, connected: concurrent.futures.Future[Any]) -> None:
    """Keeps a connection open until `close` cancels it, on the thread of connections."""
    try:
      async with client:
        connected.set_result((client, (await client.list_tools()).tools))
        await asyncio.Event().wait()
    except BaseException as error:
      if not connected.done():
        connected.set_exception(error)

  def _function(self, server: str, client: Any, tool: Any) -> Callable[..., Any]:
    async def call(**arguments: Any) -> str:
      future = self._loop.start(client.call_tool(tool.name, arguments))
      try:
        result = await asyncio.wrap_future(future)
      except Exception as error:  # not of the tool, whose errors are results
        self._say_failed(server, error)
        raise
      others = [part.type for part in result.content if part.type != "text"]
      text = "\n".join(part.text for part in result.content if part.type == "text")
      if result.is_error:
        raise RuntimeError(text)
      if others and not text:
        raise RuntimeError(f"the tool returned no text but {', '.join(others)}")
      return text

    call.__name__ = tool.name
    call.json_schema = {
      "type": "function",
      "function": {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
      },
    }
    return call

  def _say_failed(self, server: str, error: Exception) -> None:
    """Prints that a server does not answer, the first time; the model only reads an error."""
    if server not in self._failed:
      self._failed.add(server)
      reason = first_line(error) or type(error).__name__
      print(f"gtpo: env.mcp: a call of the server {server!r} failed: {reason}", file=sys.stderr)

  def close(self) -> None:
    """Ends the connections, and the servers that were started."""
    self._loop.close()
