"""The programs that sampling can reach, which are counted, compiled ahead of time, and planned.

Each cache lists its programs in one place, the `inventory` of its `Programs`. Everything else reads
that list.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.runtime.compiling import compile_all
from gtpo_jax.sampling.settings import SamplingParams


@dataclasses.dataclass(frozen=True)
class Workload:
  """Batches of one size that are sampled in one way."""

  prompts: int  # the prompts of a batch
  group: int  # completions of each prompt
  sampling_params: SamplingParams  # how tokens are drawn
  resumes: bool = False  # whether completions that have tokens already are resumed
  # whether completions may leave their slots after a turn, and return with more tokens
  turns: bool = False


# The kind of a program, such as "prefill" or "decode", and all that its shapes depend on. Workloads
# with equal signatures share a program.
Signature = tuple[Any, ...]


class Program(NamedTuple):
  """A program of sampling: a function, and the shapes that it is compiled for."""

  signature: Signature
  function: Any  # jitted
  # Returns the arguments after the parameters: the shapes of those in device memory, and host
  # arrays that let the program write nothing. Static ones that are positional are included.
  arguments: Callable[[], tuple[Any, ...]]
  static: Mapping[str, Any] = {}  # keyword arguments
  reads_params: bool = False  # whether the parameters in sampling layout are the first argument
  # Returns other arrays of sampling that are in device memory while the program runs, except the
  # parameters if it does not read them; None if it needs too little memory to plan it.
  beside: Callable[[], Any] | None = None

  @property
  def kind(self) -> str:
    """For example "prefill" or "decode"."""
    return self.signature[0]

  def lower(self, params: DecodeParams) -> jax.stages.Lowered:
    """Lowers the program ahead of time. The mesh may consist of devices that are not present.

    Args:
      params: the parameters in sampling layout, or their shapes and shardings.
    """
    first = (params,) if self.reads_params else ()
    return self.function.lower(*first, *self.arguments(), **self.static)

  def in_memory(self, params: DecodeParams) -> Any:
    """Returns the shapes of the arguments that are in device memory."""
    leaves = jax.tree.leaves(self.arguments())
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    return (params, abstract) if self.reads_params else abstract


class HasInventory(Protocol):
  """What lists its programs."""

  def inventory(self, workload: Workload) -> Iterable[Program]:
    """Returns every program that the workload can reach, the largest of each kind first."""


def reachable(programs: HasInventory, workloads: Iterable[Workload]) -> dict[Signature, Program]:
  """Returns every program that the workloads can reach, once."""
  found: dict[Signature, Program] = {}
  for workload in workloads:
    for program in programs.inventory(workload):
      found.setdefault(program.signature, program)
  return found


def count_kinds(signatures: Iterable[Signature]) -> collections.Counter[str]:
  """Returns the number of programs of each kind."""
  return collections.Counter(signature[0] for signature in signatures)


def warm_up(
  programs: HasInventory,
  params: DecodeParams,
  workloads: Iterable[Workload],
  ready: Callable[[], None] = lambda: None,
) -> None:
  """Compiles every program that the workloads can reach.

  Args:
    programs: an engine's.
    params: the parameters in sampling layout.
    workloads: what will be sampled.
    ready: called each time a program is compiled.
  """
  found = reachable(programs, workloads).values()
  compile_all([functools.partial(program.lower, params) for program in found], ready)
