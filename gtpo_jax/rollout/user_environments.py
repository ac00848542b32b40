"""Makes what the episodes of a run have in common, from its config or what a program passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gtpo_jax.config import Config
from gtpo_jax.config.data_sections import AUTO_PARSER, PYTHON_TOOL
from gtpo_jax.data.chat import Chat
from gtpo_jax.data.records import user
from gtpo_jax.environments import python_tool
from gtpo_jax.environments.adapters.mcp import SERVER_START_S, McpTools
from gtpo_jax.environments.environment import Maker
from gtpo_jax.environments.environment_episode import Environments
from gtpo_jax.rollout.scoring.functions import checked_callable, import_name
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.installing import require_package

if TYPE_CHECKING:
  from gtpo_jax.rollout.agents.agent_episode import Agents


def environment_rules(
  config: Config,
  chat: Chat,
  environment: Callable[[], Any] | Maker | None = None,
  tools: Sequence[Callable[..., Any]] | None = None,
  cut: Callable[[str], str] = str,
) -> Environments | None:
  """Returns the environments and tools of a run; None if completions have one turn.

  Args:
    config: the run's config.
    chat: the tokenizer and its template.
    environment: replaces `env.make`.
    tools: replace `env.tools`.
    cut: removes a stop string from the text of a turn, with what follows it.

  Raises:
    UserError: the environment or a tool cannot be imported or used, the reward has the
      part env without an environment, or the chat template does not show observations, or the
      tools, unless `env.parser` is set.
  """
  section = config.env
  if environment is None and section.make:
    environment = import_name(section.make, "environment")
  if tools is None:
    tools = [_import_tool(config, name) for name in section.tool_names]
  servers = McpTools(section.mcp_servers, SERVER_START_S) if section.mcp_servers else None
  tools = [*tools, *servers.functions] if servers else tools
  if environment is None and not tools:
    if "env" in dict(config.reward.weighted):
      raise UserError(
        f"reward.parts = {config.reward.parts!r} has the part env: set env.make, env.tools "
        "or env.agent"
      )
    return None
  if config.resolved_algorithm.recipe.turns.turn_credit == "reward" and not dict(
    config.reward.weighted
  ).get("env"):
    raise UserError(
      "algorithm.turn_credit = 'reward' compares the environment's rewards for turns, but "
      f"reward.parts = {config.reward.parts!r} leaves them out; add env, as in correct,env*0.5"
    )
  close = servers.close if servers else lambda: None
  rules = Environments(chat, environment, tools, section.parser, section.limits, cut, close)
  question = user("x")
  template = chat.template
  shown = not rules.schemas or template.render(question, rules.schemas) != template.render(question)
  if not shown and section.parser == AUTO_PARSER:
    names = ", ".join(schema["function"]["name"] for schema in rules.schemas)
    raise UserError(
      f"{template.name} does not show tools, so the model could not call {names}; describe them in "
      "data.system and set env.parser, or use a tokenizer whose template reads `tools`"
    )
  return rules


def agent_rules(
  config: Config,
  chat: Chat,
  agent: Callable[..., Any] | None,
  max_tokens: int,
  stop: Sequence[str] = (),
) -> Agents:
  """Returns the agent of a run.

  Args:
    config: the run's config.
    chat: the tokenizer and its template.
    agent: replaces `env.agent`.
    max_tokens: the most tokens of an episode.
    stop: strings that end every turn.

  Raises:
    UserError: a package that agents need is missing, the agent cannot be imported or called, or the
      chat template cannot be used.
  """
  for module in ("openai", "starlette", "uvicorn"):
    require_package(module, "env.agent", "agent")
  from gtpo_jax.rollout.agents.agent_episode import Agents

  section = config.env
  if agent is None:
    agent = import_name(section.agent, "agent")
  checked_callable(agent, f"agent {section.agent!r}")
  return Agents(chat, agent, section.limits, section.parser, max_tokens, stop)


def _import_tool(config: Config, name: str) -> Callable[..., Any]:
  if name == PYTHON_TOOL:
    reward = config.reward
    return python_tool(
      reward.code_timeout_s, reward.code_memory_mb, allow_unsandboxed=reward.unsandboxed
    )
  return checked_callable(import_name(name, "tool"), f"tool {name!r}")
