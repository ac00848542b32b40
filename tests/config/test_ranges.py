"""A number that is accepted is the number that programs compute with."""

import dataclasses
import math

import pytest
from toys import nested

from gtpo_jax.algorithms import RECIPES, make
from gtpo_jax.config import Config, flatten, freeze, to_dict
from gtpo_jax.runtime.errors import UserError

FLOATS = (1e39, -1e39, 1e-39, 1e30, math.nan, math.inf, -math.inf, 1e308)
INTEGERS = (2**31, 2**40, -(2**40), -1)
SEEDS = (2**31, 2**32 - 1)


def message_of(function, *args, **kwargs):
  """Returns the message with which a call is refused, or the empty string."""
  try:
    function(*args, **kwargs)
  except UserError as error:
    return str(error)
  return ""


def test_no_number_that_a_program_would_change_is_accepted():
  """In every field of a config: out of bounds, infinite or 0 in float32, or above 32 bits."""
  for name, default in flatten(to_dict(Config())).items():
    if name.startswith("algorithm.") or isinstance(default, bool | str):
      continue
    for value in FLOATS if isinstance(default, float) else INTEGERS:
      message = message_of(freeze, nested({name: value}))
      if (name == "seed" and value in SEEDS) or (name.startswith("mesh.") and value == -1):
        assert not message, (name, value)
      else:
        assert message.startswith(f"{name} must be ") and "\n" not in message, (name, value)
        assert repr(value) in message, (name, value, message)


def test_no_setting_of_an_algorithm_that_float32_would_change_is_accepted():
  for algorithm, recipe in RECIPES.items():
    for name, default in recipe.settings.items():
      if isinstance(default, bool | str):
        continue
      for value in FLOATS if isinstance(default, float) else INTEGERS:
        message = message_of(make, algorithm, **{name: value})
        assert message.startswith(f"algorithm.{name} must be "), (algorithm, name, value, message)
        assert "\n" not in message and repr(value) in message, (algorithm, name, value)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("algorithm.alpha2", 1e39, "must be 0 or from 1e-30 to 1e+15 in size, got 1e+39"),
    ("sampling.temperature", 1e-39, "must be 0 or at least 2**-20 and finite, got 1e-39"),
    ("optimizer.b2", 1 - 1e-9, "must be in [0, 1), got 0.999999999, which is 1.0 in float32"),
    ("sampling.min_p", 1 - 1e-9, "must be in [0, 1), got 0.999999999, which is 1.0 in float32"),
    ("batch.prompts", 2**31, "must be at most 2147483647, got 2147483648"),
    ("seed", 2**32, "must be at most 4294967295, got 4294967296"),
  ],
)
def test_the_message_says_what_is_wrong(field, value, message):
  assert message_of(freeze, nested({field: value})) == f"{field} {message}"


def test_numbers_in_texts_have_the_same_bounds():
  for weight in ("1e39", "1e-39", "nan", "inf"):
    assert "weights" in message_of(freeze, nested({"reward.parts": f"correct*1,boxed*{weight}"}))
    assert "weights" in message_of(freeze, nested({"data.train": f"sums*1,forks*{weight}"}))


def test_the_types_of_fields_are_those_of_their_defaults():
  """The tests above read whether a field is an integer from its default."""
  for section in (Config(), *vars(Config()).values()):
    for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
      value = getattr(section, field.name)
      if isinstance(value, int | float):
        assert type(value).__name__ == field.type, field.name
