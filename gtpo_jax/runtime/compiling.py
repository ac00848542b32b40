"""Compiles programs on another thread, so that a stop request does not wait for the compiler."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from gtpo_jax.runtime.distributed import any_process
from gtpo_jax.runtime.signals import Stopped, poll

POLL_S = 0.5  # seconds between questions whether to stop
CORES_PER_COMPILE = 2  # a compilation uses one core most of the time, and several at its end

# What `stoppable_compiles` was given. It is no argument, because any call of a compiled program, in
# every layer from sampling to evaluation, may have to compile it first, and each of them would have
# to pass it on. JAX's own settings, such as `jax.default_matmul_precision`, work alike.
_stopping: Callable[[], bool] | None = None
_abandoned: list[threading.Thread] = []  # compile until they are done; nothing can stop them


@contextlib.contextmanager
def stoppable_compiles(stopping: Callable[[], bool]) -> Iterator[None]:
  """Within the context, `stopping` is asked while a `StoppableProgram` compiles.

  All processes must enter it, and they stop together.
  """
  global _stopping
  outer = _stopping
  _stopping = stopping
  try:
    yield
  finally:
    _stopping = outer


def has_abandoned_compiles() -> bool:
  """Whether a compilation that was stopped still runs. A normal exit waits for it."""
  return any(thread.is_alive() for thread in _abandoned)


def compile_stoppably(lower: Callable[[], jax.stages.Lowered]) -> None:
  """Compiles a program; see `compile_all`."""
  compile_all([lower])


def compile_all(
  lowerings: Sequence[Callable[[], jax.stages.Lowered]], ready: Callable[[], None] = lambda: None
) -> None:
  """Compiles programs, which JAX keeps for later calls with such arguments.

  Several programs are compiled at once if there are cores for them.

  Args:
    lowerings: each lowers a program.
    ready: called each time a program is compiled.

  Raises:
    Stopped: the run was asked to stop before all programs were compiled.
  """
  stopping = _stopping
  threads = 1 if jax.process_count() > 1 else max(_cores() // CORES_PER_COMPILE, 1)
  if stopping is None and threads == 1:
    for lower in lowerings:
      lower().compile()
      ready()
    return
  waiting = collections.deque(lowerings)
  running: list[_Compile] = []
  while any_process(bool(waiting or running)):
    while waiting and len(running) < threads:
      running.append(_Compile(waiting.popleft()))
    if running:
      running[0].join(POLL_S)
    ended = [x for x in running if not x.is_alive()]
    running = [x for x in running if x not in ended]
    error = next((x.error for x in ended if x.error), None)
    if stopping and poll(stopping):
      error = Stopped("while compiling")
    if error:
      for compiling in running:
        _abandoned.append(compiling)
        atexit.register(compiling.join)  # Python would end the thread within the compiler and crash
      raise error
    for _ in ended:
      ready()


class _Compile(threading.Thread):
  """A thread that compiles a program.

  Attributes:
    error: what was raised, if anything.
  """

  def __init__(self, lower: Callable[[], jax.stages.Lowered]):
    super().__init__(name="gtpo compile", daemon=True)
    self.error: Exception | None = None
    self._lower = lower
    self.start()

  def run(self) -> None:
    """Compiles the program."""
    try:
      self._lower().compile()
    except Exception as error:  # raised on the thread that needs the program
      self.error = error


def _cores() -> int:
  """Returns the number of CPU cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StoppableProgram:
  """A jitted function. Its compilation can be stopped; its execution cannot.

  Args:
    program: the function. The shapes of its first argument must always be the same, and its keyword
      arguments must be static.
  """

  def __init__(self, program: Any):
    self._program = program
    self._compiled: set[Any] = set()
    self.lower = program.lower

  def __call__(self, *arguments: Any, **static: Any) -> Any:
    """Calls the function.

    Raises:
      Stopped: the run was asked to stop before the program was compiled; `arguments` are not
        donated then.
    """
    if _stopping is not None:
      shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments[1:]))
      key = (shapes, jax.tree.structure(arguments[1:]), *static.values())
      if key not in self._compiled:
        compile_stoppably(lambda: self.lower(*arguments, **static))
        self._compiled.add(key)
    return self._program(*arguments, **static)


class PassingProgram:
  """A jitted function of one argument. Results that are arrays of the argument are not copied.

  Args:
    function: what it computes.
  """

  def __init__(self, function: Callable[[Any], Any]):
    self._function = function
    self._computed = jax.jit(self._compute)

  def __call__(self, argument: Any) -> Any:
    """Calls the function."""
    return self._join(argument, self._computed(argument))

  def lower(self, argument: Any) -> jax.stages.Lowered:
    """Lowers the program, which computes what is not passed on."""
    return self._computed.lower(argument)

  def abstract(self, argument: Any, executable: jax.stages.Compiled) -> Any:
    """Returns the shapes and shardings of the results.

    Args:
      argument: the shapes and shardings of the argument.
      executable: the compiled program.
    """
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    shapes = jax.eval_shape(self._computed, argument)
    return self._join(argument, jax.tree.map(shaped, shapes, executable.output_shardings))

  def _compute(self, argument: Any) -> list[jax.Array]:
    results = jax.tree.leaves(self._function(argument))
    _, passed = self._results(argument)
    return [x for x, place in zip(results, passed, strict=True) if place is None]

  def _join(self, argument: Any, computed: list[Any]) -> Any:
    structure, passed = self._results(argument)
    arguments = jax.tree.leaves(argument)
    rest = iter(computed)
    results = [next(rest) if place is None else arguments[place] for place in passed]
    return jax.tree.unflatten(structure, results)

  def _results(self, argument: Any) -> tuple[Any, list[int | None]]:
    """Returns the structure of the results, and where each is among the argument's leaves."""
    leaves, structure = jax.tree.flatten(argument)
    return _passed(self._function, structure, tuple(jax.typeof(x) for x in leaves))


@functools.lru_cache(maxsize=16)
def _passed(
  function: Callable[[Any], Any], structure: Any, types: Sequence[Any]
) -> tuple[Any, list[int | None]]:
  argument = jax.tree.unflatten(structure, types)
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(argument)
  places = {id(variable): i for i, variable in enumerate(traced.jaxpr.invars)}
  return jax.tree.structure(shapes), [places.get(id(x)) for x in traced.jaxpr.outvars]
