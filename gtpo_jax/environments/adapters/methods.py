"""Classes whose methods are tools, as TRL has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.environments.environment import Maker, then
from gtpo_jax.environments.turns import Step, checked_number
from gtpo_jax.runtime.errors import UserError

NOT_TOOLS = ("reset", "get_reward", "close", "turn_truth", "policy_truth")


def from_methods(cls: type, solved_at: float | None = 1.0) -> Maker:
  """Returns an environment from a class whose public methods are tools, as TRL has them.

  `reset(**row)` may return a text, which is added to the prompt. If there is a `get_reward()`, it
  is called at the end. A turn without calls is the answer. Methods may be `async`. `turn_truth` and
  `policy_truth` say what turns were worth, as in `Environment`.

  Args:
    cls: the class; it is made without arguments.
    solved_at: the reward from which an episode is correct; None leaves this to the verifier of the
      problem, as does a class without `get_reward`.

  Raises:
    UserError: it has no public methods besides those in `NOT_TOOLS`.
  """
  names = [
    name
    for name, _ in inspect.getmembers(cls, inspect.isroutine)
    if not name.startswith("_") and name not in NOT_TOOLS
  ]
  if not names:
    raise UserError(
      f"{getattr(cls, '__name__', cls)} has no public methods, which would be the tools; for a "
      "class with reset and step, pass the class itself"
    )
  make: Any = functools.partial(_Methods, cls, names, solved_at)
  if hasattr(cls, "policy_truth"):
    make.policy_truth = cls.policy_truth
  return Maker(cls.__name__, make, names, [getattr(cls, name) for name in names])


class _Methods:
  """See `from_methods`. It has no `step`: the methods answer calls."""

  def __init__(self, cls: type, names: Sequence[str], solved_at: float | None):
    self._inner = cls()
    self._solved_at = solved_at
    for name in (*names, "close", "turn_truth"):
      if hasattr(self._inner, name):
        setattr(self, name, getattr(self._inner, name))
    if hasattr(self._inner, "get_reward"):
      self.finish = self._finish

  def reset(self, row: Mapping[str, Any], seed: int) -> Any:
    """Resets the object with the fields of the row that its `reset` has parameters for."""
    if not hasattr(self._inner, "reset"):
      return None
    return self._inner.reset(**accepted(self._inner.reset, {**row, "seed": seed}))

  def _finish(self) -> Any:
    return then(self._inner.get_reward(), self._last_step)

  def _last_step(self, reward: Any) -> Step:
    reward = checked_number(reward, "get_reward returned")
    correct = None if self._solved_at is None else reward >= self._solved_at
    return Step(reward=reward, correct=correct)


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arguments that a function has parameters for."""
  parameters = inspect.signature(function).parameters
  if any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values()):
    return dict(arguments)
  return {name: value for name, value in arguments.items() if name in parameters}
