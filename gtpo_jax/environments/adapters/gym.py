"""Environments with the methods of gymnasium, or with similar ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gtpo_jax.environments.adapters.methods import accepted
from gtpo_jax.environments.environment import Maker, give_back, name_of, take
from gtpo_jax.environments.tools import as_text
from gtpo_jax.environments.turns import (
  MAX_NUMBER,
  OWN_METRICS,
  Message,
  Step,
  Turn,
  checked_flag,
  checked_number,
)

RESET_WAIT_S = 5.0
_resets = threading.Lock()


def from_gym(make: Callable[..., Any], solved_at: float | None = 1.0) -> Maker:
  """Returns an environment from one with the methods of gymnasium or similar ones.

  These are the forms that are known. An action is the text of a turn without thinking.

  - gymnasium, GEM: `reset(seed=...)` returns an observation and info, `step(action)` an
    observation, a reward, whether the episode is terminated, whether it is truncated, and info.
  - rLLM, Tunix: `step(action)` returns an observation, a reward, whether it is done, and info.
  - SkyRL: `init(messages)` returns messages and info, `step(action)` a mapping with observations,
    reward, done and metadata.
  - TextArena, for one player: `reset(num_players=1, seed=...)`, `get_observation()`,
    `step(action)` returns whether it is done, and info; `close()` returns rewards.

  The generators of `random` and `numpy.random` are seeded for a reset. What a later step draws from
  them depends on the other environments.

  Args:
    make: returns an environment, for a row of the data or without arguments.
    solved_at: the sum of rewards from which an episode is correct when it is done; None leaves
      this to the verifier of the problem.
  """
  return Maker(name_of(make), functools.partial(_Gym, make, solved_at))


class _Gym:
  """See `from_gym`."""

  def __init__(self, make: Callable[..., Any], solved_at: float | None):
    self._make = make
    self._solved_at = solved_at
    self._total = 0.0
    self._shown = ""

  def reset(self, row: Mapping[str, Any], seed: int) -> Any:
    """Makes the environment and resets it."""
    with _seeded(seed):
      self._inner = self._make(*([row] if _takes_row(self._make) else []))
      take(self._inner, name_of(self._make))
      if hasattr(self._inner, "get_observation"):
        self._inner.reset(num_players=1, seed=seed)
        return self._new(self._inner.get_observation()[1])
      if not hasattr(self._inner, "reset"):
        prompt = row.get("messages", [])
        messages, _ = self._inner.init(prompt)
        return messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
      returned = self._inner.reset(**accepted(self._inner.reset, {"seed": seed}))
    return self._new(returned[0] if isinstance(returned, tuple) else returned)

  def step(self, turn: Turn) -> Step:
    """Passes the text of a turn."""
    returned = self._inner.step(turn.text)
    if isinstance(returned, Mapping):
      observation, reward, done, info = (
        returned.get(key) for key in ("observations", "reward", "done", "metadata")
      )
    elif len(returned) == 2:
      done, info = returned
      reward = self._inner.close()[0][0] if done else 0.0
      observation = None if done else self._inner.get_observation()[1]
    else:
      observation, reward, *ends, info = returned
      done = any(checked_flag(end, "step returned done =") for end in ends)
    reward = checked_number(0.0 if reward is None else reward, "step returned the reward")
    self._total += reward
    solved = self._solved_at is not None and self._total >= self._solved_at
    return Step(
      messages=() if done else self._new(observation),
      reward=reward,
      done=bool(done),
      correct=solved if done and self._solved_at is not None else None,
      info=_numbers(info),
    )

  def close(self) -> Any:
    """Closes the environment if that is possible."""
    inner: Any = getattr(self, "_inner", None)
    give_back(inner)
    if hasattr(inner, "close") and not hasattr(inner, "get_observation"):
      return inner.close()
    return None

  def _new(self, observation: Any) -> str | Sequence[Message]:
    """Returns what an observation adds to earlier ones, as messages or as a text.

    Some environments begin each observation with all earlier ones.
    """
    if isinstance(observation, list) and all(isinstance(x, Mapping) for x in observation):
      return observation
    if isinstance(observation, list) and all(isinstance(x, tuple) for x in observation):
      texts = [text for _, text, kind in observation if kind.name != "PLAYER_ACTION"]
      return "\n".join(texts)
    text = as_text(observation)
    new = text.removeprefix(self._shown).strip() if self._shown else text
    self._shown = text
    return new or text


def _numbers(info: Any) -> dict[str, float]:
  """Returns the numbers of an info, which can have anything in it.

  One with the name of a metric of every run, such as turns, becomes info_turns.
  """
  if not isinstance(info, Mapping):
    return {}
  numbers = {
    str(name): float(value)
    for name, value in info.items()
    if isinstance(value, bool | int | float | np.number | np.bool_)
  }
  return {
    f"info_{name}" if name in OWN_METRICS else name: value
    for name, value in numbers.items()
    if abs(value) <= MAX_NUMBER and name and not name.startswith("stop/")
  }


def _takes_row(make: Callable[..., Any]) -> bool:
  """Whether a function has a parameter for the row: one without a default."""
  parameters = inspect.signature(make).parameters.values()
  positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  return any(x.kind in positional and x.default is inspect.Parameter.empty for x in parameters)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
  """Seeds the generators of `random` and `numpy.random` within the context.

  Environments draw from them in their resets, which therefore take place one after another; one
  that hangs delays the others for a limited time.
  """
  alone = _resets.acquire(timeout=RESET_WAIT_S)
  states = random.getstate(), np.random.get_state()
  try:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    yield
  finally:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if alone:
      _resets.release()
