"""The section `env` of a config: its checks, and what a Python program passes instead."""

import pytest
from own_environments import Echo, add

from gtpo_jax.config import Config, EnvSection, freeze
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.loop.inputs import resolve_inputs
from gtpo_jax.runtime.errors import UserError


def test_names_and_limits():
  section = freeze({"env": {"make": "m:Cls", "tools": "m:f, python,", "max_turns": 3}}).env
  assert section.is_used and section.tool_names == ["m:f", "python"]
  assert section.limits == EpisodeLimits(max_turns=3) and type(section.limits) is EpisodeLimits
  assert not Config().env.is_used and EnvSection().limits == EpisodeLimits()


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"env": {"make": "guess"}}, "env.make must be named as module:class, got 'guess'"),
    ({"env": {"tools": "m:f,m:"}}, "env.tools must be named as module:function, or 'python', got"),
    ({"env": {"make": "m:C", "max_turns": 0}}, "env.max_turns must be at least 1, got 0"),
    ({"env": {"make": "m:C", "parse_retries": -1}}, "env.parse_retries must be at least 0, got -1"),
    (
      {"env": {"make": "m:C", "step_timeout_s": float("nan")}},
      "env.step_timeout_s must be above 0 and finite, got nan",
    ),
    (
      {"env": {"make": "m:C", "role": "system"}},
      "env.role must be one of tool, user, got 'system'",
    ),
    ({"env": {"make": "m:C", "truncate": "mid"}}, "env.truncate must be one of middle, end, start"),
    ({"env": {"make": "m:C", "parser": "qwen"}}, "env.parser must be one of auto, hermes, llama3"),
    ({"env": {"make": "m:C"}, "data": {"chat": False}}, "env.make needs the chat template"),
    (
      {"env": {"tools": "m:f"}, "algorithm": {"name": "dapo_mixed"}},
      "env.tools does not work with algorithm 'dapo_mixed', whose guide",
    ),
    (
      {"env": {"tools": "m:f"}, "teacher": {"path": "x", "prompt": "{prompt}"}},
      "env.tools does not work with teacher.prompt",
    ),
    ({"env": {"agent": "run"}}, "env.agent must be named as module:function, got 'run'"),
    ({"env": {"agent": "m:f", "make": "m:C"}}, "env.agent has tools and environments of its own"),
    ({"env": {"agent": "m:f"}, "data": {"chat": False}}, "env.agent needs the chat template"),
  ],
)
def test_what_does_not_fit_is_refused(changes, message):
  with pytest.raises(UserError) as raised:
    freeze(changes)
  assert str(raised.value).startswith(message)


def test_a_program_passes_objects_and_the_config_names_them():
  inputs = resolve_inputs({}, environment=Echo, tools=[add])
  assert inputs.environment is Echo and inputs.tools == [add]
  assert inputs.config.env.make == "own_environments:Echo"
  assert inputs.config.env.tools == "own_environments:add"
  assert resolve_inputs({}).config.env == EnvSection()
  values = {"env": {"max_turns": 3}, "reward": {"parts": "correct,env"}}
  assert resolve_inputs(values, tools=[add]).config.env.max_turns == 3


@pytest.mark.parametrize(
  "given, message",
  [
    ({"environment": add.__class__}, "environment function has no method 'reset'"),
    ({"environment": 3}, "environment is a class with reset and step"),
    ({"tools": add}, "tools must be a list of functions"),
    ({"tools": [3]}, "tools must be a list of functions"),
  ],
)
def test_objects_that_do_not_fit_are_refused(given, message):
  with pytest.raises(UserError) as raised:
    resolve_inputs({}, **given)
  assert str(raised.value).startswith(message)
