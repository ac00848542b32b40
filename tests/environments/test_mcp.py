"""Tools of servers of the Model Context Protocol, with a real server."""

import asyncio
import shlex
import sys
import threading
from pathlib import Path

import psutil
import pytest

from gtpo_jax.config import Config, override
from gtpo_jax.data.chat import load_chat
from gtpo_jax.environments.adapters.mcp import McpTools
from gtpo_jax.environments.tools import Tools
from gtpo_jax.environments.turns import ToolCall
from gtpo_jax.rollout.user_environments import environment_rules
from gtpo_jax.runtime.errors import UserError

SERVER = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])


def running():
  """The servers that this process has started."""
  children = psutil.Process().children(recursive=True)
  return [x for x in children if any("mcp_server.py" in part for part in x.cmdline())]


@pytest.fixture
def tools():
  servers = McpTools([SERVER], 60)
  yield Tools(servers.functions)
  assert len(running()) == 1
  servers.close()
  assert not running()
  assert "mcp" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


async def run(tools, name, **arguments):
  result = tools.run(ToolCall(name, arguments))
  return result if isinstance(result, tuple) else await result


def test_calls_return_texts_and_errors_of_the_server(tools):
  assert [x["function"]["name"] for x in tools.schemas] == ["add", "fail"]
  assert tools.schemas[0]["function"]["parameters"]["required"] == ["a"]

  async def calls():
    return await asyncio.gather(
      run(tools, "add", a=2, b=3),
      run(tools, "add", a=2),
      run(tools, "add", a="x"),
      run(tools, "add", a=2, c=1),
      run(tools, "fail"),
    )

  texts, failed = zip(*asyncio.run(calls()), strict=True)
  assert failed == (False, False, True, True, True)
  assert texts[:2] == ("5 <|im_end|>", "3 <|im_end|>")  # no control token: it is encoded as text
  assert "a must be of type integer" in texts[2] and "'c'" in texts[3]
  assert "Error executing tool fail" in texts[4]


def test_a_run_has_the_tools_of_its_servers():
  config = override(
    Config(),
    [f"--config.env.mcp={SERVER}", "--config.env.parser=hermes", "--config.data.chat=True"],
  )
  assert config.env.is_used and config.env.mcp_servers == [SERVER]
  rules = environment_rules(config, load_chat())
  try:
    assert [x["function"]["name"] for x in rules.schemas] == ["add", "fail"]
  finally:
    rules.close()


@pytest.mark.parametrize(
  ("server", "reason"),
  [
    ("no_such_command_of_mcp", "'no_such_command_of_mcp' cannot be used"),
    (shlex.join([sys.executable, "-c", "pass"]), "cannot be used"),
    ("http://127.0.0.1:9/mcp", "'http://127.0.0.1:9/mcp' cannot be used"),
  ],
)
def test_a_server_that_does_not_answer_is_refused_in_one_line(server, reason):
  with pytest.raises(UserError, match=r"env\.mcp: the server") as error:
    McpTools([server], 20)
  assert reason in str(error.value) and "\n" not in str(error.value)


def test_the_loss_of_a_server_is_said_and_later_calls_are_errors(capfd):
  servers = McpTools([SERVER], 60)
  (process,) = running()
  process.kill()
  process.wait(30)
  tools = Tools(servers.functions)
  assert all(asyncio.run(run(tools, "add", a=i)).failed for i in range(2))
  servers.close()
  assert capfd.readouterr().err.count("gtpo: env.mcp: a call of the server") == 1
