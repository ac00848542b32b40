"""Fuzzing of the one place where a user's function is called: any return, any exception."""

import asyncio
import builtins
import decimal
import fractions
import math
import os

import jax
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gtpo_jax.data.records import Problem, user
from gtpo_jax.environments.turns import MAX_NUMBER
from gtpo_jax.rollout.scoring.functions import FunctionCaller
from gtpo_jax.runtime.errors import FunctionError

CASES = int(os.environ.get("GTPO_FUZZ_CASES", "100"))
PROBLEM = Problem("a", user("1+1?"), "2", "math", {"tests": [1, {"x": 2}]})
TEXTS = ["a", "b", "c"]


class OwnInterruption(BaseException):
  pass


class Hostile:
  """Raises an exception in each special method."""

  def __init__(self, error):
    self.error = error

  def _raise(self, *args):
    raise self.error

  __float__ = __index__ = __iter__ = __len__ = __bool__ = __repr__ = __str__ = __eq__ = _raise
  __hash__ = None


class UnprintableError(Exception):
  def __str__(self):
    raise ValueError("no text")


EXCEPTIONS = sorted(
  {
    value
    for value in vars(builtins).values()
    if isinstance(value, type)
    and issubclass(value, BaseException)
    and not issubclass(value, UnicodeError | BaseExceptionGroup)
  }
  | {asyncio.CancelledError, OwnInterruption, UnprintableError},
  key=lambda kind: kind.__name__,
)
ERRORS = st.builds(
  lambda kind, text: kind(*text),
  st.sampled_from(EXCEPTIONS),
  st.lists(st.text(max_size=5), max_size=1),
)
NUMBERS = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.sampled_from(
    [10**400, -(10**400), 1e38, 1e15, np.float32(1), np.float64("nan"), np.int8(3), np.True_]
  )
  | st.sampled_from([decimal.Decimal("1"), decimal.Decimal("NaN"), fractions.Fraction(1, 3), 1j])
)
ITEMS = NUMBERS | st.text(max_size=3) | st.binary(max_size=3) | ERRORS.map(Hostile)


def generate(items, error):
  yield from items
  if error:
    raise error


RETURNS = (
  st.lists(NUMBERS, min_size=3, max_size=3)
  | st.lists(ITEMS, max_size=5)
  | st.lists(ITEMS, max_size=5).map(tuple)
  | st.lists(st.floats(width=32), max_size=4).map(np.asarray)
  | st.lists(st.floats(width=32), min_size=3, max_size=3).map(jax.numpy.asarray)
  | st.builds(generate, st.lists(ITEMS, max_size=5), st.none() | ERRORS)
  | st.dictionaries(st.integers(), st.floats(), max_size=3)
  | st.sets(st.integers(), max_size=3)
  | ITEMS
)


@settings(max_examples=CASES, deadline=None)
@given(returned=RETURNS, error=st.none() | ERRORS)
@example(returned=[1e38, 1.0, 0.0], error=None)
@example(returned=None, error=asyncio.CancelledError())
@example(returned=None, error=GeneratorExit("x"))
@example(returned=generate([1.0] * 99, None), error=None)
def test_any_return_and_any_exception(returned, error):
  """Each completion has a number that statistics in float32 can use, or none.

  Only an exception that is not an `Exception` and not SystemExit ends the run.
  """

  def function(prompts, completions, answers, extras):
    extras[0]["tests"][1].clear()
    completions.clear()
    if error:
      raise error
    return returned

  before = jax.config.values
  try:
    values = FunctionCaller(5.0)("here:f", function, PROBLEM, TEXTS)
  except FunctionError as found:
    assert not isinstance(found.__cause__, Exception | SystemExit)
    assert "\n" not in str(found) and "'here:f'" in str(found)
  else:
    assert error is None or isinstance(error, Exception | SystemExit)
    assert len(values) == 3 and all(type(value) is float for value in values)
    assert all(math.isnan(value) or abs(value) <= MAX_NUMBER for value in values)
    with np.errstate(over="raise", invalid="raise"):
      found = np.float32([value for value in values if not math.isnan(value)])
      assert found.size == 0 or np.isfinite((found**2).mean())
  assert PROBLEM.extra == {"tests": [1, {"x": 2}]} and TEXTS == ["a", "b", "c"]
  assert jax.config.values == before
