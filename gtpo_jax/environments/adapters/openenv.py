"""Environments that OpenEnv servers run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from gtpo_jax.environments.environment import Maker
from gtpo_jax.environments.tools import as_text
from gtpo_jax.environments.turns import Step, Turn, checked_number
from gtpo_jax.runtime.errors import UserError

# Fields of observations that hold a text for the model, in the order of preference.
TEXT_FIELDS = ("text", "message", "content", "prompt", "output", "result")


def from_openenv(
  url: str,
  parse: Callable[[Turn], Mapping[str, Any]],
  show: Callable[[Any], str] | None = None,
  solved_at: float | None = 1.0,
) -> Maker:
  """Returns an environment that an OpenEnv server runs, with a session for each completion.

  The server must allow as many sessions as `env.workers`; by default it allows one.

  Args:
    url: the address of the server, such as "http://localhost:8000".
    parse: converts a turn to the fields of an action.
    show: converts the fields of an observation to a text for the model; None takes the first of
      `TEXT_FIELDS` that is not empty, or all fields as JSON.
    solved_at: the sum of rewards from which an episode is correct when it is done; None leaves
      this to the verifier of the problem.

  Raises:
    UserError: the package `openenv` is missing, or `url` is no address.
  """
  if not url.startswith(("http://", "https://", "ws://", "wss://")):
    raise UserError(f"from_openenv needs an address such as 'http://localhost:8000', got {url!r}")
  try:
    client = importlib.import_module("openenv.core").GenericEnvClient
  except (ImportError, AttributeError) as error:
    raise UserError(
      f"from_openenv needs the package openenv ({error}); pip install openenv"
    ) from error
  make = functools.partial(
    _Session, functools.partial(client, base_url=url), parse, show or shown, solved_at
  )
  return Maker(f"OpenEnv at {url}", make)


def shown(observation: Any) -> str:
  """Returns the text of an observation."""
  if not isinstance(observation, Mapping):
    return as_text(observation)
  for field in TEXT_FIELDS:
    if isinstance(text := observation.get(field), str) and text:
      return text
  return as_text(dict(observation))


class _Session:
  """A session of a server."""

  def __init__(
    self,
    connect: Callable[[], Any],
    parse: Callable[[Turn], Mapping[str, Any]],
    show: Callable[[Any], str],
    solved_at: float | None,
  ):
    self._client = connect()
    self._parse = parse
    self._show = show
    self._solved_at = solved_at
    self._total = 0.0

  # The client's methods return something to await when an event loop runs.

  async def reset(self, row: Mapping[str, Any], seed: int) -> str:
    """Begins a session."""
    result = await self._client.reset(seed=seed)
    return self._show(result.observation)

  async def step(self, turn: Turn) -> Step:
    """Sends an action."""
    result = await self._client.step(dict(self._parse(turn)))
    reward = checked_number(
      0.0 if result.reward is None else result.reward, "step returned the reward"
    )
    self._total += reward
    done = bool(result.done)
    needed = self._solved_at if done else None
    return Step(
      messages=() if done else self._show(result.observation),
      reward=reward,
      done=done,
      correct=None if needed is None else self._total >= needed,
    )

  async def close(self) -> None:
    """Ends the session."""
    await self._client.close()
