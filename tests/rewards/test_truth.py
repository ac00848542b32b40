"""Truth marks, proved by changing characters and asking the verifier."""

import itertools
import re
import string
import time

import numpy as np
import pytest

from gtpo_jax.data.tasks import make_task
from gtpo_jax.rewards import VERIFIERS, countdown_correct, knows_truth, truth_marks

NUMBERS = {"numbers": [5, 7, 12]}
TASKS = ("sums", "countdown", "forks", "forks_confident")


def marks_of(problem, text):
  prompt = problem.messages[-1]["content"]
  return truth_marks(problem.kind, prompt, text, problem.answer, problem.extra)


def is_correct(problem, text):
  return VERIFIERS[problem.kind]([text], [problem.answer], [problem.extra], None)[0]


def demonstrations(name, slips, count=150, seed=0):
  """Yields problems, each with a completion of the teacher."""
  task = make_task(name)
  rng = np.random.default_rng(seed)
  for index in rng.choice(task.train_ids, count):
    yield task.problem(index), task.demonstration(index, rng, slips)


@pytest.mark.parametrize(
  ("text", "marks"),
  [
    ("46+4=50,50+3=53", "cciciddiccicidd"),
    ("46+4=40,40+3=43", "cciciDdiccicidd"),  # only the first wrong step
    ("46+4=50,60+3=63", "cciciddiCcicidd"),
    ("46+4=150,50+3=53", "cciciDDDiccicidd"),
    ("46+4=50,50+2=52", "cciciddicciCidd"),
    ("46+4=50", None),
    ("46+4=50,50-3=47", None),
    ("46+4=50,50+3=53.", None),
    ("", None),
  ],
)
def test_running_sums_by_hand(text, marks):
  assert truth_marks("last_number", "46+4+3:", text, "53", {}) == marks


@pytest.mark.parametrize(
  ("text", "marks"),
  [
    ("12+7=19,19-5=14", "ddddicciddddicc"),
    ("7-5=2,2+12=14", "dddiciddddicc"),
    ("12+5=17,17-7=10", "dddDicciddddicc"),
    ("12+7=18,18-5=13", "ddddicCiddddicc"),
    ("12+7=19,19+5=24", "ddddicciddDdicc"),
    ("12+8=20,20-5=15", "dddDicciddddicc"),
    ("9+7=16,16-5=11", "Dddicciddddicc"),
    ("12+7=19", None),
    ("12+7=19,14", None),
  ],
)
def test_countdown_by_hand(text, marks):
  assert truth_marks("countdown", "5 7 12=14:", text, "14", NUMBERS) == marks


@pytest.mark.parametrize(
  ("text", "marks"),
  [
    ("QA:8=8:5=5", "fffdicfdic"),
    ("QA:3=3:5=5", "fffDicfdic"),  # a faithful copy of a wrong digit is no error of its own
    ("QA:8=3:4=5", "fffdiCfDiC"),
    ("8855.", "dcdcf"),
    ("QA:8=8:5", None),
    ("QA:8=8:5=55", None),
  ],
)
def test_forks_by_hand(text, marks):
  assert truth_marks("forks", "38 52:", text, "85", {}) == marks


@pytest.mark.parametrize("name", TASKS)
def test_marks_without_an_error_are_a_correct_verdict(name):
  """Also after random changes, if the text still has the form of an answer."""
  rng = np.random.default_rng(1)
  parsed = {True: 0, False: 0}
  for slips in (0.0, 1.0):
    for problem, original in demonstrations(name, slips):
      text = original
      for _ in range(4):
        marks = marks_of(problem, text)
        if marks is not None:
          assert len(marks) == len(text)
          # Two errors of a sum can cancel each other out.
          assert is_correct(problem, text) == marks.islower() or (
            name == "sums" and is_correct(problem, text)
          ), (problem, text, marks)
          parsed[marks.islower()] += 1
        at = rng.integers(len(original))
        text = original[:at] + rng.choice(list("0123456789+-*=,A")) + original[at + 1 :]
  assert parsed[True] > 100 and parsed[False] > 100


def others_of_its_kind(char):
  """Returns what a character can be changed to: digit to digit, letter to letter, + to -."""
  for kind in (string.digits, string.ascii_uppercase, "+-*"):
    if char in kind:
      return kind.replace(char, "")
  return ""


@pytest.mark.parametrize("name", ["forks", "forks_confident", "countdown"])
def test_a_changed_decision_is_wrong_and_a_changed_filler_is_not(name):
  seen = set()
  for problem, text in demonstrations(name, slips=0.0, count=40):
    marks = marks_of(problem, text)
    assert set(marks) <= set("dcfi")
    for i, (char, mark) in enumerate(zip(text, marks, strict=True)):
      for other in others_of_its_kind(char):
        changed = text[:i] + other + text[i + 1 :]
        assert is_correct(problem, changed) == (mark in "fi"), (text, changed, marks)
        seen.add(mark)
  assert {"d", "c"} <= seen and ("f" in seen) == (name != "countdown")


def continued_flawlessly(text, addends):
  """Returns the end of a running sum: every step copies the total before it and adds correctly."""
  steps = [text]
  for addend in addends:
    total = int(steps[-1].split("=")[1])
    steps.append(f"{total}+{addend}={total + int(addend)}")
  return ",".join(steps)


def test_a_changed_digit_of_a_sum_is_wrong_even_if_all_later_steps_are_flawless():
  """The verifier reads only the last number, so the steps after a change are done again."""
  for problem, text in demonstrations("sums", slips=0.0, count=40):
    addends = problem.messages[-1]["content"].removesuffix(":").split("+")[1:]
    steps = text.split(",")
    assert marks_of(problem, text) == ",".join(["ccicidd"] * 4).replace(",", "i")
    for k, step in enumerate(steps):
      start = step.partition("=")[0]
      for i, char in enumerate(step):
        for other in others_of_its_kind(char) if char.isdigit() else ():
          changed = step[:i] + other + step[i + 1 :]
          if i < len(start):  # a wrong operand: the total is computed from it
            a, b = changed.partition("=")[0].split("+")
            changed = f"{a}+{b}={int(a) + int(b)}"
          assert not is_correct(problem, continued_flawlessly(changed, addends[k + 1 :]))
    for i, mark in enumerate(marks_of(problem, text)):
      if mark == "i":
        assert is_correct(problem, text[:i] + " " + text[i + 1 :])


def solutions(numbers, target):
  """Returns all correct chains of two steps with three numbers, by brute force."""
  chains = set()
  for a, b, c in itertools.permutations(numbers):
    for first, second in itertools.product("+-*", repeat=2):
      result = {"+": a + b, "-": a - b, "*": a * b}[first]
      for x, y in ((result, c), (c, result)):
        last = {"+": x + y, "-": x - y, "*": x * y}[second]
        chain = f"{a}{first}{b}={result},{x}{second}{y}={last}"
        if countdown_correct(chain, numbers, target):
          chains.add(chain)
  return chains


def starts_with(chain, start):
  """Returns whether a chain starts with the same numbers and signs, such as 12 but not 1."""
  words = lambda text: re.findall(r"\d+|\D", text)
  return words(chain)[: len(words(start))] == words(start)


def test_the_wrong_token_of_countdown_is_the_first_one_after_which_nothing_is_correct():
  for problem, text in demonstrations("countdown", slips=1.0, count=60, seed=3):
    chains = solutions(problem.extra["numbers"], int(problem.answer))
    marks = marks_of(problem, text)
    wrong = [i for i, mark in enumerate(marks) if mark.isupper()]
    if not wrong:
      assert text in chains
      continue
    assert not any(starts_with(chain, text[: wrong[-1] + 1]) for chain in chains)
    assert any(starts_with(chain, text[: wrong[0]]) for chain in chains)


def test_repaired_decisions_of_forks_are_correct():
  for problem, text in demonstrations("forks", slips=1.0, count=60):
    marks = marks_of(problem, text)
    decisions = iter(problem.answer)
    repaired = list(text)
    for i, mark in enumerate(marks):
      if mark in "dD":
        digit = repaired[i] = next(decisions)
      elif mark in "cC":
        repaired[i] = digit
    assert is_correct(problem, "".join(repaired))


def test_a_row_can_say_which_values_decide():
  truth = [["48/2=", "24"], ["48+24=", "72"]]
  marks = lambda text: truth_marks("math", "How many?", text, "72", {"truth": truth})
  assert marks("48/2=24, 48+24=72") == "iiiiiddiiiiiiiidd"
  assert marks("48/2= 23, 48+24=71") == "iiiiiiDDiiiiiiiiii"  # the first wrong value
  assert marks("48/2=24") == "iiiiidd"
  assert marks("48/2=24.5.") == "iiiiiDDDDi"
  assert marks("it is 72") is None
  assert knows_truth("math", {"truth": truth}) and not knows_truth("math", {})
  assert truth_marks("math", "1+1:", "1+1=2", "2", {}) is None


def test_values_of_truth_in_all_notations():
  """The value as it is written in the row, and as completions may write it, is a decision."""
  cases = (
    ("1,000", ["1,000", "1000"], ["1,001", "1,000.5", "100"]),
    ("50%", ["50%", "50 %", r"50\%"], ["60%", "5"]),
    ("1/2", ["1/2", "0.5", r"\frac{1}{2}"], ["1/3", "1", r"\frac{1}{3}"]),
    ("24 km", ["24 km", "24km", "24", "24 m"], ["25 km", "-24 km"]),
    ("-24", ["-24", "−24"], ["24", "-25"]),
    ("$24", ["$24", "24", r"\$24"], ["$25", "-$24"]),
    ("24", ["24", "24.0", "24,25", "24公里", "24/4=6"], ["24.5", "24,500", "-24", "24/4", "24x"]),
    ("1:30", ["1:30"], ["1:45", "1"]),
    ("red", ["red"], ["reddish", "blue", "7"]),
    ("New York", ["New York"], ["New Jersey"]),
    ("(1, 2)", ["(1, 2)"], ["(1, 3)"]),
    (r"\sqrt{2}", [r"\sqrt{2}"], [r"\sqrt{3}"]),
    ("+", ["+"], ["-", "7"]),
  )
  for right, same, others in cases:
    for text in (*same, *others):
      marks = truth_marks("math", "", f"x = {text}.", "1", {"truth": [["x =", right]]})
      mark = "d" if text in same else "D"
      assert marks[:5] == "iiii" + mark and marks[-1] == "i", (right, text, marks)
      assert set(marks) == {"i", mark}, (right, text, marks)
  for text in ("x = ?", "x =", "y = 24"):
    assert truth_marks("math", "", text, "1", {"truth": [["x =", "24"]]}) is None


@pytest.mark.parametrize(
  "text",
  ["", "\x00", "=" * 9999, "1+1=" * 9999, "9" * 99_999, "A" * 99_999, "1+1=2," * 9999, "\ud800٣８"],
)
def test_no_text_raises_or_takes_long(text):
  began = time.perf_counter()
  for kind in ("last_number", "countdown", "forks"):
    marks = truth_marks(kind, "1+1:", text, "14", NUMBERS)
    assert marks is None or len(marks) == len(text)
  marks = truth_marks("math", "", text, "2", {"truth": [["1+1=", "2"]] * 1000})
  assert marks is None or len(marks) == len(text)
  for right in ("2", "-1,000 km", "A" * 500):
    marks = truth_marks("math", "", text, "2", {"truth": [["", right]] * 100})
    assert marks is None or len(marks) == len(text)
  assert time.perf_counter() - began < 10
