"""The limits of episodes."""

from __future__ import annotations

import dataclasses

from gtpo_jax.environments.tokens import KEPT_AT_START
from gtpo_jax.runtime.errors import UserError, did_you_mean

ROLES = ("tool", "user")
LEAVE_OUT = "leave_out"
WRONG = "wrong"
_LEAST = {
  "max_turns": 1,
  "max_calls": 0,
  "parallel_calls": 1,
  "max_observation_tokens": 32,  # enough for the note about what is left out
  "parse_retries": 0,
  "workers": 1,
}


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """How long an episode may be, in turns, calls, tokens and seconds.

  Attributes:
    role: of the results of calls: "tool", or "user" if the template does not show such messages.
    max_turns: the most turns.
    max_calls: the most calls of an episode. The turn that exceeds it ends the episode.
    parallel_calls: the most calls of a turn that are run; the model reads that the others are not.
    max_observation_tokens: the most tokens of a message; longer ones are cut.
    truncate: where they are cut: "start", "middle" or "end".
    parse_retries: how many turns of an episode may have calls that cannot be read. The model reads
      why, and tries again.
    step_timeout_s: seconds for each call of the environment.
    episode_timeout_s: seconds for all of them in an episode. The time for sampling is not counted.
    workers: how many calls of environments run at the same time.
    on_timeout: what an environment that is too slow says about the model: "leave_out", nothing;
      "wrong", that it has failed, for tasks in which the model decides how long a call takes.

  Raises:
    UserError: a limit is out of its range.
  """

  role: str = "tool"
  max_turns: int = 8
  max_calls: int = 64
  parallel_calls: int = 8
  max_observation_tokens: int = 1024
  truncate: str = "middle"
  parse_retries: int = 1
  step_timeout_s: float = 30.0
  episode_timeout_s: float = 600.0
  workers: int = 32
  on_timeout: str = LEAVE_OUT

  def __post_init__(self):
    for name, least in _LEAST.items():
      if getattr(self, name) < least:
        raise UserError(f"env.{name} must be at least {least}, got {getattr(self, name)}")
    for name in ("step_timeout_s", "episode_timeout_s"):
      if not 0 < getattr(self, name) < float("inf"):
        raise UserError(
          f"env.{name} must be a positive number of seconds, got {getattr(self, name)}"
        )
    for name, choices in (
      ("role", ROLES),
      ("truncate", tuple(KEPT_AT_START)),
      ("on_timeout", (LEAVE_OUT, WRONG)),
    ):
      value = getattr(self, name)
      if value not in choices:
        raise UserError(
          f"env.{name} must be one of {', '.join(choices)}, got {value!r}"
          f"{did_you_mean(str(value), choices)}"
        )
