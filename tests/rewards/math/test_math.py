"""Comparison of answers, by exact arithmetic and by math-verify."""

import gzip
import json
import random
import re
import time
from pathlib import Path

import pytest
from answer_pairs import BY_MATH_VERIFY, EQUAL, HUGE, UNEQUAL
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards.math.verdicts import Undecided, _decide, compare, math_correct, math_verdicts
from gtpo_jax.rewards.math.worker_pool import WorkerPool
from gtpo_jax.runtime.errors import UserError

DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def pool():
  with WorkerPool(1, timeout_s=20) as pool:
    yield pool


def show(pair):
  return " ~ ".join(map(str, pair))


@pytest.mark.parametrize("pair", EQUAL, ids=show)
def test_equal_without_a_worker(pair):
  gold, answer = pair
  assert compare(gold, answer) is True
  assert math_correct(f"So \\boxed{{{answer}}}.", gold) is True
  # Which of the two is gold does not matter, except for choices such as "B) 12".
  assert len(gold) == 1 or compare(answer, gold) is True


@pytest.mark.parametrize("pair", UNEQUAL, ids=show)
def test_unequal_without_a_worker(pair):
  gold, answer = pair
  assert compare(gold, answer) is False
  assert math_correct(f"So \\boxed{{{answer}}}.", gold) is False
  assert (
    compare(answer, gold) in (False, None) or not gold
  )  # an answer used as gold may be rejected


def test_the_tables_are_long_enough():
  assert len(EQUAL) + len(UNEQUAL) + len(BY_MATH_VERIFY) >= 250 and len(UNEQUAL) >= 80


@pytest.mark.parametrize("case", BY_MATH_VERIFY, ids=show)
def test_pairs_compared_by_math_verify(case, pool):
  gold, answer, verdict = case
  assert math_verdicts([f"\\boxed{{{answer}}}"], [gold], pool=pool) == [verdict]


def test_an_empty_gold_answer_gives_no_verdict():
  assert math_verdicts(["5", "\\boxed{}", ""], ["", " ", "\\boxed{}"]) == [None] * 3


@pytest.mark.parametrize("completion", ["", "I do not know."])
def test_a_completion_without_an_answer_is_wrong(completion):
  assert math_correct(completion, "5") is False


def rows(name):
  path = DATA / f"{name}.jsonl.gz"
  if not path.exists():
    pytest.skip(f"{path} is absent")
  with gzip.open(path, "rt", encoding="utf-8") as file:
    return [json.loads(line) for line in file]


ANSWER_FORMATS = [
  "#### {}",
  "The answer is {}.",
  "**Answer:** ${}",
  "\\boxed{{{}}}",
  "\\boxed{{{:,} \\text{{ more apples}}}}",
  "#### {:.1f}",
  "Answer: {} dollars",
]


def other_number(number, rng):
  if rng.random() < 0.5:
    return number + rng.choice([-number - 1 if number == 0 else -1, 1, 10, 1000])
  return number * 10 + 7


@pytest.mark.parametrize("name", ["gsm8k_test", "gsm8k_train"])
def test_gsm8k(name):
  """In any format, gold solutions are correct and other numbers wrong, without a worker."""
  rng = random.Random(0)
  errors = []
  for row in rows(name):
    solution, gold = row["answer"].split("####")
    number = int(gold.replace(",", ""))
    other = other_number(number, rng)
    write = rng.choice(ANSWER_FORMATS).format
    right = [row["answer"], solution + write(number)]
    wrong = [f"{solution}#### {other}", solution + write(other)]
    verdicts = [_decide(text, row["answer"]) for text in right]
    verdicts += [_decide(text, gold.strip()) for text in wrong]
    if verdicts != [True, True, False, False]:
      errors.append((right, wrong, verdicts))
  assert not errors, errors[:3]


def test_aime24():
  for row in rows("aime24"):
    answer = row["answer"]
    for completion in (
      row["solution"],
      f"so \\boxed{{{answer}}}.",
      f"\\boxed{{{int(answer)}}}",
      f"Answer: {int(answer):03d}",
      f"It is {answer}",
    ):
      assert math_correct(completion, answer) is True, (completion, answer)
    for changed in (int(answer) + 1, int(answer) * 10, -int(answer), f"{answer}/7"):
      assert math_correct(f"\\boxed{{{changed}}}", answer) is False
    by_dapo = math_correct(f"Answer: {int(answer)}", answer, rule="dapo")
    assert by_dapo is (not answer.startswith("0"))


def test_bad_arguments_are_rejected():
  with pytest.raises(UserError, match="did you mean 'dapo'"):
    math_correct("5", "5", rule="dappo")
  with pytest.raises(ValueError):
    math_verdicts(["5"], [])


def forms(number, rng):
  """Returns several notations of an exact number."""
  ways = [
    f"{number}",
    f"\\frac{{{number.numerator}}}{{{number.denominator}}}",
    f"\\dfrac{{{-number.numerator}}}{{{-number.denominator}}}",
    f"({number})",
    f"${number}$",
    f"x = {number}",
    f"{number} \\text{{ meters}}",
    f"{3 * number.numerator}/{3 * number.denominator}",
  ]
  if number.denominator == 1:
    ways += [
      f"{number.numerator:,}",
      f"{number.numerator}.00",
      f"\\${number.numerator}",
      f"{number.numerator}\\%",
    ]
  return rng.choice(ways)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.fractions(max_denominator=50), st.fractions(max_denominator=50), st.randoms())
def test_notations_are_equal_only_if_their_numbers_are(a, b, rng):
  first = forms(a, rng)
  second = forms(a, rng)
  other = forms(b, rng)
  assert compare(first, second) is True
  assert compare(second, first) is True
  differ_by_percent = "%" in first + other and (100 * a == b or a == 100 * b)
  if a != b and not differ_by_percent:
    assert compare(first, other) is False


HOSTILE = {
  "tower": HUGE,
  "factorial": "(10^9)!",
  "nested sum": "(" * 3000 + "1" + "+1)" * 3000,
  "fractions": "\\frac{" * 300 + "1" + "}{2}" * 300,
  "long": "x" * 10**6,
  "digits": "7" * 5000,
  "boxes": "\\boxed{" * 20_000,
  "answers": "answer: " * 20_000,
  "spaces": "answer" + " " * 10**5,
  "nul": "\0" * 1000,
  "surrogates": "\ud800" * 900,
  "commas": "1," * 450,
  "carets": "2^" * 400 + "2",
  "bangs": "5" + "!" * 500,
  "equals": "x=" * 400,
  "radical": "√" * 900,
  "tiny": "9^{-9^9}",
  "scale": "1e999999999",
  "unions": "∪" * 300,
  "rtl": "\u202e72",
  "emoji": "🍎" * 500,
  "symbols": "9^{9^{9^x}}",
  "zalgo": "7\u0336" * 99,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_cheap(name):
  for gold in ("72", "\\frac{1}{2}", "(1,2)"):
    for completion in (f"\\boxed{{{HOSTILE[name]}}}", HOSTILE[name], f"Answer: {HOSTILE[name]}"):
      began = time.process_time()
      assert isinstance(_decide(completion, gold), bool | Undecided | None)
      # Most texts take milliseconds, and a megabyte takes a second.
      assert time.process_time() - began < 20
  math_correct("5", HOSTILE[name][:2000], rule="dapo")


NESTED = "(" * 3000 + "{}" + ")" * 3000


@pytest.mark.parametrize(
  ("answer", "gold", "verdict"),
  [
    (NESTED.format(72), "72", True),
    (NESTED.format(73), "72", False),
    (HUGE, HUGE, True),  # the same string
    (f"({HUGE})", HUGE, None),
    ("9^{9^{9^x}}", "72", None),
    ("(" * 3000 + "1" + "+1)" * 3000, "72", None),  # too long to be parsed
    ("(" * 21 + "x" + "+1)" * 21, "72", None),  # too deep for math-verify
  ],
  ids=["nested", "nested other", "same string", "tower", "symbols", "too long", "too deep"],
)
def test_answers_at_the_bounds_of_the_comparison(answer, gold, verdict):
  assert math_correct(f"\\boxed{{{answer}}}", gold) is verdict


SYNTAX = "\\frac{1}2 \\sqrt[3]{x}^2,(5)!-7/0.1%=$ \\boxed\\cup\\pm<>∪or and½×\0 answer:####"
PIECES = sorted(set(re.findall(r"\\[a-z]+|.", SYNTAX)))
SYNTAX_TEXT = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(max_size=80) | SYNTAX_TEXT, st.booleans())
def test_no_text_raises(text, boxed):
  completion = f"\\boxed{{{text}}}" if boxed else text
  for gold in ("72", "\\sqrt{2}", "(1,2)", text):
    assert isinstance(_decide(completion, gold), bool | Undecided | None)
    assert math_correct(completion, gold, rule="dapo") in (True, False, None)
