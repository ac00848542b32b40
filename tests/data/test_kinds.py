"""The verifier of rows that name none, and the columns that reward functions receive."""

import pytest

from gtpo_jax.data.sources import load_records


def loaded(*answers, fields="", **columns):
  rows = [{"prompt": f"{i}?", "answer": answer, **columns} for i, answer in enumerate(answers)]
  return load_records(rows, "rows", fields)


def kinds(*answers, **options):
  return {problem.kind for problem in loaded(*answers, **options).problems}


@pytest.mark.parametrize(
  ("answers", "kind"),
  [
    (["2", "3"], "math"),
    ([2, 3.5], "math"),
    (["x+1", "y"], "math"),
    ([r"\frac{1}{2}", "pi"], "math"),
    (["cba", "ba"], "exact"),
    (["New York", "well-known", "It's so."], "exact"),
    (["Köln", "上海"], "exact"),
    (["A", "(C)"], "choice"),
    (["A", "A"], "math"),  # one letter may be a symbol
    (["A", "Z"], "math"),
    (["cba", "2"], "math"),
    (["infinity", "pi"], "math"),
  ],
)
def test_the_answers_choose_the_kind(answers, kind):
  assert kinds(*answers) == {kind}


def test_the_choice_and_a_mixture_are_told():
  assert loaded("2").note == ""
  assert "kind exact, since the answers are plain text" in loaded("cba", "ba").summary("f.jsonl")
  assert "kind choice, since the answers are letters" in loaded("A", "B").summary("f.jsonl")
  mixed = loaded("cba", "2", "ab").summary("f.jsonl")
  assert "not made for the 2 answers that are plain text, such as 'cba': give those rows" in mixed


def test_a_kind_that_is_stated_stays():
  assert kinds("cba", "ba", kind="math") == {"math"}
  assert kinds("cba", "ba", fields="prompt=prompt,answer=answer,kind=last_number") == {
    "last_number"
  }
  rows = [{"prompt": "1?", "answer": "cba", "kind": "math"}, {"prompt": "2?", "answer": "ba"}]
  assert [problem.kind for problem in load_records(rows, "rows").problems] == ["math", "exact"]


def test_other_columns_reach_the_reward_function():
  (problem,) = loaded("2", id="p", level=3, tags=["a"], extra={"hint": 7, "level": 4}).problems
  assert problem.extra == {"level": 4, "tags": ["a"], "hint": 7}
  assert problem.id == "p"
  rows = [{"q": {"text": "1?"}, "a": "2", "level": 3}]
  (problem,) = load_records(rows, "rows", "prompt=q.text,answer=a").problems
  assert problem.extra == rows[0]
  (problem,) = load_records(
    [{"question": "1?", "answer": "so\n#### 2", "level": 3}], "rows"
  ).problems
  assert problem.extra == {"level": 3, "solution": "so"} and problem.kind == "math"
