"""DAPO's own verifier."""

import pytest

from gtpo_jax.rewards.math.verdicts import math_correct

# Completion, gold, verdict.
CASES = [
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


@pytest.mark.parametrize(("completion", "gold", "verdict"), CASES)
def test_dapo_rule(completion, gold, verdict):
  assert math_correct(completion, gold, rule="dapo") is verdict
