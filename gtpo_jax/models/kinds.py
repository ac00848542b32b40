"""The kinds of layers of a model, and where the parameters of each layer are.

Layers repeat a pattern of kinds. Parameters are stacked over the repetitions, for each place in the
pattern, so that a loop over repetitions computes them. Layers that do not fill a repetition are a
stack of their own, the tail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gtpo_jax.runtime.errors import UserError

ATTENTION, DELTA = "attention", "delta"  # kinds of mixers
MLPS = ("dense", "experts")
MAX_EXPERTS = 2**16 - 1  # their numbers, and one that stands for none, are stored in 16 bits


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The mixture of experts that some layers have in place of a dense MLP."""

  experts: int  # their number
  per_token: int  # how many of them compute each token
  mlp: int  # features of each
  normalised: bool = False  # whether the weights of the chosen experts are divided by their sum
  shared: int = 0  # features of an expert that computes all tokens, with a gate; 0 for none

  def __post_init__(self):
    for name in ("experts", "per_token", "mlp"):
      if getattr(self, name) < 1:
        raise UserError(f"mixture.{name} must be at least 1, got {getattr(self, name)}")
    if self.per_token > self.experts:
      raise UserError(
        f"a token is computed by {self.per_token} experts, but there are only {self.experts}"
      )
    if self.experts > MAX_EXPERTS:
      raise UserError(f"there must be at most {MAX_EXPERTS} experts, got {self.experts}")
    if self.shared < 0:
      raise UserError(f"mixture.shared must be at least 0, got {self.shared}")

  @property
  def active(self) -> int:
    """The features that compute a token."""
    return self.per_token * self.mlp + self.shared


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """The features in which a layer may differ from other layers of the same model."""

  # the most positions that a query attends to, its own included; None for all before it
  window: int | None = None
  rotates: bool = True  # whether queries and keys are rotated by their positions
  # base of the rotary angles, which are not scaled; None for the angles of the model
  rope_theta: float | None = None
  mixer: str = ATTENTION  # how positions read those before them, a key of `transformer.MIXERS`
  mlp: str = "dense"  # "dense", or "experts" for the mixture of the model

  def __post_init__(self):
    if self.mlp not in MLPS:
      raise UserError(f"the mlp of a layer must be {' or '.join(MLPS)}, got {self.mlp!r}")
    if self.window is not None and self.window < 1:
      raise UserError(f"the window of a layer must be at least 1 position, got {self.window}")


class DeltaSizes(NamedTuple):
  """The sizes of gated delta nets."""

  key_heads: int  # number of heads of queries and keys
  value_heads: int  # number of heads of values, a multiple of `key_heads`; each has a memory
  key_dim: int  # features of a query or key
  value_dim: int  # features of a value
  taps: int  # positions that the convolution reads, its own included

  @property
  def values_per_key(self) -> int:
    """Heads of values that share a head of keys."""
    return self.value_heads // self.key_heads

  @property
  def parts(self) -> tuple[int, int, int]:
    """The features of the query, the key and the values of a head of keys."""
    return self.key_dim, self.key_dim, self.values_per_key * self.value_dim

  @property
  def memory_bytes(self) -> int:
    """The bytes of the memories of all heads."""
    return 4 * self.value_heads * self.key_dim * self.value_dim

  @property
  def features(self) -> int:
    """The features of all three."""
    return sum(self.parts)


class Stack(NamedTuple):
  """Layers whose parameters are stacked."""

  name: str  # of its parameters in the tree
  kinds: tuple[LayerKind, ...]  # the layers of one repetition
  repetitions: int  # how often they repeat, axis 0 of each parameter

  def path(self, place: int) -> tuple[str, ...]:
    """Returns the path of the parameters of a place; it is the stack's if it has only one."""
    return (self.name,) if len(self.kinds) == 1 else (self.name, f"place_{place}")


class LayerPlace(NamedTuple):
  """Where the parameters of a layer are: the path of their stack, and the index on its axis 0."""

  path: tuple[str, ...]
  index: int


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
  """Returns the shortest pattern whose repetitions begin with `kinds`, one for each layer."""
  length = next(
    length
    for length in range(1, len(kinds) + 1)
    if all(kind == kinds[i % length] for i, kind in enumerate(kinds))
  )
  return tuple(kinds[:length])


def stacks_of(pattern: tuple[LayerKind, ...], layers: int) -> tuple[Stack, ...]:
  """Returns the stacks of `layers` layers, at least as many as the pattern has places."""
  repetitions, rest = divmod(layers, len(pattern))
  stacks = (Stack("layers", pattern, repetitions), Stack("tail", pattern[:rest], 1))
  return stacks if rest else stacks[:1]


def places_of(stacks: Sequence[Stack]) -> list[LayerPlace]:
  """Returns where the parameters of each layer are, from the first layer on."""
  return [
    LayerPlace(stack.path(place), index)
    for stack in stacks
    for index in range(stack.repetitions)
    for place in range(len(stack.kinds))
  ]
