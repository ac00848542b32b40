"""What users' environments, agents and factories return: understood, or refused in one line."""

import decimal
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gtpo_jax.environments.adapters.gym import from_gym
from gtpo_jax.environments.environment import Maker, Player, checked_step
from gtpo_jax.environments.turns import MAX_NUMBER, OWN_METRICS, Result, Step, Turn
from gtpo_jax.runtime.errors import FunctionError

FLAGS = (True, False)  # and what is equal to them
SCALARS = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=3)
  | st.binary(max_size=3)
  | st.sampled_from(["True", "False", "0.3", "1", 10**400, 1j, np.True_, np.float32(0.5), object()])
  | st.sampled_from([np.int8(1), decimal.Decimal("0.5"), np.asarray(1.0), np.zeros(3), [], {}])
)
NAMES = st.sampled_from([*OWN_METRICS, "stop/answered", "x", "", 3]) | st.text(max_size=3)
INFOS = st.dictionaries(NAMES, SCALARS, max_size=3) | SCALARS


def is_flag(value):
  return isinstance(value, bool | int | float | np.generic | decimal.Decimal) and value in FLAGS


def check(checked, reward, correct, info):
  """What has passed is what was meant."""
  assert isinstance(checked.reward, float) and abs(checked.reward) <= MAX_NUMBER
  assert checked.reward == float(reward) and not isinstance(reward, str | bytes)
  assert checked.correct is None or type(checked.correct) is bool
  if correct is not None:
    assert checked.correct == correct and (is_flag(correct) or isinstance(correct, np.ndarray))
  assert checked.info == {name: float(value) for name, value in info.items()}
  assert all(math.isfinite(value) for value in checked.info.values())
  assert not {"", *OWN_METRICS} & checked.info.keys()


@settings(deadline=None, max_examples=400)
@given(reward=SCALARS, done=SCALARS, correct=SCALARS, info=INFOS)
@example(0.0, True, math.nan, {})
@example(0.0, True, 0.3, {})
@example(0.0, True, "False", {})
@example(0.0, "False", None, {})
@example(0.0, True, None, {"turns": 9.0})
@example("1", True, None, {"x": 1})
def test_any_step_and_result_is_understood_or_refused(reward, done, correct, info):
  from gtpo_jax.rollout.agents.calls import checked_result  # imports openai, which takes a second

  makes = [
    lambda: checked_step(Step("", reward, done, correct, info), "f.step"),
    lambda: checked_result(Result(reward, correct, info)),
  ]
  for make in makes:
    try:
      found = make()
    except (TypeError, ValueError) as error:
      assert "returned" in str(error) and "\n" not in str(error)
    else:
      if reward is not None:
        check(found, reward, correct, info)
      if isinstance(found, Step):
        assert found.done == done and type(found.done) is bool


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"correct": math.nan}, "f.step returned correct = nan; it is at most"),
    ({"correct": 0.3}, "f.step returned correct = 0.3, which is neither True nor False"),
    ({"correct": "False"}, "f.step returned correct = 'False', not a number"),
    ({"info": {"seconds": 3.0}}, "info.'seconds'., but env/seconds is a metric of every run"),
    ({"info": {"conversations": 3.0}}, "env/conversations is a metric of every run; rename it"),
    ({"info": None}, "f.step returned info = NoneType None, not numbers by name"),
    ({"truth": math.nan}, "f.step returned truth = nan; it is at most"),
    ({"truth": "good"}, "f.step returned truth = .good., not a number"),
  ],
)
def test_messages(values, message):
  with pytest.raises((TypeError, ValueError), match=message):
    checked_step(Step(**values), "f.step")


class Still:
  def reset(self, row, seed):
    return None

  def step(self, turn):
    return Step(done=True)


def player(make):
  return Player(Maker.of(make), [], [], "tool", 8)


@pytest.mark.parametrize("made", [None, 3, "text", Maker, type("NoStep", (), {"reset": print})()])
def test_a_factory_that_makes_no_environment_is_refused(made):
  def factory():
    return made

  with pytest.raises(TypeError, match=r"factory returned an object of type .* without a method"):
    player(factory)


def test_one_object_cannot_play_two_episodes_at_once():
  shared = Still()

  def factory():
    return shared

  first = player(factory)
  with pytest.raises(FunctionError, match="factory returned the same object for two episodes"):
    player(factory)
  first.leave()
  player(factory).leave()  # one after another is fine


def test_one_object_behind_an_adapter_cannot_either():
  class Inner(Still):
    def reset(self, seed):
      return "observation", {"turns": 2, "x": 1}

    def step(self, action):
      return "observation", 0.0, True, False, {"turns": 2, "x": 1}

  inner = Inner()
  first, second = (player(from_gym(lambda: inner)) for _ in range(2))
  first.reset({}, 0)
  with pytest.raises(FunctionError, match="returned the same object for two episodes"):
    second.reset({}, 0)
  assert first.step(Turn("a")).info == {"info_turns": 2.0, "x": 1.0}
  first.method("close")()
  second.reset({}, 0)
  second.method("close")()
