"""Saves the episodes of a prompt as JSON values, and loads them.

An environment cannot be saved. It is made again, and the turns that it had are repeated.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.environments.session import Recorded, Session, State
from gtpo_jax.environments.turns import Episode, ToolCall, Turn


def save_sessions(sessions: Sequence[Session]) -> dict[str, Any]:
  """Returns the episodes of a prompt, as JSON values."""
  added = next((s.added for s in sessions if s.state is not State.ENDED), None)
  return {"added": added, "episodes": [_save(session) for session in sessions]}


def load_sessions(sessions: Sequence[Session], snapshot: Mapping[str, Any]) -> None:
  """Loads saved episodes into new sessions: those that had ended, and the turns of the others."""
  for session, saved in zip(sessions, snapshot["episodes"], strict=True):
    if "episode" in saved:
      session.result = load_episode(saved["episode"])
      session.state = State.ENDED
    else:
      session.replay = collections.deque(Recorded(*turn) for turn in saved["turns"])


def _save(session: Session) -> dict[str, Any]:
  if session.result is not None:
    return {"episode": save_episode(session.result)}
  return {"turns": [list(turn) for turn in session.record]}


def save_episode(episode: Episode) -> dict[str, Any]:
  """Returns an episode as JSON values."""
  return dataclasses.asdict(episode)


def load_episode(saved: Mapping[str, Any]) -> Episode:
  """Returns the episode that `save_episode` saved."""
  turns = [
    Turn(**{**turn, "calls": tuple(ToolCall(**call) for call in turn["calls"])})
    for turn in saved["turns"]
  ]
  return Episode(**{**saved, "turns": tuple(turns), "rewards": tuple(saved["rewards"])})
