"""Inputs from a Python program: dicts instead of files, functions and classes instead of names."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from gtpo_jax.config import Config, EnvSection, freeze
from gtpo_jax.config.read_settings import check_settings
from gtpo_jax.data.demonstration_rows import load_demonstrations
from gtpo_jax.data.readers import RECORDS
from gtpo_jax.data.records import Problem
from gtpo_jax.data.sources import Loaded, hold_out, load_records, needs_of
from gtpo_jax.environments.environment import Maker
from gtpo_jax.rewards import gold_check
from gtpo_jax.rollout.scoring.functions import (
  EPISODES,
  RewardFunction,
  qualified_name,
  takes_episodes,
)
from gtpo_jax.runtime.errors import UserError

Records = Iterable[Mapping[str, Any]]
Agent = Callable[..., Any]  # async def run(row, client, seed)
MakeEnvironment = Callable[[], Any] | Maker  # a class, or what `environments.from_...` returns


@dataclasses.dataclass(frozen=True)
class Inputs:
  """The inputs of a run.

  Attributes:
    config: the config; it refers to the other inputs by name.
    reward: the reward function, if there is one.
    records: by name, the data that was passed as dicts.
    environment: makes an environment; None for the config's.
    tools: functions that the model may call; None for the config's.
    agent: plays episodes; None for the config's.
  """

  config: Config
  reward: RewardFunction | None
  records: Mapping[str, Loaded]
  environment: MakeEnvironment | None = None
  tools: Sequence[Callable[..., Any]] | None = None
  agent: Agent | None = None


def resolve_inputs(
  config: Config | Mapping[str, Any],
  reward: RewardFunction | None = None,
  data: Records | None = None,
  held_out: Records | None = None,
  demonstrations: Records | None = None,
  environment: MakeEnvironment | None = None,
  tools: Sequence[Callable[..., Any]] | None = None,
  agent: Agent | None = None,
) -> Inputs:
  """Checks the inputs and names them in the config, so that config.json says what a run used.

  Args:
    config: a `Config`, or what `config.freeze` takes.
    reward: decides right and wrong; its name becomes `reward.verifier`.
    data: rows as in a file, to train on instead of `data.train`.
    held_out: rows to evaluate on instead of `data.eval`. If there is neither, a tenth of `data` is
      held out.
    demonstrations: rows with prompt and completion, for the warm start to imitate instead of
      `warm_start.data`.
    environment: answers turns; its name becomes `env.make`.
    tools: functions that the model may call; their names become `env.tools`.
    agent: plays episodes; its name becomes `env.agent`.

  Raises:
    UserError: an input cannot be used, or `data` is too small to hold any of it out.
  """
  if not isinstance(config, Config | ConfigDict | Mapping):
    raise UserError(
      f"config must be a config or nested dicts, got {config!r}; "
      "read a file with gtpo_jax.load_config(path)"
    )
  config = config if isinstance(config, Config) else freeze(config)
  section = config.data
  # A reward function or a judge decides itself what it needs.
  is_own = reward is not None or config.reward.replaces_verifiers
  check = None if is_own else gold_check(config.reward.math_rule)
  env = _env_section(config.env, environment, tools, agent)
  needs = needs_of(env.opens, reward is None and config.reward.needs_answer)
  load = lambda rows, name: load_records(rows, name, section.fields, section.bad_rows, check, needs)
  records = {}
  if data is not None:
    train = load(data, "data")
    name = _name(train.problems)
    if held_out is None and (not section.eval or section.eval.startswith(RECORDS)):
      train, rest = hold_out(train, "data")
      records[f"{name}:held_out"] = rest
      section = dataclasses.replace(section, eval=f"{name}:held_out")
    records[name] = train
    section = dataclasses.replace(section, train=name)
  if held_out is not None:
    loaded = load(held_out, "held_out")
    name = f"{_name(loaded.problems)}:held_out"
    records[name] = loaded
    section = dataclasses.replace(section, eval=name)
  warm_start = config.warm_start
  if demonstrations is not None:
    columns = config.warm_start.columns
    loaded = load_demonstrations("demonstrations", columns, section.bad_rows, demonstrations)
    name = f"{_name(loaded.problems)}:demonstrations"
    records[name] = loaded
    warm_start = dataclasses.replace(warm_start, data=name)
  reward_section = config.reward
  if reward is not None:
    reward_section = dataclasses.replace(reward_section, verifier=_reward_name(reward, env.is_used))
  config = dataclasses.replace(
    config, data=section, reward=reward_section, warm_start=warm_start, env=env
  )
  check_settings(config)
  return Inputs(config, reward, records, environment, tools, agent)


def _env_section(
  section: EnvSection,
  environment: MakeEnvironment | None,
  tools: Sequence[Callable[..., Any]] | None,
  agent: Agent | None,
) -> EnvSection:
  """Returns the section with the names of what a program passed."""
  names = {}
  if environment is not None:
    names["make"] = qualified_name(environment, Maker.of(environment).name)
  if tools is not None:
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(map(callable, tools)):
      raise UserError(f"tools must be a list of functions, got {tools!r}")
    names["tools"] = ",".join(map(qualified_name, tools))
  if agent is not None:
    if not callable(agent):
      raise UserError(f"agent must be a function of (row, client, seed), got {agent!r}")
    names["agent"] = qualified_name(agent)
  return dataclasses.replace(section, **names)


def _reward_name(reward: RewardFunction, episodes: bool) -> str:
  """Checks a reward function and returns its name in the form that `reward.verifier` has.

  `episodes` says whether completions are episodes.
  """
  if not callable(reward):
    raise UserError(
      f"reward must be a function of (prompts, completions, answers, extras), got {reward!r}"
    )
  name = qualified_name(reward)
  try:
    further = {EPISODES: []} if episodes and takes_episodes(reward) else {}
    inspect.signature(reward).bind([], [], [], [], **further)
  except TypeError as error:
    raise UserError(
      f"reward function {name!r} must take (prompts, completions, answers, extras): {error}"
    ) from None
  except ValueError:
    pass  # a builtin has no signature to check
  return name


def _name(problems: Sequence[Problem]) -> str:
  """Returns a name for problems that changes with their content."""
  content = [
    [problem.messages, problem.answer, problem.kind, problem.extra] for problem in problems
  ]
  text = json.dumps(content, default=str)
  return f"{RECORDS}{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
