"""Programs that compile on another thread: a stop request does not wait for the compiler."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.logs.profile import compile_count
from gtpo_jax.runtime.compiling import StoppableProgram, stoppable_compiles
from gtpo_jax.runtime.signals import Stopped

ROOT = Path(__file__).parents[2]


def scaled(state, x, times=1):
  return state + times * x.sum(), x * times


def test_the_call_uses_what_the_thread_compiled():
  program = StoppableProgram(jax.jit(scaled, static_argnames="times", donate_argnums=0))
  state = jnp.zeros(3)
  x = jnp.arange(4.0)
  asked = []
  compile_count()
  with stoppable_compiles(lambda: bool(asked.append(1))):
    for shape, times, new in [(4, 1, 1), (4, 1, 0), (4, 2, 1), (2, 2, 1), (4, 1, 0)]:
      argument = jax.block_until_ready(x[:shape])
      before = compile_count()
      state, y = program(state, argument, times=times)
      assert compile_count() - before == new
      np.testing.assert_array_equal(y, np.arange(4.0)[:shape] * times)
  np.testing.assert_array_equal(state, np.full(3, 6 + 6 + 12 + 2 + 6))


def test_without_the_context_nothing_changes():
  program = StoppableProgram(jax.jit(scaled, static_argnames="times"))
  assert program(jnp.zeros(1), jnp.ones(2), times=3)[0] == 6
  assert program._compiled == set()


def test_a_compile_error_is_raised_by_the_call():
  program = StoppableProgram(jax.jit(lambda a, b: a @ b))
  with stoppable_compiles(lambda: False), pytest.raises(TypeError, match="dot_general"):
    program(jnp.ones((2, 3)), jnp.ones((2, 3)))


SALT = time.time() % 1  # makes a program that is in no compile cache


def slow_to_compile(state, x):
  for i in range(300):
    x = jnp.sin(x * i + SALT) @ jnp.cos(x)
  return state + x.sum()


def test_a_stop_request_ends_the_wait():
  program = StoppableProgram(jax.jit(slow_to_compile, donate_argnums=0))
  state = jnp.zeros(1)
  with stoppable_compiles(lambda: True), pytest.raises(Stopped, match="while compiling"):
    program(state, jnp.ones((4, 4)))
  assert not state.is_deleted()  # it can still be saved


@pytest.mark.parametrize(("end", "status"), [("os._exit(143)", 143), ("sys.exit(3)", 3)])
@pytest.mark.slow
def test_a_process_can_end_while_the_compiler_runs(end, status):
  """`os._exit` ends it at once, and `sys.exit` when the compiler is done."""
  code = (
    "import os, sys\nsys.path.insert(0, 'tests/runtime')\n"
    "from test_compiling import *\n"
    "from gtpo_jax.runtime.compiling import has_abandoned_compiles\n"
    "program = StoppableProgram(jax.jit(slow_to_compile))\n"
    "try:\n  with stoppable_compiles(lambda: True): program(jnp.zeros(1), jnp.ones((4, 4)))\n"
    f"except Stopped: print(has_abandoned_compiles(), flush=True); {end}\n"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (status, "True\n", "")
