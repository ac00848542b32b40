"""Stretches of time that a phase of a step took."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
  """A stretch of time.

  Attributes:
    phase: "prefill", "decode", "reward" or "update".
    begin: seconds.
    end: seconds.
    busy: the share of the slots that sampled a token, averaged over the decoding steps of a chunk;
      0 for other phases.
  """

  phase: str
  begin: float
  end: float
  busy: float
