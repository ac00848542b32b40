"""What columns mean, whatever the layout: kinds, tests, choices, and columns that nothing reads."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.data.layouts import to_problem
from gtpo_jax.data.sources import load_records
from gtpo_jax.loop.inputs import resolve_inputs
from gtpo_jax.rewards import check_gold, verify
from gtpo_jax.runtime.errors import UserError

PROMPTS = ("prompt", "question", "problem")
CASES = {"inputs": ["3\n4\n"], "outputs": ["7\n"]}
CALLS = {"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]}
ASSERTS = ["assert add(3, 4) == 7", "assert add(0, 0) == 0"]
READS = "print(int(input()) + int(input()))"
ADDS = "def add(a, b): return a + b"


def only(row, **options):
  (problem,) = load_records([row], "rows", check=check_gold, **options).problems
  return problem


def decide(problem, *completions):
  count = len(completions)
  return verify(problem.kind, completions, [problem.answer] * count, [problem.extra] * count)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_kind_is_read_in_every_layout(prompt):
  problem = only({prompt: "928 in base 16?", "answer": "3a0", "kind": "exact"})
  assert problem.kind == "exact"
  assert decide(problem, "3a0", "I do not know, maybe 0") == [True, False]
  with pytest.raises(UserError, match="kind 'exakt', which has no verifier"):
    only({prompt: "q", "answer": "3a0", "kind": "exakt"})
  renamed = {"q": "928?", "a": "3a0", "kind": "exact"}
  assert only(renamed, fields="prompt=q,answer=a").kind == "exact"


def verl(truth, **columns):
  return {
    "prompt": [{"role": "user", "content": "Add."}],
    "reward_model": {"ground_truth": truth},
    **columns,
  }


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("truth", "right"),
  [
    (json.dumps(CASES), READS),
    (CASES, READS),
    (json.dumps(CALLS), ADDS),
    (json.dumps(ASSERTS), ADDS),
    ("\n".join(ASSERTS), ADDS),
  ],
)
def test_the_tests_of_verl_are_run(truth, right):
  problem = only(verl(truth, ability="code"))
  assert problem == only(verl(truth, ability="code", kind="code"))
  assert decide(problem, right, "def add(a, b): return 8") == [True, False]


def test_programs_of_verl_without_tests_are_refused():
  with pytest.raises(UserError, match="is of ability 'code', but its ground_truth has no tests"):
    only(verl("7", ability="code"))
  assert only(verl('["1", "2"]', ability="math")).kind == "math"


def test_every_column_reaches_the_function_and_makes_a_row_different():
  rows = [verl("5", extra_info={"target_words": words}) for words in (5, 6, 7, 7)]
  loaded = load_records(rows, "rows", needs=("prompt",))
  assert [p.extra["extra_info"]["target_words"] for p in loaded.problems] == [5, 6, 7]
  assert loaded.duplicates == 1


@pytest.mark.parametrize(
  ("choices", "answer", "letter"),
  [
    (["4", "6", "7", "9"], 2, "C"),
    (["4", "6", "7", "9"], "C", "C"),
    (["4", "6", "7", "9"], "7", "C"),
    ({"text": ["4", "6", "7"], "label": ["1", "2", "3"]}, "3", "C"),
    ({"A": "red", "B": "blue"}, "B", "B"),
    (["red", "blue"], "(b)", "B"),
  ],
)
def test_choices_are_shown_and_chosen(choices, answer, letter):
  row = {"question": "Which?", "choices": choices, "answer": answer, "source": "x"}
  problem = only(row)
  texts = list(choices.values()) if isinstance(choices, dict) else choices
  texts = texts[0] if isinstance(texts[0], list) else texts
  shown = "\n".join(f"({letter}) {text}" for letter, text in zip("ABCD", texts, strict=False))
  assert problem.messages[-1]["content"] == f"Which?\n{shown}"
  assert (problem.kind, problem.answer, problem.extra["source"]) == ("choice", letter, "x")
  assert decide(problem, f"({letter})", "(J)") == [True, False]
  listed = {**row, "question": f"Which? {', '.join(texts)}"}
  assert only(listed).messages[-1]["content"] == listed["question"]


@pytest.mark.parametrize(
  ("choices", "answer", "message"),
  [
    (["1", "2", "3"], 1, "has the answer 1, which names 2 of its choices"),
    (["4", "6"], "9", "has the answer '9', which names none of its choices"),
    (["4"], 0, "has choices that are not 2 to 10 texts"),
    ([["4"], ["6"]], 0, "has choices that are not 2 to 10 texts"),
    (list("abcdefghijk"), 0, "has choices that are not 2 to 10 texts"),
  ],
)
def test_choices_that_cannot_be_used_are_refused(choices, answer, message):
  with pytest.raises(UserError, match=message):
    only({"question": "q", "choices": choices, "answer": answer})


def test_rows_need_no_more_than_what_decides_them_reads():
  rows = [{"prompt": "Write a poem."}, {"prompt": "b", "answer": ""}, {"prompt": "c", "answer": {}}]
  with pytest.raises(UserError, match=r"data\[0\]: has the columns prompt, no known layout"):
    resolve_inputs({}, data=rows)
  reward = lambda prompts, completions, answers, extras: [True] * len(completions)
  (loaded, *_) = resolve_inputs({}, data=rows, held_out=rows, reward=reward).records.values()
  assert [problem.answer for problem in loaded.problems] == ["", "", ""]


def test_a_solution_is_the_answer_as_in_trl():
  row = {"prompt": [{"role": "user", "content": "1+1?"}], "solution": r"So \boxed{2}."}
  problem = only(row)
  assert decide(problem, r"\boxed{2}", r"\boxed{3}") == [True, False]
  assert problem.extra["solution"] == row["solution"]  # for a reward function of TRL's users


def test_parts_of_messages_that_would_be_lost_are_refused():
  call = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "f"}]}
  thought = {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}
  for message, part in ((call, "tool_calls"), (thought, "reasoning_content")):
    prompt = [{"role": "user", "content": "q"}, message, {"role": "user", "content": "And?"}]
    with pytest.raises(UserError, match=f"has a message with {part}, which would be lost"):
      only({"prompt": prompt, "answer": "7"})
    assert only({"prompt": [{**m, part: None} for m in prompt], "answer": "7"})


# Columns of problems, with what they must do to a row of maths in any layout.
COLUMNS = {
  "kind": [("exact", "exact"), ("math", "math"), (None, "math")],
  "choices": [(["7", "8"], "choice"), ([], "math"), (None, "math")],
  "options": [({"A": "8", "B": "7"}, "choice")],
  "test_list": [(ASSERTS, "code"), ([], "math"), (None, "math")],
  "input_output": [(json.dumps(CASES), "code"), ("", "math")],
  "truth": [([["3+4=", "7"]], "math")],
  "note": [("hard", "math"), (3, "math"), (None, "math")],
  "extra": [({"hint": "x"}, "math"), (None, "math")],
}
DECIDING = ("kind", "choices", "options", "test_list", "input_output")
LAYOUTS = [
  *({prompt: "3+4?", name: "7"} for prompt in PROMPTS for name in ("answer", "solution")),
  {"prompt": "3+4?", "reward_model": {"ground_truth": "7"}, "data_source": "d"},
  {"question": "3+4?", "answer": "3 + 4\n#### 7"},
]


def random_row(draw, layout):
  names = draw.sample(sorted(COLUMNS), draw.randint(0, 3))
  chosen = {name: draw.choice(COLUMNS[name]) for name in names}
  row = layout | {name: value for name, (value, _) in chosen.items()}
  stated = chosen.get("kind", (None, ""))[0]
  kinds = {kind for _, kind in chosen.values()} - {"math"}
  return row, {stated} if stated else kinds or {"math"}


def test_random_columns_are_read_named_or_refused():
  """In any layout, a known column means the same, and no column is lost without a word."""
  draw = random.Random(0)
  seen = set()
  for _ in range(500):
    row, kinds = random_row(draw, draw.choice(LAYOUTS))
    try:
      loaded = load_records([row], "rows", check=check_gold)
    except UserError as error:
      assert "\n" not in str(error) and any(row.get(name) for name in DECIDING), row
      continue
    (problem,) = loaded.problems
    assert problem.kind in kinds, row
    seen.add(problem.kind)
    for name, value in row.items():
      if name == "extra":
        assert all(problem.extra[key] == value[key] for key in value or ())
      elif name not in (*PROMPTS, "answer", "kind"):
        assert problem.extra[name] == value, row
    read = {"choice": {"choices", "options"}, "code": {"test_list", "input_output"}}
    unread = {"note", "hint", "data_source", *read["choice"], *read["code"]} - read.get(
      problem.kind, set()
    )
    assert set(loaded.unread) - {"answer"} == unread & problem.extra.keys(), row
    if problem.kind == "choice":
      assert "(A) " in problem.messages[-1]["content"]
      assert decide(problem, "(A)" if problem.answer == "A" else "(B)") == [True]
  assert seen == {"math", "exact", "choice", "code"}


def test_rows_are_the_same_only_if_all_their_columns_are():
  draw = random.Random(0)
  rows = [random_row(draw, LAYOUTS[0])[0] for _ in range(100)]
  rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
  for one in rows:
    others = draw.sample(rows, 10)
    for other in (one, *others):
      loaded = load_records([one, other], "rows", needs=("prompt",))
      assert loaded.duplicates == (one == other), (one, other)


TEXTS = st.lists(
  st.from_regex(r"[a-z]{2,6}( [a-z]{2,6})?|[1-9][0-9]{0,2}", fullmatch=True),
  min_size=2,
  max_size=5,
  unique=True,
)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
  TEXTS,
  st.randoms(use_true_random=False),
  st.sampled_from(["({}) {}", "{}. {}", "{}) {}", "{}: {}", ""]),
  st.sampled_from(["\n", " ", ", "]),
  st.sampled_from("A1ai"),
  st.booleans(),
)
def test_the_letter_of_a_choice_is_that_of_the_prompt(texts, draw, form, between, first, shuffled):
  """Or the row is refused: whatever the prompt lists, the right letter stands before the text."""
  right = draw.randrange(len(texts))
  listed = draw.sample(texts, len(texts)) if shuffled else texts
  names = {"A": "ABCDE", "a": "abcde", "1": "12345", "i": ["i", "ii", "iii", "iv", "v"]}[first]
  lines = between.join(form.format(name, x) for name, x in zip(names, listed, strict=False))
  columns = {"choices": texts, "options": texts} if draw.random() < 0.2 else {"choices": texts}
  row = {"prompt": f"Of 12 - 10 and no other, which?\n{lines}", "answer": texts[right], **columns}
  try:
    problem = to_problem(row, {}, "x.jsonl:1")
  except ValueError as error:
    assert form and (shuffled or first != "A"), error
    return
  assert problem.answer == "ABCDE"[right]
  stated = rf"(?i)(?<![\w]){problem.answer}[).:] {re.escape(texts[right])}(?!\w)"
  assert re.search(stated, problem.messages[-1]["content"]), problem


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text("0123456789abc -", max_size=5), st.characters(categories=["Cc", "Co", "Cf"]))
def test_an_answer_with_a_character_that_nobody_sees_is_refused(text, char):
  seen = char in "\t\n\r\u200c\u200d" or "\u0600" <= char <= "\u08e2" or char > "\U00011000"
  row = {"prompt": "q", "answer": f"1{text}{char}{text}2"}
  if not seen:
    with pytest.raises(ValueError, match="invisible character"):
      to_problem(row, {}, "x.jsonl:1")
