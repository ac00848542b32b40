"""What passes between a model and an environment: turns, calls, steps and whole episodes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

# A message has "role" and "content"; the result of a call also has "name" and "tool_call_id".
Message = Mapping[str, str]


class Stop(enum.StrEnum):
  """Why an episode ended."""

  ANSWERED = "answered"  # a turn called no tool, and there is no environment that goes on
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


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A tool that the model calls in a turn.

  Attributes:
    name: the tool.
    arguments: by name, as JSON values. They are unchecked.
    id: what the model calls this call; "" if it gives no name, as most models do.
  """

  name: str
  arguments: Mapping[str, Any]
  id: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
  """What the model wrote until it gave the word to the environment.

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
    reward: for this turn. The reward of an episode is the sum of those of its turns.
    done: whether the episode ends.
    correct: whether the model has solved the task; None if the environment does not say so, in
      which case the verifier of the problem judges the text of the last turn.
    info: numbers by name. Means over episodes of the latest values are logged as `env/NAME`.
  """

  messages: str | Sequence[Message] = ()
  reward: float = 0.0
  done: bool = False
  correct: bool | None = None
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)


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
    rewards: those of the environment for each turn; the last one includes the reward of `finish`.
    correct: the environment's verdict, False if the model has reached a limit; None if the verifier
      of the problem judges the text.
    scored: False if the episode says nothing about the model, because the environment has failed.
    tokens: how many tokens the model has drawn.
    seconds: how long the environment took.
    info: the environment's numbers.
    reason: what went wrong, if the environment failed.
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


Group = Hashable  # names a prompt with its completions; groups can be sorted


@dataclasses.dataclass(frozen=True)
class Opened:
  """The environments of a prompt are ready; see `add_to_prompt` for what they add to it."""

  group: Group
  added: str | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Observed:
  """A completion goes on with another turn, after these tokens."""

  group: Group
  index: int
  tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Ended:
  """A completion has ended."""

  group: Group
  index: int
  episode: Episode


@dataclasses.dataclass(frozen=True)
class Differs:
  """The environments of a restored group do not repeat what they did; it must begin again."""

  group: Group
  reason: str


Event = Opened | Observed | Ended | Differs
