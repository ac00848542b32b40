"""The limits of episodes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from gtpo_jax.environments.tokens import KEPT_AT_START
from gtpo_jax.environments.turns import MODEL_LIMITS, Stop
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.fields import ABOVE_0, Checked, at_least, one_of, setting

ROLES = ("tool", "user")
CUTS = tuple(KEPT_AT_START)
LEAVE_OUT = "leave_out"
WRONG = "wrong"
ON_TIMEOUT = (LEAVE_OUT, WRONG)
LEAST_OBSERVATION = 32  # tokens, enough for the note about what is left out


@dataclasses.dataclass(frozen=True)
class EpisodeLimits(Checked):
  """How long an episode may be, in turns, calls, tokens and seconds.

  Attributes:
    role: of the results of calls: "tool", or "user" if the template does not show such messages.
    max_turns: the most turns.
    max_conversations: the most conversations of an agent's episode, sub-agents' included.
    max_calls: the most calls of an episode. The turn that exceeds it ends the episode.
    parallel_calls: the most calls of a turn that are run; the model reads that the others are not.
    max_observation_tokens: the most tokens of a message; longer ones are cut.
    truncate: where they are cut: "start", "middle" or "end".
    parse_retries: how many turns of an episode may have calls that cannot be read. The model reads
      why, and tries again.
    step_timeout_s: seconds for each call of the environment, or between two requests of an agent.
    episode_timeout_s: seconds for all of them in an episode. The time for sampling is not counted.
    workers: how many calls of environments, or how many agents, run at the same time.
    on_timeout: what an environment that is too slow says about the model: "leave_out", nothing;
      "wrong", that it has failed, for tasks in which the model decides how long a call takes.

  Raises:
    UserError: a limit is out of its range.
  """

  prefix: ClassVar[str] = "env."

  role: str = setting("tool", bound=one_of(ROLES))
  max_turns: int = setting(8, bound=at_least(1))
  max_conversations: int = setting(4, bound=at_least(1))
  max_calls: int = setting(64, bound=at_least(0))
  parallel_calls: int = setting(8, bound=at_least(1))
  max_observation_tokens: int = setting(1024, bound=at_least(LEAST_OBSERVATION))
  truncate: str = setting("middle", bound=one_of(CUTS))
  parse_retries: int = setting(1, bound=at_least(0))
  step_timeout_s: float = setting(30.0, bound=ABOVE_0)
  episode_timeout_s: float = setting(600.0, bound=ABOVE_0)
  workers: int = setting(32, bound=at_least(1))
  on_timeout: str = setting(LEAVE_OUT, bound=one_of(ON_TIMEOUT))

  def __post_init__(self):
    for name, choices in (("role", ROLES), ("truncate", CUTS), ("on_timeout", ON_TIMEOUT)):
      value = getattr(self, name)
      if value not in choices:
        raise UserError(
          f"env.{name} must be one of {', '.join(choices)}, got {value!r}"
          f"{did_you_mean(str(value), choices)}"
        )
    super().__post_init__()

  def verdict(self, stop: Stop, correct: bool | None) -> tuple[bool, bool | None]:
    """Returns whether an episode is scored, and whether it is correct; see `Episode`.

    Args:
      stop: why it ended. A limit that the model has reached makes it incorrect.
      correct: what its environment or its agent says.
    """
    if stop == Stop.ENV_ERROR or (stop == Stop.TIMEOUT and self.on_timeout == LEAVE_OUT):
      return False, None
    return True, False if stop in (*MODEL_LIMITS, Stop.TIMEOUT) else correct
