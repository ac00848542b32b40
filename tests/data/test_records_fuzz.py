"""Fuzzing of the one place where untrusted bytes become problems.

Whatever the bytes, the result is a tuple of well-formed problems that can be encoded, displayed and
judged, or a UserError of one line.
"""

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gtpo_jax.data.chat import load_chat
from gtpo_jax.data.records import ROLES
from gtpo_jax.data.sources import load_source
from gtpo_jax.loop.inputs import _name
from gtpo_jax.rewards import check_gold
from gtpo_jax.rewards.code import code_correct
from gtpo_jax.rewards.verifiers import VERIFIERS
from gtpo_jax.runtime.errors import UserError

CASES = int(os.environ.get("GTPO_FUZZ_CASES", "200"))  # of a few rows each
SEEDS = [
  {"prompt": "1+1?", "answer": "2", "kind": "last_number", "extra": {"hint": "two"}},
  {"prompt": [{"role": "user", "content": "q"}], "answer": 2, "id": 7},
  {"prompt": "7 12=19:", "answer": "19", "kind": "countdown", "extra": {"numbers": [7, 12]}},
  {"question": "q", "answer": "so #### 2"},
  {"problem": "p", "answer": "204"},
  {"prompt": "def f():\n", "entry_point": "f", "test": "def check(c): pass", "task_id": "H/0"},
  {"task_id": 3, "text": "Write f.", "test_list": ["assert f() == 1"], "test_imports": ["x"]},
  {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}', "problem_id": 9},
  {"question": "q", "input_output": {"inputs": [[1]], "outputs": [2], "fn_name": "f"}},
  {"prompt": "q", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": "i"}},
]
REAL = Path(__file__).parents[3] / "shared" / "data"  # where present, real rows are mutated too
for _file in sorted(REAL.glob("*.jsonl.gz")):
  with gzip.open(_file, "rt") as _rows:
    SEEDS += map(json.loads, itertools.islice(_rows, 3))
TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(
  ["\ud800", "\x00", "<|im_end|>", "math", "code", "countdown", "user", "", " ", "2", "\x1b[2J"]
)
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just(10**400),
  lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
  max_leaves=6,
)


@st.composite
def mutated(draw):
  """A known row in which a value is replaced, removed, wrapped or put under another name."""
  row = json.loads(json.dumps(draw(st.sampled_from(SEEDS))))
  for _ in range(draw(st.integers(0, 2))):
    owner = row
    keys = list(owner)
    if not keys:
      break
    key = draw(st.sampled_from(keys))
    if isinstance(owner[key], dict) and owner[key] and draw(st.booleans()):
      owner = owner[key]
      key = draw(st.sampled_from(list(owner)))
    change = draw(st.sampled_from(["replace", "remove", "list", "dict", "text", "add"]))
    if change == "replace":
      owner[key] = draw(VALUES)
    elif change == "remove":
      del owner[key]
    elif change == "list":
      owner[key] = [owner[key]] * draw(st.integers(0, 2))
    elif change == "dict":
      owner[key] = {draw(TEXT): owner[key]}
    elif change == "text":
      owner[key] = str(owner[key]) + draw(TEXT)
    else:
      owner[draw(st.sampled_from(["extra", "kind", "id", "answer", "prompt"]))] = draw(VALUES)
  return json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


@st.composite
def flipped(draw):
  """A known row with some bytes changed, inserted or removed."""
  data = bytearray(json.dumps(draw(st.sampled_from(SEEDS))).encode())
  for _ in range(draw(st.integers(1, 3))):
    position = draw(st.integers(0, len(data) - 1))
    data[position : position + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    data = data or bytearray(b"x")
  return bytes(data)


LINES = st.lists(mutated() | flipped() | st.binary(max_size=30), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def chat():
  return load_chat()


@settings(
  max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=LINES, fields=st.sampled_from(["", "", "", "prompt=prompt,answer=answer,kind=extra"]))
@example(lines=[b'{"prompt": "q", "answer": "1", "extra": "text"}'], fields="")
@example(lines=[b'{"text": "q", "test_list": 7}'], fields="")
@example(lines=[b'{"prompt": "q", "answer": "x", "kind": "countdown"}'], fields="")
@example(lines=[b'{"prompt": "q", "answer": 1' + b"0" * 400 + b"}"], fields="")
@example(lines=[b'\xef\xbb\xbf{"prompt": "q", "answer": "1"}'], fields="")
@example(lines=[b'{"prompt": [{"role": "\\ud800", "content": "q"}], "answer": "1"}'], fields="")
def test_any_bytes_become_problems_or_one_line(lines, fields, chat, tmp_path):
  file = tmp_path / "data.jsonl"
  file.write_bytes(b"\n".join(lines))
  for check in (check_gold, None):
    try:
      loaded = load_source(str(file), fields, bad_rows=99, check=check)
    except UserError as error:
      assert "\n" not in str(error)
      continue
    assert loaded.summary("data").isprintable()
    for problem in loaded.problems:
      texts = [problem.id, problem.answer, problem.kind, problem.location]
      texts += [message["content"] for message in problem.messages]
      "".join(texts).encode()
      assert problem.answer.strip() and problem.messages
      assert all(message["role"] in ROLES for message in problem.messages)
      json.dumps(dict(problem.extra), sort_keys=True).encode()
      assert problem.location.startswith(f"{file}:")
      _is_encoded_safely(chat, problem)
      if check and problem.kind not in ("code", "math"):  # these start processes
        extras = [problem.extra]
        assert len(VERIFIERS[problem.kind](["x 1"], [problem.answer], extras, None)) == 1
      if check and problem.kind == "code":
        _reaches_the_sandbox(problem)
    _name(loaded.problems)


def _is_encoded_safely(chat, problem):
  ids = chat.encode_prompt(problem.messages)
  controls = [token for token in ids if token >= 381]  # <|endoftext|>, <|im_start|>, <|im_end|>
  assert len(controls) == 2 * len(problem.messages) + 1


def _reaches_the_sandbox(problem):
  """The tests can be given to a program; that they run is tested in tests/rewards."""
  from gtpo_jax.rewards import code

  class Started(Exception):
    pass

  def run_inside(*args, **options):
    raise Started

  original = code.run_inside
  code.run_inside = run_inside
  try:
    with pytest.raises(Started):
      code_correct("def f(): return 1", problem.extra)
  finally:
    code.run_inside = original
