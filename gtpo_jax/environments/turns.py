"""What passes between a model and an environment: turns, calls, steps and whole episodes."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_NUMBER = 1e15  # the squares of larger ones, summed over a batch, may overflow float32
# The metrics env/NAME that every run has; `info` may not have these names.
OWN_METRICS = ("turns", "calls", "failed_calls", "seconds", "idle_share", "conversations")
SHOWN_CHARS = 60  # of a value in a message

# A message has "role" and "content"; the result of a call also has "name" and "tool_call_id".
Message = Mapping[str, str]


class Stop(enum.StrEnum):
  """Why an episode ended."""

  ANSWERED = "answered"  # a turn called no tool, and there is no environment to continue
  ENV_DONE = "env_done"  # the environment said so
  MAX_TURNS = "max_turns"
  MAX_TOKENS = "max_tokens"  # a turn was cut off at the limit of the completion
  MAX_CALLS = "max_calls"
  CONTEXT = "context"  # after the observation, no token would be left for another turn
  MAX_CONVERSATIONS = "max_conversations"  # of an agent
  PARSE_ERROR = "parse_error"  # too many turns whose calls could not be read
  TIMEOUT = "timeout"  # the environment took too long
  ENV_ERROR = "env_error"  # the environment failed


# The limits that a model reaches; an episode that ends at one of them is incorrect.
MODEL_LIMITS = (
  Stop.MAX_TURNS,
  Stop.MAX_TOKENS,
  Stop.MAX_CALLS,
  Stop.CONTEXT,
  Stop.MAX_CONVERSATIONS,
  Stop.PARSE_ERROR,
)


class Written(str):
  """An argument as the model wrote it, if its format does not tell texts from other values."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A tool that the model calls in a turn.

  Attributes:
    name: the tool.
    arguments: by name, as JSON values, or as texts that are `Written`. They are unchecked.
    id: what the model calls this call; "" if it gives no name, as most models do.
  """

  name: str
  arguments: Mapping[str, Any]
  id: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
  """What the model wrote before the environment answered.

  Attributes:
    text: the text without thinking and calls, stripped of white space around it.
    thinking: what it wrote between the thinking tags of its family.
    calls: the tools that it calls, in order.
    error: why a call could not be read; "" if all were.
    index: the number of the turn in its episode, from 0.
    tokens_left: how many tokens the rest of the episode may have, observations included.
  """

  text: str
  thinking: str = ""
  calls: tuple[ToolCall, ...] = ()
  error: str = ""
  index: int = 0
  tokens_left: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
  """An environment's answer to a turn.

  Attributes:
    messages: what the model reads next: messages, or the text of one message of the user.
    reward: for this turn. The reward of an episode is the sum over its turns.
    done: whether the episode ends.
    correct: whether the model has solved the task; None if the environment does not say so, in
      which case the verifier of the problem judges the text of the last turn.
    info: numbers by name. Means over episodes of the latest values are logged as `env/NAME`, so
      `OWN_METRICS` are no names.
    state: a text that is equal for equal states of the environment, for algorithms that compare
      turns (`algorithm.turn_credit`); "" for the text of the messages.
    truth: the true advantage of the turn, if the environment knows it: the value of the state with
      this turn minus the value of the state, for the best player. Only the metrics `truth/turn_*`
      and reports read it.
  """

  messages: str | Sequence[Message] = ()
  reward: float = 0.0
  done: bool = False
  correct: bool | None = None
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)
  state: str = ""
  truth: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
  """What an agent returns if a number is not enough.

  Attributes:
    reward: of the episode; None for 0.
    correct: whether the task is solved. None: a reward above 0.5 is correct, and without a reward
      the verifier of the problem judges the text of the last turn.
    info: numbers by name, as in `Step`.
  """

  reward: float | None = None
  correct: bool | None = None
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Episode:
  """What happened from the prompt to the end, as reward functions get it.

  Attributes:
    turns: the model's turns.
    stop: why it ended, a value of `Stop`.
    reward: the sum of `rewards`.
    rewards: the environment's for each turn; the last one includes the reward of `finish`.
    correct: the environment's verdict, False if the model has reached a limit; None if the verifier
      of the problem judges the text.
    scored: False if the episode says nothing about the model, because the environment has failed.
    tokens: how many tokens the model has drawn.
    seconds: how long the environment took.
    info: the environment's numbers.
    reason: what went wrong, if the environment failed.
    states: the state before each turn: equal texts are equal states of one prompt's episodes. That
      of the first turn is "". Empty for an agent.
    truths: the true advantages of the turns that the environment has answered, `Step.truth`.
  """

  turns: tuple[Turn, ...]
  stop: str
  reward: float
  rewards: tuple[float, ...]
  correct: bool | None
  scored: bool
  tokens: int
  seconds: float
  info: Mapping[str, float]
  reason: str = ""
  states: tuple[str, ...] = ()
  truths: tuple[float | None, ...] = ()

  @property
  def failed(self) -> bool:
    """Whether the episode is incorrect whatever a verifier says of its text.

    The model has reached a limit, or the environment took too long and `on_timeout` is "wrong".
    """
    return self.scored and self.stop in (*MODEL_LIMITS, Stop.TIMEOUT)

  @property
  def text(self) -> str:
    """The text of the last turn; "" if there is none."""
    return self.turns[-1].text if self.turns else ""

  @property
  def calls(self) -> int:
    """How many calls the model has made."""
    return sum(len(turn.calls) for turn in self.turns)


def as_number(value: Any, what: str) -> float:
  """Returns a number that code of the user has returned, or a scalar of NumPy or JAX, as a float.

  Args:
    value: anything.
    what: the beginning of a message about it, such as "f returned".

  Raises:
    TypeError: it is no number; a text is none.
  """
  problem = f"{what} {_shown(value)}, not a number"
  if isinstance(value, str | bytes | bytearray):
    raise TypeError(problem)
  try:
    return float(value)
  except OverflowError:  # a whole number
    return math.inf if value > 0 else -math.inf
  except (TypeError, ValueError):
    raise TypeError(problem) from None


def checked_number(value: Any, what: str) -> float:
  """Returns a number of at most `MAX_NUMBER` in size; see `as_number`.

  Raises:
    TypeError: it is no number.
    ValueError: it is too large, or NaN.
  """
  number = as_number(value, what)
  if not abs(number) <= MAX_NUMBER:
    raise ValueError(f"{what} {number}; it is at most {MAX_NUMBER:g} in size")
  return number


def checked_flag(value: Any, what: str) -> bool:
  """Returns a truth value of the user's code: a bool, one of NumPy or JAX, 0 or 1.

  Raises:
    TypeError, ValueError: it is anything else, such as "False" or 0.3.
  """
  if isinstance(value, bool):
    return value
  number = checked_number(value, what)
  if number not in (0.0, 1.0):
    raise ValueError(f"{what} {_shown(value)}, which is neither True nor False")
  return bool(number)


def checked_info(info: Any, what: str) -> dict[str, float]:
  """Returns the numbers by name that the user's code has returned as `info`.

  Raises:
    TypeError, ValueError: a name is no text or names a metric of every run, or a value is no
      finite number.
  """
  if not isinstance(info, Mapping):
    raise TypeError(f"{what} info = {_shown(info)}, not numbers by name")
  for name in info:
    if not isinstance(name, str) or not name:
      raise TypeError(f"{what} info with the name {_shown(name)}, not a text")
    if name in OWN_METRICS or name.startswith("stop/"):
      raise ValueError(f"{what} info[{name!r}], but env/{name} is a metric of every run; rename it")
  return {name: checked_number(value, f"{what} info[{name!r}] =") for name, value in info.items()}


def _shown(value: Any) -> str:
  """Returns a value of the user's code as a message shows it, and its type."""
  try:
    text = " ".join(repr(value)[:SHOWN_CHARS].split())
  except Exception:  # its __repr__ raises
    text = ""
  return text if isinstance(value, str | float) else f"{type(value).__name__} {text}".strip()


def save_episode(episode: Episode) -> dict[str, Any]:
  """Returns an episode as JSON values."""
  return dataclasses.asdict(episode)


def load_episode(saved: Mapping[str, Any]) -> Episode:
  """Returns the episode that `save_episode` saved."""
  turns = [
    Turn(**{**turn, "calls": tuple(ToolCall(**call) for call in turn["calls"])})
    for turn in saved["turns"]
  ]
  tuples = {name: tuple(saved.get(name, ())) for name in ("rewards", "states", "truths")}
  return Episode(**{**saved, **tuples, "turns": tuple(turns)})
