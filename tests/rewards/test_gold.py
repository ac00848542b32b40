"""Gold answers and tests that a verifier cannot use are refused, and all others are accepted."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards import check_gold, countdown_correct, gold_check, math_correct
from gtpo_jax.rewards.synthetic import countdown_reaches

HUMANEVAL = {
  "prompt": 'def f():\n  """Returns 1."""\n',
  "test": "def check(c): assert c() == 1",
  "entry_point": "f",
}
CASES = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2", ["5"]]}
CALLS = {"fn_name": "f", "inputs": [[1, [2]], ["x"]], "outputs": [3, "x"]}
HALF = "\ud800"
DEEP = "[" * 100_000


@pytest.mark.parametrize(
  ("kind", "answer", "extra"),
  [
    ("math", "any text at all", {}),
    ("math", "24", {"truth": [["48/2=", "24"]]}),
    ("math", "24", {"truth": [["48/2", "="], ["", "-24 km"], ["=", "1/2"]]}),
    ("math", r"\{1, 2\}", {}),
    ("exact", r"a \text{b} c", {}),
    ("exact", r"so \boxed{a}", {}),
    ("exact", "def f(): return {", {}),
    ("choice", r"\text{(j)}", {}),
    ("forks", "85", {}),
    ("last_number", "007", {}),
    ("countdown", "14", {"numbers": [7, 12, 5]}),
    ("countdown", "14", {"numbers": [1] * 5}),  # too many to try all steps when a file is read
    ("code", "f", HUMANEVAL),
    ("code", "3", {"test_list": ["assert f() == 1"]}),
    (
      "code",
      "3",
      {"test_list": ["assert f(y)"], "test_setup_code": "y = 1", "test_imports": ["import re"]},
    ),
    ("code", "3", {"test_list": ["assert f()"], "test_setup_code": None, "test_imports": None}),
    ("code", "3", {"test_list": ["assert sum(10, 15) == 150"]}),
    ("code", "3", {"test_list": ["try: f()\nexcept ValueError: pass\nelse: raise TypeError"]}),
    ("code", "3", {"test_list": ["def test(): assert f(1) == 2\ntest()"]}),
    ("code", "3", {"test_list": ["x = f(1)\nassert x"]}),
    ("code", "3", {"test_list": ["for x in [1]: assert f(x)", "if f(1): pass"]}),
    ("code", "3", {"test_list": ["try:\n  f(-1)\n  assert False\nexcept ValueError: pass"]}),
    ("code", "3", {"test_list": ["x = [1]", "f(x)", "assert x == [2]"]}),
    ("code", "3", {"test_list": ["s = Stack(1)", "s.push(1)", "assert s.pop() == 1"]}),
    (
      "code",
      "3",
      {
        "test_list": [
          "import unittest\nclass T(unittest.TestCase):\n  def test_f(self):\n"
          "    self.assertEqual(f(1), 2)\nunittest.main()"
        ]
      },
    ),
    ("code", "3", {"test_list": ["import math", "assert math.isclose(f(1), 2)"]}),
    ("code", "9", {"input_output": CASES}),
    ("code", "9", {"input_output": json.dumps(CASES)}),
    ("code", "9", {"input_output": json.dumps(CALLS)}),
  ],
)
def test_accepted(kind, answer, extra):
  check_gold(kind, answer, extra)


@pytest.mark.parametrize(
  ("kind", "answer", "extra", "message"),
  [
    ("poetry", "1", {}, "no verifier; valid are last_number, countdown, forks, sentence, exact, "),
    ("sentence", "rope", {}, "no topic and word that are single words in lower case"),
    ("sentence", "rope", {"topic": "whale", "word": 3}, "got 'whale' and '3'"),
    ("sentence", "rope", {"topic": "Whale", "word": "rope"}, "got 'Whale' and 'rope'"),
    ("sentence", "rope", {"topic": "whale", "word": "old rope"}, "got 'whale' and 'old rope'"),
    ("sentence", "word", {"topic": "whale", "word": "word"}, "got 'whale' and 'word'"),
    ("forks", "8a", {}, "of kind 'forks', but its answer '8a' does not consist of digits"),
    ("math", "24", {"truth": "24"}, "truth that is not a list of pairs"),
    ("math", "24", {"truth": [["48/2=", 24]]}, "truth that is not a list of pairs"),
    ("math", "24", {"truth": [["a", "b"]] * 1001}, "truth of 1001 pairs, more than 1000"),
    ("math", "24", {"truth": [["48/2=", " "]]}, "truth with the value ' ' after '48/2='; write"),
    ("math", r"\text{}", {}, r"its answer '\\text{}' is empty without its formatting; write an"),
    ("math", r"\boxed{}", {}, "is empty without its formatting"),
    ("math", "1" * 1001, {}, "is longer than 1000 characters; use the kind exact"),
    ("math", "1}", {}, "'1}' is not the answer of a completion that states it; close its braces"),
    ("exact", r"\text{}", {}, "of kind 'exact', but its answer '\\\\text{}' is empty without"),
    ("exact", r"\text{ } \mbox{}", {}, "is empty without its formatting; write an answer"),
    ("exact", r"\boxed{\text{}}", {}, "is empty without its formatting"),
    ("choice", "Paris", {}, "its answer 'Paris' is not a letter from A to J; use the kind exact"),
    ("choice", "K", {}, "its answer 'K' is not a letter from A to J; use the kind exact"),
    ("last_number", "-5", {}, "'-5' does not consist of digits"),
    ("last_number", "1,000", {}, "does not consist of digits"),
    ("last_number", "٣", {}, "does not consist of digits"),
    ("countdown", "x", {"numbers": [1]}, "answer 'x' is not a whole number"),
    ("countdown", "9" * 10, {"numbers": [1]}, "at most 9 digits"),
    ("countdown", "5", {}, "extra.numbers is not a list"),
    (
      "countdown",
      "5",
      {"numbers": [7, 8]},
      "no steps with +, - and * lead from its numbers [7, 8]",
    ),
    ("countdown", "5", {"numbers": [5]}, "lead from its numbers [5] to its answer 5; leave it out"),
    ("countdown", "5", {"numbers": []}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": "1 2"}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [1, "2"]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [True]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [-1]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [10**9]}, "extra.numbers is not a list"),
    ("code", "1", {}, "it has no entry_point or test_list or input_output"),
    ("code", "1", {"entry_point": "f"}, "has no prompt"),
    ("code", "1", {"entry_point": "f", "prompt": "p"}, "has no test"),
    ("code", "1", HUMANEVAL | {"prompt": [{"role": "user"}]}, "prompt that is not text, but list"),
    ("code", "1", HUMANEVAL | {"test": None}, "test that is not text, but NoneType"),
    ("code", "1", HUMANEVAL | {"entry_point": "f()"}, "entry_point 'f()', which is not a name"),
    ("code", "1", HUMANEVAL | {"test": "a\0b"}, "test that contains a NUL character"),
    (
      "code",
      "1",
      HUMANEVAL | {"prompt": "def f():\n"},
      "do not compile: expected an indented block",
    ),
    ("code", "1", HUMANEVAL | {"test": HALF}, "surrogates not allowed"),
    ("code", "1", {"test_list": "assert True"}, "test_list that is not a list"),
    ("code", "1", {"test_list": []}, "test_list that is not a list"),
    ("code", "1", {"test_list": [HALF]}, "surrogates not allowed"),
    ("code", "1", {"test_list": ["x"], "test_imports": "re"}, "test_imports that are not a list"),
    ("code", "1", {"test_list": ["x"], "test_imports": [3]}, "not text, but int"),
    ("code", "1", {"test_list": ["x"], "test_setup_code": [3]}, "not text, but list"),
    *(
      ("code", "1", {"test_list": [test]}, "tests that check nothing, so that any program would")
      for test in (
        *("assert True", "print(f(1))", "f(1)", "assert 1 == 1", "assert f(1) == f(1)", "x = f(1)"),
        *("assert f(1) or True", "assert (f(1) == 2, 'message')", "assert not False", "pass"),
        *("assert f", "assert lambda: f(1) == 2", "assert [f(1) == 2]", "assert {f(1) == 2}"),
        *("try:\n  assert f(1) == 2\nexcept: pass", "if False: assert f(1) == 2"),
        *("try: assert f(1) == 2\nexcept (ValueError, AssertionError) as e: x = e",),
        *("for x in []: assert f(x) == 2", "while 0: assert f(1) == 2", "assert f'{f(1)}'"),
        *("def test(): assert f(1) == 2", "assert (x for x in f(1))", "assert f(1) or [1]"),
        *("def test():\n  return\n  assert f(1) == 2\ntest()", "assert not f(1) or not False"),
        *("assert 'f(1) == 2'", "assert len([1]) == 1; f(1)", "# assert f(1) == 2"),
        *("assert callable(f)", "assert str(f(1))", "assert hasattr(f, 'x')", "assert math.pi > 3"),
        *("x = 5\nassert x == 5", "def g(x): return 2\nassert g(1) == 2"),
        *("f = len\nassert f([]) == 0",),
        *("import math\nassert math.isclose(1, 1)",),
        *("from math import gcd as f\nassert f(4, 2) == 2",),
        *("import sys\nsys.exit()\nassert f(1) == 2", "if not True:\n  assert f(1) == 2"),
        *("if __name__ == '__main__': assert f(1) == 2",),
        *("for x in (1, 2):\n  break\n  assert f(x) == 2",),
        *("import contextlib\nwith contextlib.suppress(Exception):\n  assert f(1) == 2",),
        *("try: assert f(1) == 2\nexcept AssertionError: print('no')",),
        *("async def t(): assert f(1) == 2",),
      )
    ),
    ("code", "1", {"test_list": ["assert f(1"]}, "tests that do not compile: '(' was never closed"),
    ("code", "1", HUMANEVAL | {"test": "assert f() == 1"}, "without a function check(candidate)"),
    ("code", "1", HUMANEVAL | {"test": "def check(c): pass"}, "tests that check nothing"),
    ("code", "1", {"input_output": CASES | {"outputs": ["", " \n"]}}, "outputs are all empty"),
    ("code", "1", {"input_output": ""}, "not valid JSON"),
    ("code", "1", {"input_output": DEEP}, "not valid JSON"),
    ("code", "1", {"input_output": "[1]"}, "not an object"),
    ("code", "1", {"input_output": 5}, "not an object"),
    ("code", "1", {"input_output": {}}, "without lists of inputs and outputs"),
    ("code", "1", {"input_output": {"inputs": [], "outputs": []}}, "without lists of inputs"),
    ("code", "1", {"input_output": {"inputs": "1", "outputs": "1"}}, "without lists of inputs"),
    ("code", "1", {"input_output": CASES | {"inputs": ["1"]}}, "with 1 inputs and 2 outputs"),
    ("code", "1", {"input_output": CASES | {"inputs": ["1", 2]}}, "are not text"),
    ("code", "1", {"input_output": CASES | {"outputs": ["1", [2]]}}, "are not text"),
    ("code", "1", {"input_output": CALLS | {"fn_name": 5}}, "fn_name that is not text"),
    ("code", "1", {"input_output": CALLS | {"fn_name": "f.g"}}, "'f.g', which is not a name"),
    ("code", "1", {"input_output": CALLS | {"inputs": [[1], "x"]}}, "not lists of arguments"),
    ("code", "1", {"input_output": CALLS | {"outputs": [1, float("nan")]}}, "not plain values"),
  ],
)
def test_refused(kind, answer, extra, message):
  with pytest.raises(ValueError) as caught:
    check_gold(kind, answer, extra)
  assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.sandbox
@pytest.mark.parametrize(
  "test",
  [
    *("assert f(1) in [f(1)]", "assert f(1) == f(1) == f(1)", "assert isinstance(f(1), object)"),
    *("assert len([f(1)]) == 1", "assert f(1) != object()", "assert not (f(1) != f(1))"),
    *("x = y = f(1)\nassert x == y", "x = f(1)\nassert x or not x"),
    *("assert True if f(1) else True",),
    *("for x in range(0): assert f(x) == 1", "assert all(f(x) == 1 for x in ())"),
    *("assert f(1) is not f",),
    *("match 1:\n  case 2:\n    assert f(1) == 2", "if f(1) == 2:\n  assert f(1) == 2"),
    *("def g():\n  yield 1\n  assert f(1) == 2\ng()",),
    *("try: f(1)\nexcept Exception: assert f(2) == 3",),
  ],
)
def test_tests_that_a_program_without_work_passes_are_refused(test):
  with pytest.raises(ValueError, match="tests that check nothing"):
    check_gold("code", "1", {"test_list": [test]})
  check_gold("code", "1", {"test_list": [test, "assert f(1) == 2"]})
  whole = HUMANEVAL | {"test": "def check(f):\n" + "".join(f"  {x}\n" for x in test.split("\n"))}
  with pytest.raises(ValueError, match="tests that check nothing"):
    check_gold("code", "1", whole)


CHECKS = ["f(1) == 2", "f(1)", "f(1) in (2, 3)", "not f(1)", "len(f(1)) == 2 and f(2) == 3"]
# What keeps an assert from deciding anything.
HOLLOW = st.sampled_from(
  [
    *("assert {} or True", "assert ({}, 'text')", "assert [{}]", "assert lambda: {}", "x = {}"),
    *("if False:\n  assert {}", "for x in ():\n  assert {}", "def t():\n  assert {}", "print({})"),
    *("try:\n  assert {}\nexcept:\n  pass", "while 0:\n  assert {}", '"""assert {}"""', "# {}"),
    *("def u():\n  return\n  assert {}\nu()", "assert f'{{{}}}'", "assert ({0}) == ({0})"),
    "try:\n  assert {}\nexcept Exception as e:\n  x = e",
  ]
)
FIRM = st.sampled_from(
  [
    *("assert {}", "assert {}, 'text'", "if True:\n  assert {}", "for x in [1]:\n  assert {}"),
    *("def v():\n  assert {}\nv()", "try:\n  assert {}\nexcept ValueError:\n  pass"),
    *("y = {}\nassert y", "with open('x') as z:\n  assert {}", "assert True and {}"),
    "try:\n  assert {}\nexcept AssertionError:\n  raise ValueError",
  ]
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(HOLLOW, min_size=1, max_size=3), st.sampled_from(CHECKS), FIRM)
def test_only_tests_that_can_fail_are_accepted(hollow, check, firm):
  tests = [line.format(check) for line in hollow]
  with pytest.raises(ValueError, match="tests that check nothing"):
    check_gold("code", "1", {"test_list": tests})
  check_gold("code", "1", {"test_list": [*tests, firm.format(check)]})


def test_the_rule_of_dapo_has_its_own_limits():
  """Its verifier searches the last 300 characters, and calls a missing answer [INVALID]."""
  for answer in ("72", "025", r"\frac{1}{2}"):
    gold_check("dapo")("math", answer, {})
    assert math_correct(f"Answer: {answer}", answer, rule="dapo") is True
  for answer in ("[INVALID]", "7\n2", "1" * 299):
    with pytest.raises(ValueError, match="cannot be stated in DAPO's `Answer:` line; use the kind"):
      gold_check("dapo")("math", answer, {})
    assert math_correct(f"Answer: {answer}", answer, rule="dapo") is not True or answer[0] == "["
  assert math_correct("", "[INVALID]", rule="dapo") is True
  assert gold_check("dapo") is gold_check("dapo") is not gold_check("math")


def test_countdown_reaches_what_some_chain_of_steps_reaches():
  """Compared with the verdicts on all chains of two steps."""
  for numbers in itertools.combinations_with_replacement((1, 2, 5, 8), 3):
    reached = set()
    for a, b, c in itertools.permutations(numbers):
      for first in (f"{a}+{b}={a + b}", f"{a}*{b}={a * b}", f"{a}-{b}={a - b}"):
        r = int(first.split("=")[1])
        for x, y in ((r, c), (c, r)):
          for second in (f"{x}+{y}={x + y}", f"{x}*{y}={x * y}", f"{x}-{y}={x - y}"):
            target = int(second.split("=")[1])
            if countdown_correct(f"{first},{second}", numbers, target):
              reached.add(target)
    assert {t for t in range(-9, 700) if countdown_reaches(numbers, t)} == reached, numbers
