"""Extraction of the answer from a text."""

import pytest

from gtpo_jax.rewards.math.extraction import extract, gold_answer


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


@pytest.mark.parametrize("gold", ["72", "so 2 * 36\n#### 72", "thus \\boxed{72}.", "Answer: 72"])
def test_a_gold_answer_within_a_solution(gold):
  assert gold_answer(gold) == "72"


def test_any_other_gold_text_is_the_answer():
  assert gold_answer("3 apples") == "3 apples"
