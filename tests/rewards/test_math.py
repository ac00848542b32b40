import gzip
import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards import math as rewards_math
from gtpo_jax.rewards.exact import arithmetic
from gtpo_jax.rewards.math import (
  Undecided,
  compare,
  extract,
  gold_answer,
  math_correct,
  math_verdicts,
)
from gtpo_jax.rewards.pool import Pool
from gtpo_jax.runtime.errors import UserError

DATA = Path(__file__).parents[3] / "shared" / "data"
HUGE = "9^{9^{9^9}}"

EQUAL = [  # decided without a worker
  ("72", "72"),
  ("72", "72.0"),
  ("72", "072"),
  ("073", "73"),
  ("72", "+72"),
  ("-3", "−3"),
  ("-3", "- 3"),
  ("0", "-0"),
  ("72", "$72$"),
  ("72", "\\(72\\)"),
  ("72", "\\[ 72 \\]"),
  ("72", "**72**"),
  ("72", "72."),
  ("72", " 72 ,"),
  ("72", "(72)"),
  ("72", "{72}"),
  ("72", "`72`"),
  ("72", "７２"),
  ("5", "five"),
  # thousands, currency, units
  ("1234", "1,234"),
  ("1234567", "1,234,567.00"),
  ("1234", "1{,}234"),
  ("1234", "1,\\!234"),
  ("1234", "1 234"),
  ("1234", "1\\,234"),
  ("18", "$18"),
  ("18", "\\$18.00"),
  ("18", "18 dollars"),
  ("18", "USD 18"),
  ("18", "€18"),
  ("-18", "-$18"),
  ("1200", "$1,200.00"),
  ("5", "5 apples"),
  ("5", "5 more apples"),
  ("3", "3 times"),
  ("5", "5 \\text{ fewer than before}"),
  ("5", "5\\text{ apples}"),
  ("5", "5 \\text{ cm}^2"),
  ("5", "5cm"),
  ("5", "5 cm²"),
  ("5", "5\\,\\mathrm{m}"),
  ("60", "60 km/h"),
  ("60", "60 miles per hour"),
  ("5 apples", "5"),
  ("2.5", "2.5 hours"),
  ("5", "5 m"),
  ("8", "8 ft."),
  ("90", "90^\\circ"),
  ("90", "90^{\\circ}"),
  ("90", "90°"),
  ("90^\\circ", "90 degrees"),
  ("3\\text{ eggs}", "3 eggs"),
  ("5", "about 5"),
  ("2000000", "2 million"),
  ("24", "2 dozen"),
  # fractions, decimals, mixed numbers
  ("1/2", "\\frac{1}{2}"),
  ("1/2", "\\dfrac{1}{2}"),
  ("1/2", "\\tfrac12"),
  ("\\frac12", "0.5"),
  ("1/2", ".5"),
  ("1/2", "2/4"),
  ("1/2", "½"),
  ("-1/2", "-\\frac{1}{2}"),
  ("-1/2", "\\frac{-1}{2}"),
  ("-1/2", "\\frac{1}{-2}"),
  ("3/2", "1\\frac{1}{2}"),
  ("3/2", "1 1/2"),
  ("1.5", "1½"),
  ("-3/2", "-1\\frac12"),
  ("7/4", "1 and 3/4"),
  ("1/3", "0.333333"),
  ("2/3", "0.6666667"),
  ("2/3", "0.666666"),
  ("\\frac{1}{3}", ".33333333"),
  ("\\frac{\\frac{1}{2}}{3}", "1/6"),
  ("0.75", "\\frac 3 4"),
  ("3.0", "3"),
  ("1/2", "\\left(\\frac{1}{2}\\right)"),
  # percentages
  ("50%", "50\\%"),
  ("50%", "50"),
  ("50", "50%"),
  ("50\\%", "0.5"),
  ("0.5", "50 percent"),
  ("12.5", "12.5\\%"),
  ("1/4", "25%"),
  ("3%", "3 per cent"),
  # scientific, arithmetic
  ("1500", "1.5e3"),
  ("1500", "1.5 \\times 10^3"),
  ("0.0015", "1.5 \\cdot 10^{-3}"),
  ("1500", "1.5×10³"),
  ("1024", "2^{10}"),
  ("1024", "2**10"),
  ("120", "5!"),
  ("14", "2+3\\cdot 4"),
  ("-4", "-2^2"),
  ("512", "2^{3^2}"),
  ("6", "(1+2)(2)"),
  ("1/4", "2^{-2}"),
  ("7", "3+4=7"),
  # equations
  ("5", "x = 5"),
  ("x=5", "5"),
  ("5", "x=2+3=5"),
  ("5", "f(2) = 5"),
  ("5", "a_1 = 5"),
  ("5", "\\theta = 5"),
  ("5", "n = 5 \\text{ apples}"),
  ("[1,2]", "x \\in [1,2]"),
  ("5", "Total: 5"),
  # tuples, intervals, sets, several answers
  ("(1,2)", "(1, 2)"),
  ("(1,2)", "\\left(1, 2\\right)"),
  ("(1/2,3)", "(0.5, 3)"),
  ("(1,2)", "1, 2"),
  ("[0,1)", "[0, 1.0)"),
  ("(0,\\infty)", "(0, ∞)"),
  ("(0,\\infty)", "(0,+\\infty)"),
  ("(-\\infty,2)", "(-∞, 2)"),
  ("(-\\infty,1)\\cup(2,3)", "(2,3) ∪ (-\\infty,1)"),
  ("\\{1,2\\}", "\\{2, 1\\}"),
  ("\\{1,2\\}", "1, 2"),
  ("3, 5", "5, 3"),
  ("3,5", "3 and 5"),
  ("3,5", "x=3 \\text{ or } x=5"),
  ("3,5", "x = 3, x = 5"),
  ("3,-3", "\\pm 3"),
  ("\\pm 3", "x = ± 3"),
  ("\\{5\\}", "5"),
  ("x=1,y=2", "y = 2, x = 1"),
  ("(1,2),(3,4)", "(3,4), (1,2)"),
  ("(1,2,3)", "(1, 2, 3.0)"),
  ("(1,234)", "(1, 234)"),
  ("(1,2)", "x=1, y=2"),
  # words, dates, choices
  ("Evelyn", "\\text{Evelyn}"),
  ("Evelyn", "evelyn."),
  ("\\text{no solution}", "No  solution"),
  ("yes", "Yes"),
  ("Monday", "Monday"),
  ("10:30", "10:30"),
  ("3:4", "3 : 4"),
  ("2024-01-05", "2024-01-05"),
  ("1/2/2024", "1/2/2024"),
  ("B", "(B)"),
  ("B", "\\text{B}"),
  ("(B)", "B."),
  ("B", "B) 12"),
  ("B", "\\textbf{(B)}\\ 12"),
  ("\\infty", "∞"),
]
UNEQUAL = [
  ("72", "73"),
  ("72", "-72"),
  ("72", "72.5"),
  ("72", "720"),
  ("72", "172"),
  ("72", "72.0001"),
  ("1234", "1,235"),
  ("1234", "12,34"),
  ("18", "$180"),
  ("5", "6 apples"),
  ("5", "5 million"),
  ("5", "5 dozen"),
  ("5", "six"),
  ("5", "5 apples and 3 pears"),
  ("5", "5 or 6"),
  ("1/2", "1/3"),
  ("1/2", "2/1"),
  ("1/2", "-1/2"),
  ("1/3", "0.3333"),
  ("1/3", "0.333334"),
  ("2/3", "0.666668"),
  ("1/3000000000", "0.000000"),
  ("0.333333", "0.333334"),
  ("3/2", "1\\frac{1}{3}"),
  ("1\\frac12", "1/2"),
  ("1\\frac{1}{2}", "11/2"),
  ("50%", "5"),
  ("50%", "5000%"),
  ("0.5", "0.5%"),
  ("50", "0.5"),
  ("50%", "51%"),
  ("1500", "1.5e4"),
  ("1024", "2^{11}"),
  ("4", "-2^2"),
  ("64", "2^{3^2}"),
  ("120", "6!"),
  ("5", "x = 6"),
  ("5", "2+3=6"),
  ("(1,2)", "(2,1)"),
  ("(1,2)", "[1,2]"),
  ("[1,2]", "[1,2)"),
  ("(1,2)", "\\{1,2\\}"),
  ("(1,2)", "(1,2,3)"),
  ("(1,2)", "12"),
  ("1,2", "1"),
  ("\\{1,2\\}", "\\{1,3\\}"),
  ("3,5", "3"),
  ("3", "3,5"),
  ("3,3,5", "3,5,5"),
  ("x=1,y=2", "x=2,y=1"),
  ("(0,\\infty)", "(0,-\\infty)"),
  ("3", "\\pm 3"),
  ("(-\\infty,1)\\cup(2,3)", "(-\\infty,1)"),
  ("(1,234)", "1,235"),
  ("1234", "(1, 234)"),
  ("1234", "1, 234"),
  ("3.5", "3,5"),
  ("Evelyn", "Evelin"),
  ("Evelyn", "72"),
  ("72", "Evelyn"),
  ("evil", "live"),
  ("no solution", "solution"),
  ("yes", "no"),
  ("10:30", "10"),
  ("10", "10:30"),
  ("10:30", "1/3"),
  ("2024", "2024-01-05"),
  ("2018", "2024-01-05"),
  ("1/2", "1/2/2024"),
  ("5", "1/5/2024"),
  ("3:4", "4:3"),
  ("B", "C"),
  ("B", "(C)"),
  ("\\infty", "-\\infty"),
  ("\\infty", "100"),
  ("72", HUGE),
  ("72", "-" + HUGE),
  ("0", f"{HUGE}+1"),
  ("1/2", "(10^9)!"),
  ("72", "(10^9)!"),
  ("72", "100000!"),
  ("72", f"3\\cdot {HUGE}"),
  ("72", "2^{(10^9)!}"),
  ("72", f"\\frac{{{HUGE}}}{{1}}"),
  ("(1,2)", "(1,3)"),
  ("72", ""),
  ("72", "  "),
]
BY_MATH_VERIFY = [
  ("\\sqrt{8}", "2\\sqrt{2}", True),
  ("\\sqrt2", "\\sqrt{2}", True),
  ("2\\sqrt{3}", "√12", True),
  ("2\\sqrt3", "2*sqrt(3)", True),
  ("4", "\\sqrt{16}", True),
  ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", True),
  ("2\\pi", "2π", True),
  ("2\\pi", "2*pi", True),
  ("\\frac{\\pi}{4}", "π/4", True),
  ("5\\pi\\text{ cm}", "5\\pi", True),
  ("x^2+2x+1", "(x+1)^2", True),
  ("2x+1", "y = 1 + 2x", True),
  ("y=2x+1", "y = 1+2x", True),
  ("x>3", "3<x", True),
  ("1+2i", "2i+1", True),
  ("\\log_2 8", "3", True),
  ("e^{2x}", "e^{x}e^{x}", True),
  ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\ 2\\end{pmatrix}", True),
  ("(\\sqrt{4}, 3)", "(2,3)", True),
  ("\\{\\sqrt{2}, 1\\}", "\\{1, \\sqrt{2}\\}", True),
  ("\\sqrt{2}, 1", "1,\\sqrt{2}", True),
  ("8^{1/3}", "2", True),
  ("\\sqrt{8}", "2\\sqrt{3}", False),
  ("2\\pi", "2", False),
  ("2\\pi", "6.28", False),
  ("x^2", "x^3", False),
  ("p-q", "q-p", False),
  ("x>3", "x<3", False),
  ("1+2i", "1-2i", False),
  ("5", "2x", False),
  ("5", "x+5", False),
  ("\\sqrt{25}", "5.1", False),
  ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}2\\\\ 1\\end{pmatrix}", False),
  ("5", "\\frac{", False),
  ("\\sqrt{2}", "Evelyn", False),
  ("5", "5 sinx", False),
  ("5", "5\\sin x", False),
  ("\\sqrt{2}", "1.4", False),
  ("7", "x^7", False),
  ("5", "5 + \\text{ something}", False),
]


@pytest.fixture(scope="module")
def pool():
  with Pool(1, timeout_s=20) as pool:
    yield pool


def show(pair):
  return " ~ ".join(map(str, pair))


@pytest.mark.parametrize("pair", EQUAL, ids=show)
def test_equal_without_a_worker(pair):
  gold, answer = pair
  assert compare(gold, answer) is True
  assert math_correct(f"So \\boxed{{{answer}}}.", gold) is True
  assert (
    len(gold) == 1 or compare(answer, gold) is True
  )  # nor does it matter which is gold, but for "B) 12"


@pytest.mark.parametrize("pair", UNEQUAL, ids=show)
def test_unequal_without_a_worker(pair):
  gold, answer = pair
  assert compare(gold, answer) is False
  assert math_correct(f"So \\boxed{{{answer}}}.", gold) is False
  assert compare(answer, gold) in (False, None) or not gold  # an answer as gold may be refused


def test_the_tables_are_long_enough():
  assert len(EQUAL) + len(UNEQUAL) + len(BY_MATH_VERIFY) >= 250 and len(UNEQUAL) >= 80


@pytest.mark.parametrize("case", BY_MATH_VERIFY, ids=show)
def test_the_rest_by_math_verify(case, pool):
  gold, answer, verdict = case
  assert math_verdicts([f"\\boxed{{{answer}}}"], [gold], pool=pool) == [verdict]


@pytest.mark.parametrize(
  ("completion", "answer"),
  [
    ("\\boxed{3} then \\boxed{4}", "4"),
    ("\\boxed{\\frac{1}{\\sqrt{2}}} ok", "\\frac{1}{\\sqrt{2}}"),
    ("\\boxed{\\boxed{5}}", "5"),
    ("\\fbox{3}", "3"),
    ("\\framebox{204} minutes", "204"),
    ("\\boxed{3} \\boxed{4", "3"),
    ("x}} \\boxed{4}", "4"),
    ("{ \\boxed {4}", "4"),
    ("\\boxed 5", "5"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{4} Answer: 5 #### 6", "4"),
    ("Answer: 3\nAnswer: 4", "4"),
    ("**Answer:** 5", "5"),
    ("**Answer**: $5$", "5"),
    ("Answer:\n\n5", "5"),
    ("Final answer: 5", "5"),
    ("ANSWER: 5", "5"),
    ("The answer is 5.", "5"),
    ("the final answer is therefore 3.", "3"),
    ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
    ("Answer: She has 5 apples.", "5"),
    ("The answer is 42, since 6*7=42", "42"),
    ("Answer: $5 more than $8, $13", "13"),
    ("<answer>5</answer>", "5"),
    ("the answer to the question is $\\frac{1}{2}$, as we saw", "\\frac{1}{2}"),
    ("Answer: x = 3 or x = 5", "x = 3 or x = 5"),
    ("Answer: no solution", "no solution"),
    ("Answer: $\\begin{pmatrix}1\\\\2\\end{pmatrix}$", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("The answer is 5\n#### 7", "7"),
    ("#### 7\nAnswer: 8", "8"),
    ("#### 1,000", "1,000"),
    ("####7", "7"),
    ("16 - 3 - 4 = 9 eggs", "9"),
    ("it is -5 degrees", "-5"),
    ("so $18.50.", "18.50"),
    ("we get \\frac{3}{4}", "\\frac{3}{4}"),
    ("about 3/4 of", "3/4"),
    ("so 50% of", "50%"),
    ("it is 1,234.50.", "1,234.50"),
    ("on 2024-01-05", "2024-01-05"),
    ("at 10:30", "10:30"),
    ("nothing", None),
    ("", None),
    ("####", None),
    ("\\boxed{", None),
  ],
)
def test_extraction(completion, answer):
  assert extract(completion) == answer


def test_a_gold_within_a_solution():
  assert [
    gold_answer(gold)
    for gold in ("72", "so 2 * 36\n#### 72", "thus \\boxed{72}.", "Answer: 72", "3 apples")
  ] == ["72"] * 4 + ["3 apples"]


def test_an_empty_gold_judges_nothing():
  assert math_verdicts(["5", "\\boxed{}", ""], ["", " ", "\\boxed{}"]) == [None] * 3
  assert math_correct("", "5") is False and math_correct("I do not know.", "5") is False


def rows(name):
  path = DATA / f"{name}.jsonl.gz"
  if not path.exists():
    pytest.skip(f"{path} is absent")
  with gzip.open(path, "rt", encoding="utf-8") as file:
    return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["gsm8k_test", "gsm8k_train"])
def test_gsm8k(name):
  """Gold solutions are right and changed numbers wrong, however the answer is stated; all without a worker."""
  rng = random.Random(0)
  wrongly_judged = []
  for row in rows(name):
    body, gold = row["answer"].split("####")
    number = int(gold.replace(",", ""))
    changed = (
      number + rng.choice([-number - 1 if number == 0 else -1, 1, 10, 1000])
      if rng.random() < 0.5
      else number * 10 + 7
    )
    states = [
      "#### {}",
      "The answer is {}.",
      "**Answer:** ${}",
      "\\boxed{{{}}}",
      "\\boxed{{{:,} \\text{{ more apples}}}}",
      "#### {:.1f}",
      "Answer: {} dollars",
    ]
    state = rng.choice(states).format
    right = [row["answer"], body + state(number)]
    wrong = [body + "#### " + str(changed), body + state(changed)]
    judged = [rewards_math._judge(text, row["answer"]) for text in right] + [
      rewards_math._judge(text, gold.strip()) for text in wrong
    ]
    if judged != [True, True, False, False]:
      wrongly_judged.append((right, wrong, judged))
  assert not wrongly_judged, wrongly_judged[:3]


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
    assert math_correct(f"Answer: {int(answer)}", answer, rule="dapo") is (
      not answer.startswith("0")
    )


DAPO = [
  ("Answer: 34", "34", True),
  ("answer : $34$", "34", True),
  ("Answer: 34.", "34", False),
  ("Answer: 35", "34", False),
  ("\\boxed{34}", "34", False),
  ("Answer: \\boxed{34}", "34", True),
  ("Answer: x = 34", "34", True),
  ("Answer: 1,234", "1234", True),
  ("Answer: 34 \\text{ cm}", "34", True),
  ("Answer: 34 dollars", "34", True),
  ("Answer: 34 apples", "34", False),
  ("Answer: \\frac12", "\\frac{1}{2}", True),
  ("Answer: 0.5", "\\frac{1}{2}", False),
  ("Answer: \\sqrt2", "\\sqrt{2}", True),
  ("Answer: 34\n" + "x" * 280, "34", True),
  ("Answer: 34\n" + "x" * 300, "34", False),
  ("Answer: 3\nAnswer: 34", "34", True),
  ("Answer: 34\nAnswer: 3", "34", False),
  ("**Answer:** 34", "34", False),
  ("Answer: 034", "34", False),
  ("Answer: the price is $34$ now", "34", True),
  ("Answer:\n34", "34", True),
  ("Answer: \\textbf{A}", "A", True),
  ("", "[INVALID]", True),
  ("Answer: 90^\\circ", "90", True),
]


@pytest.mark.parametrize("case", DAPO, ids=show)
def test_dapo_rule(case):
  completion, gold, verdict = case
  assert math_correct(completion, gold, rule="dapo") is verdict


def test_an_unknown_rule_is_said():
  with pytest.raises(UserError, match="did you mean 'dapo'"):
    math_correct("5", "5", rule="dappo")
  with pytest.raises(ValueError):
    math_verdicts(["5"], [])


def forms(number, rng):
  """Ways to write an exact number."""
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
def test_two_numbers_are_equal_if_and_only_if_they_are(a, b, rng):
  first = forms(a, rng)
  second = forms(a, rng)
  other = forms(b, rng)
  assert compare(first, second) is True and compare(second, first) is True
  if a != b and not ("%" in first + other and (100 * a == b or a == 100 * b)):
    assert compare(first, other) is False


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
  st.recursive(
    st.integers(0, 12).map(str),
    lambda inner: st.builds(
      lambda a, sign, b: f"({a}{sign}{b})", inner, st.sampled_from("+-*"), inner
    ),
    max_leaves=12,
  )
)
def test_arithmetic_agrees_with_python(text):
  value = eval(text)
  assert (
    arithmetic(text) == value
    and compare(str(value), text) is True
    and compare(str(value + 1), text) is False
  )


@pytest.mark.parametrize(
  ("text", "value"),
  [
    (HUGE, float("inf")),
    ("-" + HUGE, float("-inf")),
    ("(10^9)!", float("inf")),
    ("(-2)^{10^5+1}", float("-inf")),
    ("0*" + HUGE, 0),
    (f"{HUGE}-{HUGE}", None),
    (f"1/{HUGE}", None),
    (f"({HUGE})/2", None),
    ("2^{-10^9}", None),
    ("(1+1/10^9)^{10^9}", None),
    ("1^{10^99}", 1),
    ("(-1)^{10^99+1}", -1),
    ("0^0", 1),
    ("0^{-1}", None),
    ("1/0", None),
    ("500!", None),
    ("(-3)!", None),
    ("(1/2)!", None),
    ("2^{1/2}", None),
    ("3 4", None),
    ("2(3)", 6),
    ("1/2(3)", None),
    ("05-01", None),
    ("(1}", None),
    ("(", None),
    ("1+", None),
    ("*1", None),
    ("", None),
    ("x", None),
    ("--3", 3),
    ("2^-1", Fraction(1, 2)),
    ("2*-3", -6),
    ("6/2/3", 1),
    ("7-2-1", 4),
    ("3!!", 720),
    ("1,234+1", 1235),
    ("(-2)^3", -8),
    ("-2^2", -4),
  ],
)
def test_arithmetic_by_hand(text, value):
  assert arithmetic(text) == value


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
      assert isinstance(rewards_math._judge(completion, gold), bool | Undecided | None)
      assert time.process_time() - began < 2  # milliseconds; a megabyte may take longer
  math_correct("5", HOSTILE[name][:2000], rule="dapo")


def test_what_a_bound_decides_and_what_it_does_not():
  nested = "(" * 3000 + "{}" + ")" * 3000
  boxed = "\\boxed{{{}}}".format
  assert (
    math_correct(boxed(nested.format(72)), "72") is True
    and math_correct(boxed(nested.format(73)), "72") is False
  )
  assert math_correct(boxed(HUGE), HUGE) is True  # the same string
  assert (
    math_correct(boxed(f"({HUGE})"), HUGE) is None
    and math_correct(boxed("9^{9^{9^x}}"), "72") is None
  )
  assert math_correct(boxed("(" * 3000 + "1" + "+1)" * 3000), "72") is None  # too long to be read
  assert math_correct(boxed("(" * 21 + "x" + "+1)" * 21), "72") is None  # too deep for math-verify


PIECES = sorted(
  set(
    re.findall(
      r"\\[a-z]+|.",
      "\\frac{1}2 \\sqrt[3]{x}^2,(5)!-7/0.1%=$ \\boxed\\cup\\pm<>∪or and½×\0 answer:####",
    )
  )
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
  st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.booleans()
)
def test_no_text_raises(text, boxed):
  completion = f"\\boxed{{{text}}}" if boxed else text
  for gold in ("72", "\\sqrt{2}", "(1,2)", text):
    assert isinstance(rewards_math._judge(completion, gold), bool | Undecided | None)
    assert math_correct(completion, gold, rule="dapo") in (True, False, None)
