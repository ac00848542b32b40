"""What an environment is, and how tools and environments answer turns together."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from gtpo_jax.environments.tools import CallResult, Tools, as_text
from gtpo_jax.environments.turns import (
  Message,
  Step,
  ToolCall,
  Turn,
  checked_flag,
  checked_info,
  checked_number,
)
from gtpo_jax.runtime.errors import FunctionError, UserError


class Environment(Protocol):
  """What a user writes: one object for each completion. Each method may be `async`.

  Four methods are optional. `finish(self) -> Step | float | None` is called once after the last
  turn, unless the environment has failed: its reward is added, for example for the state that was
  reached. `close(self)` is called when nothing else will be. `turn_truth(self, turn)` returns
  `Step.truth` of a turn that `step` does not see: one with calls, after they have been run, or an
  answer if there are only tools. A static method `policy_truth(rows, episodes)` returns the true
  advantages of all turns of a batch for the policy that played it: see `Rules.policy_truth`.
  """

  def reset(self, row: Mapping[str, Any], seed: int) -> str | Sequence[Message] | None:
    """Begins an episode.

    Args:
      row: the row of the data: `messages`, `answer`, `id` and its other fields.
      seed: the same for all completions of a prompt, which share what this method returns.

    Returns:
      What is added to the prompt: messages; a text, which is added to the last user message; or
      None for nothing.
    """

  def step(self, turn: Turn) -> Step:  # pyright: ignore[reportReturnType]
    """Answers a turn."""


_in_use: dict[int, Any] = {}  # the environments of episodes, by identity
_lock = threading.Lock()


def take(environment: Any, name: str) -> None:
  """Notes that an episode uses an environment, until `give_back`.

  Raises:
    FunctionError: another episode uses it, so that neither says anything about the model.
  """
  with _lock:
    if id(environment) in _in_use:
      raise FunctionError(
        f"{name} returned the same object for two episodes, which ends the run; let it make one "
        "for each"
      )
    _in_use[id(environment)] = environment


def give_back(environment: Any) -> None:
  """Notes that the episode of an environment has ended."""
  with _lock:
    _in_use.pop(id(environment), None)


@dataclasses.dataclass(frozen=True)
class Maker:
  """Makes an environment for each completion.

  Attributes:
    name: what messages call it.
    make: returns an environment; None if there are only tools.
    methods: names of its methods that are tools.
    unbound: the functions of these methods, in the same order.
  """

  name: str
  make: Callable[..., Any] | None = None
  methods: Sequence[str] = ()
  unbound: Sequence[Callable[..., Any]] = ()

  @classmethod
  def of(cls, environment: Callable[[], Any] | Maker | None) -> Maker:
    """Returns the maker of what a user passes as `environment`.

    Raises:
      UserError: it is no class or function, or its class has no `reset` or no `step`.
    """
    if environment is None:
      return cls("tools")
    if isinstance(environment, Maker):
      return environment
    name = name_of(environment)
    if not callable(environment):
      raise UserError(
        f"environment is a class with reset and step, or a function that makes an object with "
        f"them; got an object of type {type(environment).__name__}"
      )
    if isinstance(environment, type):
      for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
          raise UserError(
            f"environment {name} has no method {method!r}; if its public methods are tools, pass "
            f"environments.from_methods({name})"
          )
    return cls(name, environment)

  def new(self) -> Any:
    """Makes an environment for an episode; None if there are only tools.

    Raises:
      TypeError: what was made is no environment.
    """
    if self.make is None:
      return None
    made = self.make()
    for method in () if self.methods else ("reset", "step"):
      if not callable(getattr(made, method, None)):
        raise TypeError(
          f"{self.name} returned an object of type {type(made).__name__} without a method "
          f"{method!r}"
        )
    return made


def name_of(make: Any) -> str:
  """Returns what messages call a class or a function; "environment" if it has no name."""
  name = getattr(make, "__name__", "")
  return name if name.isidentifier() else "environment"


class Player:
  """Answers the turns of one episode: with the results of calls, and with an environment.

  A turn with calls is answered by the tools if there are any, every other turn by the environment.
  Without an environment that has a `step`, a turn without calls is the answer.

  Attributes:
    environment: the environment; None if there are only tools.
    ends_with_answer: whether a turn without calls ends the episode.
    failed_calls: how many calls have failed so far; None if no tool was called.
  """

  def __init__(
    self,
    maker: Maker,
    functions: Sequence[Callable[..., Any]],
    schemas: Sequence[Mapping[str, Any]],
    role: str,
    parallel_calls: int,
  ):
    """Args:
    maker: makes the environment.
    functions: tools that do not belong to the environment.
    schemas: of these functions, then of the environment's methods.
    role: the role of results, "tool" or "user".
    parallel_calls: the most calls of a turn that are run.

    Raises:
      TypeError: what was made is no environment.
    FunctionError: another episode has it.
    """
    self.environment = maker.new()
    self.ends_with_answer = not hasattr(self.environment, "step")
    self._name = maker.name
    bound = [getattr(self.environment, method) for method in maker.methods]
    self._tools = Tools([*functions, *bound], schemas)
    self._role = role
    self._parallel_calls = parallel_calls
    self.failed_calls: int | None = None
    if self.environment is not None:
      take(self.environment, maker.name)

  def reset(self, row: Mapping[str, Any], seed: int) -> Any:
    """Begins the episode; see `Environment`."""
    if not hasattr(self.environment, "reset"):
      return None
    return self.environment.reset(row, seed)

  def step(self, turn: Turn) -> Step | Awaitable[Step]:
    """Answers a turn; the caller checks what the environment returns."""
    if turn.calls and len(self._tools):
      results: list[Any] = [self._tools.run(call) for call in turn.calls[: self._parallel_calls]]
      if any(map(inspect.isawaitable, results)):
        return self._when_complete(turn, results)
      return self._results(turn, results)
    if self.ends_with_answer:
      return Step(done=True, truth=self._truth(turn))
    return self.environment.step(turn)

  def _truth(self, turn: Turn) -> float | None:
    """Returns the true advantage of a turn that the environment's `step` does not see."""
    truth: Any = self.method("turn_truth")
    return truth(turn) if truth else None

  def method(self, name: str) -> Callable[[], Any] | None:
    """Returns an optional method of the environment; None if it has none of this name."""
    return getattr(self.environment, name, None)

  def close(self) -> Any:
    """Closes the environment, if it can be closed."""
    close = self.method("close")
    return close() if close else None

  def leave(self) -> None:
    """Ends the episode: another one may get the same environment."""
    give_back(self.environment)

  async def _when_complete(
    self, turn: Turn, results: Sequence[CallResult | Awaitable[CallResult]]
  ) -> Step:
    pending = [result for result in results if inspect.isawaitable(result)]
    complete = iter(await asyncio.gather(*pending))
    return self._results(
      turn, [next(complete) if inspect.isawaitable(result) else result for result in results]
    )

  def _results(self, turn: Turn, results: Sequence[CallResult]) -> Step:
    left_out = len(turn.calls) - len(results)
    reason = f"Error: not run, because a turn may have at most {self._parallel_calls} calls"
    results = [*results, *[CallResult(reason, True)] * left_out]
    self.failed_calls = (self.failed_calls or 0) + sum(result.failed for result in results)
    if self._role == "user":  # templates may refuse several user messages in a row
      text = "\n\n".join(result.text for result in results)
      return Step([{"role": "user", "content": text}], truth=self._truth(turn))
    messages = [
      {
        "role": self._role,
        "name": call.name,
        "tool_call_id": call_id(call, turn.index, i),
        "content": result.text,
      }
      for i, (call, result) in enumerate(zip(turn.calls, results, strict=True))
    ]
    return Step(messages, truth=self._truth(turn))


def call_id(call: ToolCall, turn: int, position: int) -> str:
  """Returns the id of a call for its result: the model's own, or another of nine characters."""
  if len(call.id) == 9 and call.id.isascii() and call.id.isalnum():
    return call.id
  return f"call{(100 * turn + position) % 100_000:05d}"


def checked_step(step: Any, what: str) -> Step:
  """Returns a step with a list of messages with texts. A text alone is a message of the user.

  Args:
    step: what an environment returned.
    what: what it was returned by, for messages.

  Raises:
    TypeError, ValueError: it is no usable step; the message says why.
  """
  if not isinstance(step, Step):
    raise TypeError(f"{what} returned {type(step).__name__}, not environments.Step")
  reward = checked_number(step.reward, f"{what} returned the reward")
  done = checked_flag(step.done, f"{what} returned done =")
  correct = step.correct
  if correct is not None:
    correct = checked_flag(correct, f"{what} returned correct =")
  info = checked_info(step.info, f"{what} returned")
  if not isinstance(step.state, str):
    raise TypeError(f"{what} returned state = {type(step.state).__name__}, not a text")
  truth = step.truth
  if truth is not None:
    truth = checked_number(truth, f"{what} returned truth =")
  messages = checked_messages(step.messages, what)
  return Step(messages, reward, done, correct, info, step.state, truth)


def checked_messages(messages: Any, what: str) -> list[Message]:
  """Returns messages with texts; arguments and errors are as in `checked_step`."""
  if messages is None or isinstance(messages, str):
    return [{"role": "user", "content": as_text(messages)}] if messages else []
  if isinstance(messages, Mapping):
    messages = [messages]
  checked = []
  for message in messages:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
      raise TypeError(f"{what} returned {str(message)[:60]!r} as a message; it needs a 'role'")
    texts = {
      field: as_text(message[field])
      for field in ("content", "name", "tool_call_id")
      if message.get(field) is not None
    }
    checked.append({"role": message["role"], "content": "", **texts})
  return checked


def add_to_prompt(prompt: Sequence[Message], added: Sequence[Message] | str) -> list[Message]:
  """Returns the messages of a prompt with what `reset` has returned.

  A text becomes part of the last message if that is the user's, since templates may refuse two
  user messages in a row.
  """
  messages: list[Any] = [dict(message) for message in prompt]
  if not isinstance(added, str):
    return [*messages, *added]
  if added and messages and messages[-1]["role"] == "user":
    texts = filter(None, (messages[-1]["content"], added))
    messages[-1]["content"] = "\n\n".join(texts)
  elif added:
    messages.append({"role": "user", "content": added})
  return messages


def then(value: Any, function: Callable[[Any], Any]) -> Any:
  """Returns `function(value)`, to be awaited if `value` has to be."""
  if not inspect.isawaitable(value):
    return function(value)

  async def awaited() -> Any:
    return function(await value)

  return awaited()
