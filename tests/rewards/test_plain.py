"""Plain answers: words and codes compared as text, and letters of multiple choice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards import VERIFIERS, VOTES, choice_correct, exact_correct, math_correct


@pytest.mark.parametrize(
  ("completion", "answer", "correct"),
  [
    ("cba", "cba", True),
    ("abc", "cba", False),  # math-verify would read a product of letters
    ("Read it backwards.\ncba", "cba", True),
    ("Read it backwards.\ncba.", "cba", True),
    ("cba\nor perhaps abc", "cba", False),
    (r"It is \boxed{cba}, I think.", "cba", True),
    ("Answer: cba\nor not", "cba", True),
    ("cba\n#### abc", "cba", False),
    ("The answer is **Paris**.", "Paris", True),
    ("paris", "Paris", False),
    ("New   York", "New York", True),
    ("first\nsecond", "first\nsecond", True),
    ('"x = 1"', "x = 1", True),
    ("", "a", False),
    (" \n ", "a", False),
    ("...", "...", True),
    ("12", "12.0", False),
  ],
)
def test_exact(completion, answer, correct):
  assert exact_correct(completion, answer) is correct
  assert VERIFIERS["exact"]([completion], [answer], [{}], None) == [correct]


@pytest.mark.parametrize(
  ("completion", "answer", "correct"),
  [
    ("B", "B", True),
    ("b", "B", True),
    ("(B)", "B.", True),
    ("The answer is B.", "(b)", True),
    ("Answer: (C), because A is wrong", "C", True),
    (r"so \boxed{D}", "D", True),
    ("First I thought of (A), but it is (D) after all", "D", True),
    ("B) it is blue", "B", True),
    ("Both fit, so\n**C**", "C", True),
    ("A and B are wrong", "A", False),
    ("no letter here", "A", False),
    ("Answer: Blue", "B", False),
    ("A", "B", False),
    ("Answer: A or B", "A", False),
    ("Answer: A or B", "B", False),
    ("Answer: A, B, C, D", "A", False),
    ("Answer: A & B", "A", False),
    ("Answer: A/B", "A", False),
    ("Answer: (A)(B)", "A", False),
    ("Answer: A B", "A", False),
    ("Answer: A or maybe B", "A", False),
    ("Answer: B. A is too small.", "B", True),
    ("Answer: either A or B", "B", False),
    ("Answer: (A)-(D)", "A", False),
    ("Answer: (A)-(D)", "D", False),
    (r"\boxed{A and B}", "A", False),
    (r"\boxed{\text{(A) or (B)}}", "B", False),
    ("It is (A) or (B)", "B", False),
    ("It is not (B)", "B", False),
    ("It can't be (A)", "A", False),
    ("Answer: anything but A", "A", False),
    ("(A) (B)", "B", False),
    (r"\boxed{A\ B}", "B", False),
    (r"\boxed{A,\ B}", "A", False),
    ("Answer: A (or B)", "A", False),
    ("Answer: A [B]", "A", False),
    ("Answer: A, but B is also right", "A", False),
    ("Answer: not A, but B", "B", True),
    ("Answer: D (A and C)", "D", True),
    ("Answer: C. Both A and B are right", "C", True),
    ("Answer: not B", "B", False),
    ("Answer: A is wrong, it is (B)", "B", True),
    ("Answer: A is wrong, it is (B)", "A", False),
    ("The answer is a combination of both, so (C)", "C", True),
    ("The answer is a combination of both, so (C)", "A", False),
    ("Answer: I think it is (B)", "B", True),
    ("Answer: I think it is (B)", "I", False),
    ("Answer: A because it is blue", "A", True),
    ("Answer: A", "A", True),
    ("Answer: I", "I", True),
    ("Answer: B, because A is wrong", "B", True),
    ("It is (A), since (B) is wrong", "A", True),
    *(
      (f"{start}{text}", "A", False)
      for start in ("Answer: ", "The answer is ", "So it is:\n")
      for text in (
        *("A = B", "A → B", "A -> B", "A > B", r"A \cup B", "A with B", "A or else B", "A (wrong)"),
        *("A ✗",),
        *("A; alternatively B", "A - wrong", "A, which is wrong", "A is a trap"),
        *("A is tempting but wrong",),
        *("rule out A", "reject A", "instead of A", "unlike A", "opposite of A", "not option A"),
        *(r"\neg A",),
        *("none of A", "(A) x (B) y"),
      )
    ),
    *(
      (f"Answer: {text}", "A", True)
      for text in (
        "A!",
        "A rather than B",
        "A; B is wrong",
        "A, not (B)",
        "A) x, as in (the first)",
      )
    ),
    ("Answer: B: False", "B", True),
    ("Answer: C. Vitamin D", "C", True),
    ("A", "Paris", None),
    ("K", "K", None),  # only a choice from A to J is found in a text
  ],
)
def test_choice(completion, answer, correct):
  assert choice_correct(completion, answer) is correct
  assert VERIFIERS["choice"]([completion], [answer], [{}], None) == [correct]


LETTERS = st.permutations("ABCDEFGHIJ").map(lambda letters: letters[:2])
FORMS = st.sampled_from(["{}", "({})", "**{}**", "\\text{{{}}}"])
PLACES = st.sampled_from(["Answer: {}", "The answer is {}.", "\\boxed{{{}}}", "It is {}", "{}"])
JOINED = st.sampled_from(
  [
    *("{} or {}", "{} and {}", "{}/{}", "{}, {}", "{}; {}", "{} & {}", "{}-{}", "{} – {}"),
    *("{} to {}", "{} + {}", "{} as well as {}", "{} or maybe {}", "either {} or {}", "{}{}"),
    *("both {} and {}", "neither {} nor {}", "{}, also {}", "{} vs {}", "{} oder {}", "{} then {}"),
    *("{} together with {}", "{} (or {})", "{}或{}"),
  ]
)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(LETTERS, FORMS, PLACES, JOINED)
def test_two_letters_are_no_choice(letters, form, place, joined):
  text = place.format(joined.format(*map(form.format, letters)))
  assert not any(choice_correct(text, letter) for letter in letters), text


REFUSED = st.sampled_from(
  ["not {}", "{} is wrong", "{} is not correct", "anything but {}", "everything except {}"]
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(LETTERS, FORMS, PLACES, REFUSED)
def test_a_letter_that_is_called_wrong_is_no_choice(letters, form, place, refused):
  text = place.format(refused.format(form.format(letters[0])))
  assert not choice_correct(text, letters[0]), text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
  LETTERS,
  FORMS,
  st.sampled_from(["Answer: {}", "The answer is {}", "\\boxed{{{}}}", "Answer: option {}"]),
  st.sampled_from(["", ".", " because it fits", ". {} is too small.", ", since {} is wrong"]),
)
def test_one_letter_is_the_choice_whatever_follows(letters, form, place, reason):
  reason = "" if "boxed" in place else reason.format(letters[1])
  text = place.format(form.format(letters[0])) + reason
  assert choice_correct(text, letters[0]) and not choice_correct(text, letters[1]), text


def test_equal_answers_vote_together():
  assert VOTES["exact"]("so\nNew  York.") == VOTES["exact"]("New York") == "New York"
  assert VOTES["choice"]("(b)") == VOTES["choice"]("Answer: B") == "B"
  assert VOTES["exact"](" \n") is VOTES["choice"]("none") is None


@pytest.mark.parametrize("text", ["cba", "Paris", "I do not know", r"\text{odd}"])
def test_the_math_kind_accepts_the_gold_answer_itself(text):
  assert math_correct(text, text) is True
  assert math_correct("something else", text) is False
