"""Gold answers and tests that a verifier cannot use are refused, and all others are accepted."""

import json

import pytest

from gtpo_jax.rewards import check_gold

HUMANEVAL = {"prompt": "def f():\n", "test": "def check(c): pass", "entry_point": "f"}
CASES = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2", ["5"]]}
CALLS = {"fn_name": "f", "inputs": [[1, [2]], ["x"]], "outputs": [3, "x"]}
HALF = "\ud800"
DEEP = "[" * 100_000


@pytest.mark.parametrize(
  ("kind", "answer", "extra"),
  [
    ("math", "any text at all", {}),
    ("math", "24", {"truth": [["48/2=", "24"]]}),
    ("forks", "85", {}),
    ("last_number", "007", {}),
    ("countdown", "14", {"numbers": [7, 12, 5]}),
    ("code", "f", HUMANEVAL),
    ("code", "3", {"test_list": ["assert f() == 1"]}),
    ("code", "3", {"test_list": ["x"], "test_setup_code": "y = 1", "test_imports": ["import re"]}),
    ("code", "3", {"test_list": ["x"], "test_setup_code": None, "test_imports": None}),
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
    ("poetry", "1", {}, "no verifier; valid are last_number, countdown, forks, exact, choice"),
    ("forks", "8a", {}, "of kind 'forks', but its answer '8a' does not consist of digits"),
    ("math", "24", {"truth": "24"}, "truth that is not a list of pairs"),
    ("math", "24", {"truth": [["48/2=", 24]]}, "truth that is not a list of pairs"),
    ("math", "24", {"truth": [["a", "b"]] * 1001}, "truth of 1001 pairs, more than 1000"),
    ("choice", "Paris", {}, "its answer 'Paris' is not a letter"),
    ("last_number", "-5", {}, "'-5' does not consist of digits"),
    ("last_number", "1,000", {}, "does not consist of digits"),
    ("last_number", "٣", {}, "does not consist of digits"),
    ("countdown", "x", {"numbers": [1]}, "answer 'x' is not a whole number"),
    ("countdown", "9" * 10, {"numbers": [1]}, "at most 9 digits"),
    ("countdown", "5", {}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": []}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": "1 2"}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [1, "2"]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [True]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [-1]}, "extra.numbers is not a list"),
    ("countdown", "5", {"numbers": [10**9]}, "extra.numbers is not a list"),
    ("code", "1", {}, "none of entry_point, test_list, input_output"),
    ("code", "1", {"entry_point": "f"}, "has no prompt"),
    ("code", "1", {"entry_point": "f", "prompt": "p"}, "has no test"),
    ("code", "1", HUMANEVAL | {"prompt": [{"role": "user"}]}, "prompt that is not text, but list"),
    ("code", "1", HUMANEVAL | {"test": None}, "test that is not text, but NoneType"),
    ("code", "1", HUMANEVAL | {"entry_point": "f()"}, "entry_point 'f()', which is not a name"),
    ("code", "1", HUMANEVAL | {"test": "a\0b"}, "test that contains a NUL character"),
    ("code", "1", HUMANEVAL | {"test": HALF}, "surrogates not allowed"),
    ("code", "1", {"test_list": "assert True"}, "test_list that is not a list"),
    ("code", "1", {"test_list": []}, "test_list that is not a list"),
    ("code", "1", {"test_list": [HALF]}, "surrogates not allowed"),
    ("code", "1", {"test_list": ["x"], "test_imports": "re"}, "test_imports that are not a list"),
    ("code", "1", {"test_list": ["x"], "test_imports": [3]}, "not text, but int"),
    ("code", "1", {"test_list": ["x"], "test_setup_code": [3]}, "not text, but list"),
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
