"""Stretches of time that a phase of a step took."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
  """A stretch of time."""

  phase: str  # "prefill", "decode", "reward" or "update"
  begin: float  # seconds
  end: float  # seconds
  # the share of the slots that sampled a token, averaged over the decoding steps of a chunk; 0
  # for other phases
  busy: float
