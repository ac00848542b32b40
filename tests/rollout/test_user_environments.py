"""A config's environment and tools, and the prompts with their schemas."""

import dataclasses
import sys

import pytest
from own_environments import Echo, add

from gtpo_jax.config import Config, EnvSection, freeze
from gtpo_jax.data.chat import load_chat
from gtpo_jax.data.records import Problem, user
from gtpo_jax.rollout.user_environments import environment_rules
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

QUESTION = Problem("1", user("1+2="), "3", "last_number")


def with_env(**env):
  return dataclasses.replace(Config(), env=EnvSection(**env))


def text_of(config, added="", **given):
  worker = RolloutWorker(config, **given)
  return worker.chat.tokenizer.decode(worker.encode(QUESTION, added))


def test_names_of_a_config_are_imported(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "own_env.py").write_text(
    "from gtpo_jax import environments\n"
    "class Echo:\n"
    "  def reset(self, row, seed): pass\n"
    "  def step(self, turn): return environments.Step(turn.text)\n"
    "class Store:\n"
    "  def get(self, key: str) -> str:\n"
    '    """Reads.\n\n    Args:\n      key: The key."""\n'
    "store = environments.from_methods(Store)\n"
    "number = 3\n"
  )
  chat = load_chat()
  rules = environment_rules(with_env(make="own_env:Echo", max_turns=2), chat)
  assert rules.limits.max_turns == 2 and not rules.schemas
  assert len(environment_rules(with_env(make="own_env:store"), chat).schemas) == 1
  assert environment_rules(Config(), chat) is None
  for env, message in (
    ({"make": "own_env:Ehco"}, "environment 'own_env:Ehco' cannot be imported: AttributeError"),
    ({"make": "own_env:number"}, "environment is a class with reset and step"),
    ({"tools": "own_env:number"}, "tool 'own_env:number' is of type int and cannot be called"),
    ({"tools": "no_such_module:f"}, "tool 'no_such_module:f' cannot be imported"),
  ):
    with pytest.raises(UserError) as raised:
      environment_rules(with_env(**env), chat)
    assert str(raised.value).startswith(message)


def test_settings_without_an_environment_are_refused():
  config = freeze({"reward": {"parts": "correct,env"}})
  with pytest.raises(UserError, match=r"reward.parts = 'correct,env' has the part env"):
    environment_rules(config, load_chat())


def test_credit_of_rewards_that_the_run_does_not_read_is_refused():
  parts = {"reward": {"parts": "correct"}, "algorithm": {"name": "mt_grpo"}}
  with pytest.raises(UserError, match=r"reward.parts = 'correct' leaves them out; add env"):
    environment_rules(freeze(parts), load_chat(), tools=[add])
  parts["reward"]["parts"] = "correct,env*0.5"
  environment_rules(freeze(parts), load_chat(), tools=[add])


@pytest.mark.sandbox
def test_python_is_a_built_in_tool():
  (schema,) = environment_rules(with_env(tools="python"), load_chat()).schemas
  assert schema["function"]["name"] == "python"


def test_a_template_that_does_not_show_tools_is_refused():
  chat = load_chat()
  chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace("if tools", "if false")
  with pytest.raises(UserError, match="does not show tools, so the model could not call add"):
    environment_rules(Config(), chat, tools=[add])
  described = with_env(tools="json:dumps", parser="hermes")
  assert environment_rules(described, chat, tools=[add]).schemas


def test_a_prompt_has_the_tools_and_what_the_environment_adds():
  plain = text_of(Config())
  with_tools = text_of(Config(), tools=[add])
  assert with_tools == "<|im_start|>tools\n<tool_call> add(a,b)<|im_end|>\n" + plain
  assert text_of(Config(), environment=Echo) == plain
  assert text_of(Config(), "Go!") == plain.replace("1+2=", "1+2=\n\nGo!")
  messages = [{"role": "tool", "content": "Go!"}]
  assert "1+2=<|im_end|>\n<|im_start|>tool\nGo!<|im_end|>\n" in text_of(Config(), messages)
