"""Problems of reasoning-gym: rows, knobs, scores, and verdicts that equal those of the library."""

import importlib.util
import json
import re
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from gtpo_jax.config.data_sections import RewardSection
from gtpo_jax.data.readers import is_source
from gtpo_jax.data.sources import load_records, load_source
from gtpo_jax.rewards import check_gold, score, verify
from gtpo_jax.rewards.gym import library
from gtpo_jax.rewards.gym.rows import NO_ANSWER, task_names
from gtpo_jax.rewards.gym.scores import MAX_ANSWER_BYTES, answer_of, gym_scores
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.installing import MissingPackage

HAS_LIBRARY = importlib.util.find_spec("reasoning_gym") is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="reasoning-gym is not installed")
ENTRY = {"question": "q", "answer": "3", "metadata": {}}
EXTRA = {"task": "chain_sum", "knobs": {}, "entry": ENTRY}
# Answers that no scorer may accept, run as code, or die of.
HOSTILE = [
  "",
  " ",
  "-",
  "nan",
  "inf",
  "1e999",
  "None",
  "True",
  "[]",
  "{}",
  "null",
  "(1, 2)",
  "[[1]]",
  '"',
  "[" * 3000,
  "(" * 500,
  "0" * 4000,
  "\0",
  "𝔘ñï¢ø∂é ½ ٣",
  "x" * 5000,
  "a=b=c",
  "\n\n\n",
  "1/0",
  "<answer>3",
  "__import__('os').getcwd()",
  "open('/etc/hostname').read()",
]


def load(name, **settings):
  return load_source(name, check=check_gold, **settings).problems


@pytest.mark.parametrize(
  ("text", "auto", "tag", "boxed", "line"),
  [
    ("so <answer> 3 </answer>", "3", "3", "3", "3"),
    ("<answer>3</answer> no, <answer>a\nb</answer>", "a\nb", "a\nb", "a\nb", "a b"),
    ("<answer>3</answer> <answer>4", "3", "3", "3", "3"),
    ("<answer>4", "4", None, "4", "4"),
    (r"\boxed{a b}", "a b", None, "a b", "a b"),
    (r"<answer>c</answer> \boxed{a b}", "c", "c", "c", "c"),
    (r"<answer>\boxed{c}</answer>", r"\boxed{c}", r"\boxed{c}", "c", "c"),
    ("the sum is 12", "12", None, "12", "the sum is 12"),
    ("<answer></answer> 12", "", "", "", None),
    ("I do not know", None, None, None, "I do not know"),
    ("Let me see.\n\n**Yes**.\n", None, None, None, "Yes"),
    ("2 of them:\nAnswer: red, blue", "red, blue", None, "red, blue", "red, blue"),
    (" \n", None, None, None, None),
  ],
)
def test_where_the_answer_is(text, auto, tag, boxed, line):
  modes = ("auto", "tag", "boxed", "line")
  assert [answer_of(text, mode) for mode in modes] == [auto, tag, boxed, line]


def test_many_tags_are_read_in_linear_time():
  began = time.perf_counter()
  answer_of("<answer>" * 50_000)
  assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
  ("extra", "message"),
  [
    ({}, "no extra.task and extra.entry"),
    (EXTRA | {"entry": "3"}, "no extra.task and extra.entry"),
    (EXTRA | {"entry": {"answer": "3"}}, "entry has no answer and metadata"),
    (EXTRA | {"entry": {"metadata": {}}}, "entry has no answer and metadata"),
    (EXTRA | {"knobs": {"a": 3}}, "its knobs are not lists of texts"),
  ],
)
def test_entries_that_cannot_be_scored_are_refused(extra, message):
  with pytest.raises(ValueError, match=message):
    check_gold("reasoning_gym", "3", extra)


def test_a_missing_library_is_one_line(monkeypatch):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else found(name)
  )
  for read in (
    lambda: load("rg:countdown"),
    lambda: load_records(
      [{"prompt": "q", "answer": "3", "kind": "reasoning_gym", "extra": EXTRA}],
      "rows",
      bad_rows=9,
      check=check_gold,
    ),
  ):
    with pytest.raises(MissingPackage, match=r"needs reasoning-gym: .*pip install") as caught:
      read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("texts", "kind", "default", "value"),
  [
    (["3"], int, 1, 3),
    (["0.5"], float, 1.0, 0.5),
    (["true"], bool, False, True),
    (["False"], bool, True, False),
    (["a b"], str, "", "a b"),
    (["+", "-"], tuple, ("*",), ("+", "-")),
    (["2"], list[int], [1], [2]),
    (["0.1", "0.9"], list[float], [1.0], [0.1, 0.9]),
    (["none"], int | None, 3, "none"),
  ],
)
def test_values_of_knobs(texts, kind, default, value):
  if value == "none":
    import typing

    assert library._value(typing.Optional[int], texts, default) is None  # noqa: UP045
    assert library._value(typing.Optional[int], ["4"], default) == 4  # noqa: UP045
    return
  assert library._value(kind, texts, default) == value
  assert type(library._value(kind, texts, default)) is type(value)


@pytest.mark.parametrize(
  ("texts", "kind", "message"),
  [(["x"], int, "invalid literal"), (["1"], bool, "True, False"), (["1", "2"], int, "one value")],
)
def test_bad_values_of_knobs(texts, kind, message):
  with pytest.raises(ValueError, match=message):
    library._value(kind, texts, None)


@pytest.mark.parametrize(
  ("name", "answer", "plain"),
  [
    ("countdown", "94*4 - (61 + 6)", True),
    ("countdown", "12/4.5", True),
    ("simple_integration", "x**2/2 + exp(2*x) + C", True),
    ("countdown", "open(chr(47))", False),
    ("countdown", "x.real", False),
    ("countdown", "'3'", False),
    ("countdown", "__import__", False),
    ("puzzle24", "exit()", False),
    ("puzzle24", "[1][0]", False),
    ("chain_sum", "open(3)", True),  # is only compared
  ],
)
def test_only_plain_expressions_reach_a_parser(name, answer, plain):
  assert library._is_plain(name, answer, ENTRY) == plain


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("rg:countdwn", "unknown task 'countdwn', did you mean 'countdown'"),
    ("rg:composite", "unknown task 'composite'"),
    ("rg:countdown?max_nums=3", "unknown knob 'max_nums'; valid are max_numbers, max_target"),
    ("rg:countdown?max_numbers=1", "max_numbers must be >= min_numbers"),
    ("rg:countdown?max_numbers=x", "max_numbers = 'x' is refused: invalid literal"),
    ("rg:countdown?size=0", "needs a whole number of at least 1 for size, got '0'"),
    ("rg:countdown?part=test", "needs train or held_out for part, got 'test'"),
    ("rg:countdown?seed=-1", "needs a whole number of at least 0 for seed, got '-1'"),
    ("rg:countdown?size=1&size=2", "for size, got '1, 2'"),
    ("rg:time_intervals?min_date=3", "a value of type date cannot be set here"),
  ],
)
def test_names_and_knobs_that_are_refused(name, message):
  assert is_source(name)
  with pytest.raises(UserError, match=message) as caught:
    load(name)
  assert "\n" not in str(caught.value)


@needs_library
def test_rows_and_scores_of_a_task():
  plus = quote("+")
  name = f"rg:countdown?size=4&seed=3&max_numbers=4&operators={plus}&operators=-"
  problems = load(name, fields="prompt=a,answer=b")
  assert [problem.id for problem in problems] == [f"countdown-{i}" for i in range(4)]
  problem = problems[0]
  assert problem.kind == "reasoning_gym" and problem.location.endswith(":0")
  assert set(problem.extra) == {"task", "knobs", "entry"}
  assert problem.extra["knobs"] == {"max_numbers": ["4"], "operators": ["+", "-"]}
  assert not set("*/") & set(problem.answer)
  tagged = [f"<answer>{answer}</answer>" for answer in (problem.answer, "1", "open()")]
  texts = [*tagged, "no"]
  extras = [problem.extra] * 4
  assert verify("reasoning_gym", texts, [""] * 4, extras) == [True, False, False, False]
  tag = RewardSection(gym_answer="tag")
  scores = score("reasoning_gym", texts, [""] * 4, extras, tag)
  assert scores == [(True, 1.0), (False, 0.05), (False, 0.0), (False, 0.0)]
  tower = ["<answer>9**9**9**9**9</answer>"]
  assert gym_scores(tower, extras[:1], timeout_s=1.0) == [None]
  assert verify("reasoning_gym", texts[:1], [""], extras[:1]) == [True]  # by another worker
  long = "<answer>" + "1" * MAX_ANSWER_BYTES + "</answer>"
  assert gym_scores([long], extras[:1]) == [0.0]


@needs_library
def test_parts_of_a_task_have_no_problem_in_common_whatever_their_seeds():
  knobs = "max_terms=2&max_digits=1"  # 200 problems in all
  train = load(f"rg:chain_sum?{knobs}&size=200&seed=1&part=train")
  held_out = load(f"rg:chain_sum?{knobs}&size=200&seed=2&part=held_out")
  assert len(train) > 80 and len(held_out) > 8
  assert not {x.messages[0]["content"] for x in train} & {
    x.messages[0]["content"] for x in held_out
  }
  both = load(f"rg:chain_sum?{knobs}&size=200&seed=1")
  rest = load(f"rg:chain_sum?{knobs}&size=200&seed=1&part=held_out")
  assert {x.id for x in both} == {x.id for x in [*train, *rest]}


@needs_library
@pytest.mark.slow
def test_scorers_know_the_knobs():
  """The library's own function for a task scores by its default knobs."""
  problems = load("rg:time_intervals?size=9&max_time_difference_seconds=600")
  (problem, *_) = [x for x in problems if x.extra["entry"]["metadata"]["task_type"] == "time"]
  answers = ["<answer>00:00</answer>"]
  known = gym_scores(answers, [problem.extra])
  default = gym_scores(answers, [problem.extra | {"knobs": {}}])
  assert known[0] < default[0] < 1


@needs_library
@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize("name", ["list_functions", "word_ladder", "knight_swap", "ransom_note"])
def test_rows_are_a_function_of_seed_and_index(name, monkeypatch):
  """Also where the library draws from sets, whose order differs between processes."""
  six = load(f"rg:{name}?size=6&seed=5")
  monkeypatch.setenv("PYTHONHASHSEED", "77")
  assert load(f"rg:{name}?size=3&seed=5") == six[:3]
  assert load(f"rg:{name}?size=3&seed=6") != six[:3]


def variants(answer):
  """Returns answers that resemble the right one."""
  return [
    f"{answer}",
    f" {answer}\n",
    f"{answer}.",
    f"**{answer}**",
    f"${answer}$",
    f"The answer is {answer}",
    f"{answer} {answer}",
    answer.upper(),
    answer.lower(),
    answer[: len(answer) // 2],
    answer[::-1],
    answer.replace(" ", ""),
    answer.replace("1", "2"),
    json.dumps(answer),
  ]


def compare(name):
  """Compares verdicts and scores of a task with those of the library."""
  from reasoning_gym.factory import get_score_answer_fn

  problems = load(f"rg:{name}?size=3&seed=11")
  reference = get_score_answer_fn(name)
  right = [problem.answer for problem in problems if problem.answer != NO_ANSWER]
  hits = 0
  for problem in problems:
    own = variants(problem.answer) if problem.answer != NO_ANSWER else []
    answers = [*own, *right, *HOSTILE, *variants(problem.messages[0]["content"][-40:])]
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    found = gym_scores(texts, [problem.extra] * len(texts), "tag", timeout_s=20.0)
    for answer, value in zip(answers, found, strict=True):
      answer = answer.strip()
      entry = json.loads(json.dumps(problem.extra["entry"]))
      if name in library.TUPLES:
        for key in ("input", "output"):
          entry["metadata"][key] = library._tuples(entry["metadata"][key])
      if not answer or not library._is_plain(name, answer, entry):
        assert value == 0
        continue
      try:
        expected = float(reference(answer, entry))
      except Exception:
        expected = None
      if value != expected:  # the library may evaluate an answer that is not a literal
        refused = value is None and expected < 1 - 1e-6
        assert refused or (value, expected) == (0, None), (name, answer, expected, value)
      hits += value is not None and value >= 1 - 1e-6
    if problem.answer != NO_ANSWER:
      assert found[0] == 1, name
  assert hits or not right, name
  assert np.isfinite([value for value in found if value is not None]).all()


SOME = (
  "arc_agi",
  "bf",
  "binary_matrix",
  "countdown",
  "graph_color",
  "n_queens",
  "rearc",
  "sokoban",
)


@needs_library
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::Warning")
def test_verdicts_equal_full_marks_of_the_library():
  for name in SOME:
    compare(name)


@needs_library
@pytest.mark.slow
def test_the_documentation_lists_every_task():
  text = Path(__file__).parents[2].joinpath("docs", "data.md").read_text()
  rows = text.split("| group | tasks |")[1].split("\n\n")[0]
  assert sorted(re.findall("`([^`]+)`", rows)) == sorted(task_names())
  assert set(importlib.import_module("reasoning_gym.factory").DATASETS) - set(task_names()) == {
    "composite"
  }


@needs_library
@pytest.mark.manual
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::Warning")
def test_verdicts_of_all_tasks_equal_full_marks_of_the_library():
  assert len(task_names()) == 105
  for name in task_names():
    compare(name)
