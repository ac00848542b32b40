"""`rewards.verify`, for every kind."""

import dataclasses
import importlib.util

import pytest

from gtpo_jax.config.data_sections import RewardSection
from gtpo_jax.rewards import VERIFIERS, verify
from gtpo_jax.rewards.verifiers import Options
from gtpo_jax.runtime.errors import UserError

# By kind: an answer, an extra, and a right and a wrong completion.
CASES = {
  "last_number": ("59", {}, "so 59", "58"),
  "countdown": ("14", {"numbers": [7, 12, 5]}, "12+7=19,19-5=14", "12+7=19"),
  "forks": ("85", {}, "QA:8=8X:5=5", "8=8,3=3"),
  "sentence": (
    "rope",
    {"topic": "whale", "word": "rope"},
    "The whale swam over to the rope.",
    "A whale swam.",
  ),
  "exact": ("red", {}, "Answer: red", "Answer: blue"),
  "choice": ("B", {}, "(B)", "(C)"),
  "math": ("1/2", {}, r"\boxed{0.5}", r"\boxed{0.4}"),
  "code": ("f", {"test_list": ["assert f() == 1"]}, "def f(): return 1", "def f(): return 2"),
  "constraints": (
    "",
    {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "a b",
    "a, b",
  ),
  "reasoning_gym": (
    "3",
    {"task": "chain_sum", "entry": {"question": "1 + 2 =", "answer": "3", "metadata": {}}},
    "<answer>3</answer>",
    "<answer>4</answer>",
  ),
}


def test_the_default_options_are_those_of_the_config():
  section = RewardSection()
  for field in dataclasses.fields(Options):
    assert getattr(Options(), field.name) == getattr(section, field.name), field.name


@pytest.mark.parametrize(
  "kind", [pytest.param(k, marks=pytest.mark.sandbox) if k == "code" else k for k in sorted(CASES)]
)
def test_right_and_wrong(kind):
  if kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed")
  answer, extra, right, wrong = CASES[kind]
  assert verify(kind, [right, wrong, right], [answer] * 3, [extra] * 3) == [True, False, True]
  assert verify(kind, [], [], []) == []


def test_every_kind_has_a_case():
  assert set(CASES) == set(VERIFIERS)


def test_no_verdict():
  assert verify("choice", ["(B)"], ["seven"], [{}]) == [None]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("maths", [""], [""], [{}]), "kind must be one of last_number, .*, did you mean 'math'"),
    (("math", ["1"], ["1", "2"], [{}]), "1 completions, 2 answers and 1 extras"),
    (("exact", ["1"], ["1"], []), "1 completions, 1 answers and 0 extras"),
    (
      ("reasoning_gym", ["1"], ["1"], [{}]),
      r"extras\[0\] has no task and entry, which the kind 'reasoning_gym' needs",
    ),
    (("countdown", ["1"] * 2, ["1"] * 2, [{"numbers": [1]}, {}]), r"extras\[1\] has no numbers,"),
    (("code", ["1"], ["1"], [{"test": ""}]), "has no entry_point or test_list or input_output,"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(ValueError, match=message) as caught:
    verify(*arguments)
  assert isinstance(caught.value, UserError) == ("completions" not in message)
