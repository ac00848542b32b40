"""Tests which completions vote for the same answer."""

import pytest

from gtpo_jax.rewards import VERIFIERS, VOTES

math = VOTES["math"]


@pytest.mark.parametrize(
  "texts",
  [
    (r"\boxed{72}", "#### 72", "The answer is $72$.", r"so \boxed{72.0}", "Answer: 72 apples"),
    (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"Answer: 1/2", r"\boxed{\dfrac12}"),
    (r"\boxed{1,234}", "Answer: 1234"),
    (r"\boxed{\{1, 2\}}", r"\boxed{\{2,1\}}"),
    (r"\boxed{(1, 2)}", r"\boxed{( 1,2 )}"),
    (r"\boxed{x^2 + 1}", r"\boxed{x^2+1}"),
    (r"\boxed{\text{Tuesday}}", "Answer: Tuesday"),
    (r"\boxed{50\%}", "Answer: 50 percent"),
  ],
)
def test_spellings_of_one_answer_share_a_vote(texts):
  assert len({math(text) for text in texts}) == 1
  assert math(texts[0]) is not None


@pytest.mark.parametrize(
  ("a", "b"), [("72", "73"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("x", "y"), ("50", r"50\%")]
)
def test_different_answers_do_not_share_a_vote(a, b):
  assert math(rf"\boxed{{{a}}}") != math(rf"\boxed{{{b}}}")


@pytest.mark.parametrize(
  "text", ["", "I do not know.", r"\boxed{}", r"\boxed{ }", r"\boxed{" + "1+" * 1000 + "1}"]
)
def test_no_answer_abstains(text):
  assert math(text) is None


def test_the_synthetic_tasks():
  assert VOTES["last_number"]("12+3=15,15+4=19") == "19"
  assert VOTES["last_number"]("none") is None
  assert VOTES["countdown"](" 1+2=3 ") == "1+2=3"
  assert VOTES["countdown"]("  ") is None
  assert VOTES["forks"]("QA:8=8") == VOTES["forks"]("B:8=8") == "88"
  assert VOTES["forks"]("QA") is None


def test_only_kinds_with_a_verifier_have_votes_and_programs_have_none():
  assert {"last_number", "countdown", "math"} <= set(VOTES) <= set(VERIFIERS) - {"code"}
