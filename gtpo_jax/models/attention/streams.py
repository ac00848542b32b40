"""The positions of a batch of sequences: their rotary angles and masks.

A *stream* is one batch of sequences [n, g, s, d] of a forward pass. There are one or two: the
prompts (g = 1) and the completions, which follow their prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.rope import Rope, rope_angles
from gtpo_jax.models.attention.sources import RowRanges
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.kinds import LayerKind

# The rotary angles of each base; at 0, the model's.
Ropes = dict[float, Rope]


class StreamMasks(NamedTuple):
  """The rotary angles and the attention masks of one stream, which are the same in every layer.

  A stream is one batch of sequences [n, g, s, d] of a forward pass: the prompts (g = 1) or the
  completions.
  """

  ropes: Ropes  # cosines and sines, f32[n, g | 1, s, e/2] each
  mask: jax.Array | None  # bool[n, 1, s], True on real tokens; None if padding only follows them
  # bool[n, m, p], True on the prompt's tokens that are attended to, one row per segment; None for
  # the stream of prompts.
  prompt_mask: jax.Array | None = None
  # i32[n, g, s]; a position attends only to its own segment. None if each sequence is one segment.
  segment: jax.Array | None = None
  ranges: RowRanges | None = None  # of the completions, if they are packed
  # i32[n, g, s], how many positions each one is after the prompt; None if that is its index.
  places: jax.Array | None = None


def ropes_at(positions: jax.Array, config: ModelConfig) -> Ropes:
  """Returns the rotary angles at `positions` i32[..., s], for each base that a layer has."""
  bases = dict.fromkeys(kind.rope_theta for kind in config.kinds if kind.rotates)
  model = (config.rope_theta, config.rope_scaling)
  return {
    base or 0.0: rope_angles(
      positions, config.head_dim, *((base, None) if base else model), config.rotated
    )
    for base in bases
  }


def rope_of(kind: LayerKind, ropes: Ropes) -> Rope | None:
  """Returns the angles of a layer; None if it rotates nothing."""
  return ropes[kind.rope_theta or 0.0] if kind.rotates else None


def stream_masks(mask: jax.Array, config: ModelConfig) -> StreamMasks:
  """Returns the masks of a stream with g = 1.

  Args:
    mask: bool[n, s], True on real tokens. Positions count from the first of them.
    config: the architecture.
  """
  positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, None]
  return StreamMasks(ropes_at(positions, config), mask[:, None])
