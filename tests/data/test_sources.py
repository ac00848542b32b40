"""Problems from files and datasets: layouts, malformed rows, duplicates, real data."""

import decimal
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gtpo_jax.data import readers
from gtpo_jax.data.layouts import parse_fields
from gtpo_jax.data.readers import is_source
from gtpo_jax.data.sources import load_records, load_source
from gtpo_jax.rewards import check_gold
from gtpo_jax.runtime.errors import UserError

REAL = Path(__file__).parents[3] / "shared" / "data"


def write(path, rows):
  data = b"".join(
    row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
  )
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return str(path)


def only(tmp_path, row, **options):
  (problem,) = load_source(write(tmp_path / "one.jsonl", [row]), **options).problems
  return problem


# --- layouts ---


def test_the_native_layout(tmp_path):
  row = {"id": 7, "prompt": "1+1?", "answer": 2, "kind": "last_number", "extra": {"hint": "two"}}
  problem = only(tmp_path, row)
  assert (problem.id, problem.answer, problem.kind) == ("7", "2", "last_number")
  assert problem.extra == {"hint": "two"}
  assert problem.messages == ({"role": "user", "content": "1+1?"},)
  chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
  assert only(tmp_path, {"prompt": chat, "answer": "2"}).messages == tuple(chat)


def test_the_layout_of_gsm8k(tmp_path):
  problem = only(tmp_path, {"question": "q", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"})
  assert (problem.id, problem.answer, problem.kind) == ("one.jsonl:1", "2", "math")
  assert problem.extra == {"solution": "1 + 1 = <<1+1=2>>2"}


def test_the_layout_of_math_and_aime(tmp_path):
  problem = only(tmp_path, {"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u"})
  assert problem.messages[0]["content"] == "p"
  assert (problem.id, problem.answer, problem.kind) == ("60", "204", "math")


def test_the_layout_of_humaneval(tmp_path):
  row = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "  return 1",
    "test": "def check(c): pass",
  }
  problem = only(tmp_path, row)
  assert (problem.id, problem.kind) == ("HumanEval/0", "code")
  assert problem.extra == row


def test_the_layouts_of_mbpp(tmp_path):
  tests = ["assert f() == 1"]
  problem = only(tmp_path, {"task_id": 3, "text": "Write f.", "code": "x", "test_list": tests})
  assert (problem.id, problem.kind) == ("3", "code")
  assert problem.extra == {"task_id": 3, "code": "x", "test_list": tests}
  row = {
    "task_id": 3,
    "prompt": "Write f.",
    "test_list": ["assert f() == math.pi"],
    "test_imports": ["import math"],
  }
  assert only(tmp_path, row).extra["test_imports"] == ["import math"]


def test_the_layout_of_programs_that_read_and_print(tmp_path):
  cases = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
  row = {
    "problem_id": 9,
    "question": "Double it.",
    "input_output": cases,
    "solutions": "[]",
    "difficulty": "easy",
  }
  problem = only(tmp_path, row)
  others = {key: value for key, value in row.items() if key != "question"}
  assert (problem.id, problem.kind, problem.extra) == ("9", "code", others)
  with pytest.raises(UserError, match="has no tests"):
    only(tmp_path, {"question": "Double it.", "input_output": ""})


def test_a_parquet_row_that_is_not_utf8_is_one_bad_row(tmp_path):
  import pyarrow
  import pyarrow.parquet

  texts = [b"q1", b"\xff\xfe", b"q3"]
  offsets = bytes([0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 6, 0, 0, 0])
  buffers = (pyarrow.py_buffer(data) for data in (offsets, b"".join(texts)))
  prompts = pyarrow.StringArray.from_buffers(3, *buffers)
  table = pyarrow.table({"prompt": prompts, "answer": ["1", "2", "3"]})
  file = tmp_path / "d.parquet"
  pyarrow.parquet.write_table(table, file)
  with pytest.raises(UserError, match=r"d.parquet:2: .*utf-8"):
    load_source(str(file))
  loaded = load_source(str(file), bad_rows=1)
  assert [p.answer for p in loaded.problems] == ["1", "3"]
  assert len(loaded.bad) == 1


def test_numbers_of_parquet_keep_the_digits_that_were_written(tmp_path):
  """Also of 32 and 16 bits, in nested columns; a null kind is an absent one."""
  import pyarrow
  import pyarrow.parquet

  file = tmp_path / "d.parquet"
  texts = ["0.1", "2.5", "1234.5"]
  floats = [float(text) for text in texts]
  cents = [decimal.Decimal(text) for text in texts]
  kinds = ("float16", "float32", "float64")
  columns = {kind: pyarrow.array(floats, pyarrow.float64()).cast(kind) for kind in kinds}
  columns["float16"] = pyarrow.array(np.float16(floats))
  columns["decimal"] = pyarrow.array(cents, pyarrow.decimal128(10, 2))
  columns["int8"] = pyarrow.array([1, 2, 3], pyarrow.int8())
  expected = dict.fromkeys(kinds[1:], texts)
  expected |= {"float16": ["0.1", "2.5", "1234.0"], "int8": ["1", "2", "3"]}
  expected |= {"decimal": ["0.10", "2.50", "1234.50"]}
  for name, answers in columns.items():
    table = {
      "prompt": ["q1", "q2", "q3"],
      "answer": answers,
      "kind": pyarrow.array(["exact", None, None], pyarrow.string()),
      "extra": [{"near": [x, None], "unit": "m"} for x in answers.to_pylist()],
    }
    extra = pyarrow.struct({"near": pyarrow.list_(answers.type), "unit": pyarrow.string()})
    table["extra"] = pyarrow.array(table["extra"], extra)
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    problems = load_source(str(file), check=check_gold).problems
    assert [problem.answer for problem in problems] == expected[name], name
    assert [problem.kind for problem in problems] == ["exact", "math", "math"]
    if name == "float32":
      assert [problem.extra["near"] for problem in problems] == [[x, None] for x in floats]
    assert problems[0].extra["unit"] == "m"


def test_numbers_of_arrays_and_of_python_programs():
  """Of TFDS, and in rows from Python."""
  values = {"x": np.float32(0.1), "y": np.float32([[0.1, 2.5]]), "z": [np.float16(0.1), b"t"]}
  assert readers._plain(values) == {"x": 0.1, "y": [[0.1, 2.5]], "z": [0.1, "t"]}
  assert readers._plain({"i": np.int64(3), "d": np.float64(0.1)}) == {"i": 3, "d": 0.1}
  numbers = (np.float32(0.1), np.int64(5), decimal.Decimal("1E+3"), 0.1)
  rows = [{"prompt": f"q{i}", "answer": value} for i, value in enumerate(numbers)]
  assert [p.answer for p in load_records(rows, "rows").problems] == ["0.1", "5", "1000", "0.1"]
  for value in (np.bool_(True), np.float32("nan"), decimal.Decimal("Infinity")):
    with pytest.raises(UserError, match="has no answer"):
      load_records([{"prompt": "q", "answer": value}], "rows")


def test_rows_without_a_kind_are_checked_as_the_kind_that_they_get(tmp_path):
  """Words are `exact`, which holds longer ones than `math` does. The limit covers all bad rows."""
  rows = [{"prompt": "q", "answer": "wort " * 300}, {"prompt": "p", "answer": "ja"}]
  loaded = load_source(write(tmp_path / "data.jsonl", rows), check=check_gold)
  assert {problem.kind for problem in loaded.problems} == {"exact"} and not loaded.bad
  bad = [{"prompt": "r", "answer": r"\text{}"}, {"prompt": "s", "answer": "k", "kind": "choice"}]
  file = write(tmp_path / "bad.jsonl", [{"prompt": "p", "answer": "7"}, *bad])
  loaded = load_source(file, bad_rows=2, check=check_gold)
  assert len(loaded.problems) == 1 and len(loaded.bad) == 2
  with pytest.raises(UserError, match=r"bad.jsonl:2: .* is empty without .*2 malformed row"):
    load_source(file, bad_rows=1, check=check_gold)
  with pytest.raises(UserError, match="contains no problem"):
    load_source(write(tmp_path / "none.jsonl", bad), bad_rows=2, check=check_gold)


def test_a_hugging_face_dataset_in_a_local_folder(tmp_path, monkeypatch):
  """Loads it with the datasets library and a split, like a dataset of the hub."""
  pytest.importorskip("datasets")
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  (tmp_path / "set").mkdir()
  write(tmp_path / "set" / "train.jsonl", [{"question": "q1", "answer": "a #### 1"}])
  write(
    tmp_path / "set" / "test.jsonl",
    [{"question": "q2", "answer": "b #### 2"}, {"question": "q3", "answer": "#### 3"}],
  )
  loaded = load_source(f"hf:{tmp_path / 'set'}:test")
  pairs = [(p.messages[0]["content"], p.answer) for p in loaded.problems]
  assert pairs == [("q2", "2"), ("q3", "3")]
  assert [p.answer for p in load_source(f"hf:{tmp_path / 'set'}").problems] == ["1"]

  import pyarrow
  import pyarrow.parquet

  answers = pyarrow.array([0.1], pyarrow.float32())
  (tmp_path / "floats").mkdir()
  table = pyarrow.table({"prompt": ["q"], "answer": answers})
  pyarrow.parquet.write_table(table, tmp_path / "floats" / "train.parquet")
  assert [p.answer for p in load_source(f"hf:{tmp_path / 'floats'}").problems] == ["0.1"]


def test_the_layout_of_verl_with_every_row_repeated(tmp_path):
  """As in DAPO-Math-17k, the prompt is a list and the gold answer is in reward_model."""
  import pyarrow
  import pyarrow.parquet

  row = lambda i: {
    "data_source": "math_dapo",
    "prompt": [{"content": f"Solve {i}.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": f"id-{i}"},
  }
  table = pyarrow.Table.from_pylist([row(i) for i in range(5)] * 100)
  pyarrow.parquet.write_table(table, tmp_path / "dapo.parquet")
  loaded = load_source(str(tmp_path / "dapo.parquet"))
  assert [p.id for p in loaded.problems] == [f"id-{i}" for i in range(5)]
  assert [p.answer for p in loaded.problems] == list("01234")
  assert (loaded.rows, loaded.duplicates) == (500, 495)
  assert loaded.summary("dapo") == (
    "dapo: 5 problems of 500 rows, 495 duplicates dropped, columns that nothing reads: data_source"
  )


def test_columns_of_other_names(tmp_path):
  row = {"instruction": "q", "meta": {"gold": "5"}, "sort": "last_number"}
  fields = "prompt=instruction, answer=meta.gold, kind=sort"
  columns = "prompt=instruction,answer=meta.gold"
  assert only(tmp_path, row, fields=fields).kind == "last_number"
  assert only(tmp_path, row, fields=columns + ",kind=countdown").kind == "countdown"
  assert only(tmp_path, row, fields=columns).kind == "math"
  for bad in ("prompt=instruction", "prompt=,answer=x", "prompt=a,answer=b,colour=c"):
    with pytest.raises(UserError, match=r"data\.fields must name prompt and answer"):
      only(tmp_path, row, fields=bad)
  with pytest.raises(UserError, match=r"has no column 'meta\.silver'"):
    only(tmp_path, row, fields="prompt=instruction,answer=meta.silver")


def test_folders_and_compressed_files(tmp_path):
  write(tmp_path / "b.jsonl.gz", [{"prompt": "b", "answer": "2"}])
  write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}])
  (tmp_path / "notes.txt").write_text("no data")
  assert [p.messages[0]["content"] for p in load_source(str(tmp_path)).problems] == ["a", "b"]


# --- malformed rows ---


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (b"{broken\n", "Expecting property name"),
    (b"[1, 2]\n", "must be a JSON object, got list"),
    (b'{"prompt": "\xff"}\n', "can't decode byte 0xff"),
    (b'{"prompt": "\\ud800", "answer": "1"}\n', "surrogates not allowed"),
    ({"prompt": "", "answer": "1"}, "empty user message"),
    ({"prompt": 5, "answer": "1"}, "neither text nor messages"),
    ({"prompt": [], "answer": "1"}, "neither text nor messages"),
    ({"prompt": "q", "answer": None}, "has no answer: None"),
    ({"prompt": "q", "answer": " "}, "has no answer"),
    ({"prompt": "q", "answer": True}, "has no answer: True"),
    ({"colour": 1}, "has the columns colour, no known layout"),
    (b"[" * 100_000 + b"\n", "recursion"),
    ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "empty user message"),
    (
      {"prompt": [{"role": "user", "content": [1]}], "answer": "1"},
      "user message that is not text",
    ),
    (
      {"prompt": [{"role": "user\n", "content": "q"}], "answer": "1"},
      "the role 'user\\n', which is",
    ),
    ({"prompt": [{"role": "im_end", "content": "q"}], "answer": "1"}, "none of system, developer"),
    ({"prompt": [{"role": "\ud800", "content": "q"}], "answer": "1"}, "the role '\\ud800'"),
    ({"prompt": [{"role": 5, "content": "q"}], "answer": "1"}, "the role 5"),
    ({"prompt": [{"role": None, "content": "q"}], "answer": "1"}, "the role None"),
    ({"prompt": "q", "answer": "\ud800"}, "surrogates not allowed"),
    (b'{"prompt": "q", "answer": NaN}\n', "has no answer: nan"),
    (b'{"prompt": "q", "answer": 1e999}\n', "has no answer: inf"),
    (b'{"prompt": "q", "answer": ' + b"9" * 5000 + b"}\n", "4300 digits"),
    ({"prompt": "q", "answer": "1", "id": "a\ud800"}, "character in its id that is not valid"),
    ({"prompt": "q", "answer": "1", "id": [1]}, "has an id that is neither text nor a number"),
    ({"prompt": "q", "answer": "1", "kind": ["math"]}, "has a kind that is not text"),
    ({"prompt": "q", "answer": "1", "extra": "text"}, "has an extra that is not an object"),
    ({"prompt": "q", "answer": "1", "extra": [1, 2]}, "has an extra that is not an object"),
    ({"prompt": "q", "answer": "1", "extra": 0.5}, "has an extra that is not an object"),
    (
      b'{"prompt":"q","answer":"1","extra":' + b'{"a":' * 99 + b"1" + b"}" * 100 + b"\n",
      "32 levels",
    ),
    (b'{"prompt":' + b"[" * 500 + b"]" * 500 + b',"answer":"1"}\n', "neither text nor messages"),
    ({"prompt": "q", "reward_model": "1"}, "has no column 'reward_model.ground_truth'"),
    ({"question": "q", "answer": {"a": 1}}, "has no answer: {'a': 1}"),
    (b'{"prompt": "q", "answer": "1", "answer": "2"}\n', "has the key 'answer' twice"),
    (b'{"prompt": "q", "answer": "1", "extra": {"a": 1, "a": 2}}\n', "has the key 'a' twice"),
    (
      {"prompt": "q", "answer": "A", "choices": ["x", "y"], "options": ["y", "x"]},
      "has choices and options that differ: ['x', 'y'] and ['y', 'x']",
    ),
    ({"prompt": "q", "answer": "A", "choices": ["x", "x"]}, "has the choice 'x' twice"),
    (
      {"prompt": "Which?\n(A) red\n(B) blue", "answer": "blue", "choices": ["blue", "red"]},
      "lists its choices as B, A in its prompt, but its column has them as A, B",
    ),
    (
      {"prompt": "Which?\n1. red\n2. blue", "answer": "blue", "choices": ["red", "blue"]},
      "lists its choices as 1, 2 in its prompt",
    ),
    (
      {"prompt": '[{"role": "user", "content": "q"}]', "answer": "1"},
      "has a conversation that is JSON text",
    ),
    ({"prompt": "{'role': 'user', 'content': 'q'}", "answer": "1"}, "that is JSON text"),
    (
      {"prompt": [{"role": "user", "content": "q", "images": ["a.png"]}], "answer": "1"},
      "has a message with images, which would be lost",
    ),
    (
      {
        "prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "1"}],
        "answer": "1",
      },
      "has a prompt that ends with a turn of the assistant, which the model is to write; leave it",
    ),
    ({"prompt": "q", "answer": "A", "choices": ["x", " "]}, "has a choice without text"),
    (
      {"prompt": "q", "answer": "5", "solution": r"\boxed{6}"},
      "has the answer '5', but solution =",
    ),
    (
      {"prompt": "q", "answer": "1", "images": ["a.png"]},
      "has a column 'images', which its prompt",
    ),
    ({"prompt": "q", "answer": "A", "answerKey": "B", "choices": ["x", "y"]}, "answerKey = 'B'"),
    ({"prompt": "q", "answer": "A", "answer_idx": 2, "choices": ["x", "y", "z"]}, "answer_idx = 2"),
    ({"question": "q", "answer": "5", "final_answer": 6}, "has the answer '5', but final_answer ="),
    (
      {"prompt": "q", "answer": "5", "reward_model": {"ground_truth": "6"}},
      "has the answer '6', but answer = '5'",
    ),
    ({"prompt": "q", "answer": "\ue0005"}, "has the invisible character U+E000 in its answer"),
    ({"prompt": "q", "answer": "\xad5"}, "has the invisible character U+00AD in its answer"),
    ({"prompt": "q", "answer": "\ufeff1"}, "has the invisible character U+FEFF in its answer"),
    ({"prompt": "q", "answer": "1\u200b2"}, "has the invisible character U+200B in its answer"),
    ({"prompt": "q", "answer": "\u202e21"}, "has the invisible character U+202E in its answer"),
    ({"text": None, "test_list": ["assert 1"]}, "neither text nor messages: None"),
    ({"\x1b[2J": 1, "x" * 999: 2}, "has the columns '\\x1b[2J', xxx"),
  ],
)
def test_a_malformed_row_is_skipped_up_to_the_limit_and_named(tmp_path, row, message):
  first = {"prompt": "q", "answer": "1"}
  last = {"prompt": "q2", "answer": "1"}
  file = write(tmp_path / "data.jsonl", [first, row, last])
  with pytest.raises(UserError) as caught:
    load_source(file)
  text = str(caught.value)
  assert "\n" not in text
  for part in ("data.jsonl:2: ", message, "data.bad_rows = 0 allowed"):
    assert part in text
  loaded = load_source(file, bad_rows=1)
  assert len(loaded.problems) == 2
  (bad,) = loaded.bad
  assert bad.split(": ")[0].endswith("data.jsonl:2")
  assert "1 skipped, first" in loaded.summary("data")


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (
      {"prompt": "q", "answer": "1", "kind": "poetry"},
      "is of kind 'poetry', which has no verifier",
    ),
    ({"prompt": "q", "answer": "one", "kind": "last_number"}, "'one' does not consist of digits"),
    ({"prompt": "q", "answer": "5", "kind": "countdown"}, "extra.numbers is not a list"),
    ({"prompt": "q", "answer": "1", "kind": "code"}, "tests are missing: it has no entry_point"),
    ({"text": "q", "task_id": 3, "test_list": 7}, "a test_list that is not a list of tests"),
    ({"text": "q", "task_id": 3, "test_list": None}, "a test_list that is not a list of tests"),
    ({"text": "q", "task_id": 3, "test_list": [1, 2]}, "is not text, but int"),
    (
      {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["1"], "outputs": ["2"]}'},
      "has the key 'outputs' twice",
    ),
    ({"question": "q", "input_output": "{'inputs'"}, "an input_output that is not valid JSON"),
    ({"question": "q", "input_output": '{"inputs": ["1"], "outputs": []}'}, "without lists of"),
    (
      {"question": "q", "input_output": {"inputs": ["1"], "outputs": ["1", "2"]}},
      "with 1 inputs and",
    ),
    (
      {"prompt": [{"role": "user", "content": "q"}], "test": "t", "entry_point": "f"},
      "has a prompt that is not text, but list",
    ),
  ],
)
def test_a_row_that_no_verifier_can_check_is_malformed(tmp_path, row, message):
  """With a user's verifier, which decides itself what it needs, the row is accepted."""
  other = {"prompt": "other", "answer": "1"}
  file = write(tmp_path / "data.jsonl", [other, row])
  with pytest.raises(UserError) as caught:
    load_source(file, check=check_gold)
  text = str(caught.value)
  assert "\n" not in text
  for part in ("data.jsonl:2: ", message, "data.bad_rows = 0 allowed"):
    assert part in text
  loaded = load_source(file, bad_rows=1, check=check_gold)
  assert (len(loaded.problems), len(loaded.bad)) == (1, 1)
  assert len(load_source(file).problems) == 2


def test_a_byte_order_mark_is_ignored(tmp_path):
  """Also in the middle, where files were concatenated."""
  row = b'\xef\xbb\xbf{"prompt": "q%d", "answer": "1"}\n'
  file = write(tmp_path / "data.jsonl", [row % 1, row % 2, b"\xef\xbb\xbf\n"])
  loaded = load_source(file)
  assert [p.messages[0]["content"] for p in loaded.problems] == ["q1", "q2"]
  assert loaded.rows == 2


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch):
  monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1 << 20)
  row = {"prompt": "q", "answer": "1"}
  file = write(tmp_path / "data.jsonl", [b"x" * (5 << 20) + b"\n", row, b"y" * (1 << 20)])
  loaded = load_source(file, bad_rows=2)
  assert [p.location for p in loaded.problems] == [f"{file}:2"]
  assert loaded.bad == (f"{file}:1: is longer than 1 MiB", f"{file}:3: is longer than 1 MiB")


def test_a_damaged_compressed_file_is_one_line(tmp_path):
  """Each byte of the file is damaged in turn."""
  file = tmp_path / "data.jsonl.gz"
  whole = gzip.compress(b'{"prompt": "q", "answer": "1"}\n' * 3, mtime=0)
  for position in range(len(whole)):
    file.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
    try:
      load_source(str(file))
    except UserError as error:
      assert "\n" not in str(error)


def test_the_name_of_a_file_cannot_break_a_message(tmp_path):
  file = write(tmp_path / "a\nb\x1b[2J.jsonl", [b"{"])
  with pytest.raises(UserError) as caught:
    load_source(file)
  assert str(caught.value).isprintable()


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("d.xlsx", b"PK", "is a file of the form .xlsx; write one JSON object"),
    ("d.json", b'[{"prompt": "q", "answer": "1"}]', "is one JSON array; write one JSON object"),
    ("d.jsonl", b'[\n  {"prompt": "q", "answer": "1"}\n]\n', "is one JSON array; write one"),
  ],
)
def test_files_of_other_forms_are_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  assert is_source(name)
  with pytest.raises(UserError) as caught:
    load_source(str(tmp_path / name), bad_rows=9)
  assert message in str(caught.value) and "pd.read_" in str(caught.value)
  (tmp_path / "lines.json").write_text('{"prompt": "q", "answer": "1"}\n')
  assert len(load_source(str(tmp_path / "lines.json")).problems) == 1


def test_tables(tmp_path):
  """Values are texts as they are written; commas and lines may be quoted."""
  file = tmp_path / "d.csv"
  file.write_bytes(
    b'\xef\xbb\xbfprompt,answer,level\n"1,0 +\n1?",007,3\n\nq,,4\nx\ny,\xff,1\nz,2.50,"5"\n'
  )
  loaded = load_source(str(file), bad_rows=3)
  assert [(p.messages[0]["content"], p.answer, p.extra) for p in loaded.problems] == [
    ("1,0 +\n1?", "007", {"level": "3"}),
    ("z", "2.50", {"level": "5"}),
  ]
  assert [row.partition(": ")[0].rpartition(":")[2] for row in loaded.bad] == ["5", "6", "7"]
  assert loaded.bad[1].endswith("has 1 values for 3 columns")
  (tmp_path / "d.tsv").write_text("prompt\tanswer\na, b\t1\n")
  assert load_source(str(tmp_path / "d.tsv")).problems[0].messages[0]["content"] == "a, b"
  assert len(load_source(str(tmp_path), bad_rows=3).problems) == 3
  file.write_text("prompt,prompt\na,1\n")
  with pytest.raises(
    UserError, match=r"first row of .*d.csv' must name each column once, got \['pr"
  ):
    load_source(str(file))


def test_blank_lines_are_not_rows(tmp_path):
  rows = [b"\n", {"prompt": "q", "answer": "1"}, b"  \n"]
  loaded = load_source(write(tmp_path / "data.jsonl", rows))
  assert loaded.rows == 1 and loaded.problems[0].id == "data.jsonl:2"


@pytest.mark.parametrize(
  "make",
  [
    lambda path: write(path / "empty.jsonl", []),
    lambda path: str(path / "none.jsonl"),
    lambda path: str(path),
    lambda path: write(path / "x.parquet", [b"no parquet"]),
    lambda path: write(path / "cut.jsonl.gz", [])[:-3] + ".gz",
  ],
)
def test_sources_without_problems_are_rejected(tmp_path, make):
  with pytest.raises(UserError) as caught:
    load_source(make(tmp_path))
  assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_truncated_archive_is_rejected(tmp_path):
  complete = gzip.compress(json.dumps({"prompt": "q" * 10_000, "answer": "1"}).encode() * 50)
  (tmp_path / "cut.jsonl.gz").write_bytes(complete[:-20])
  with pytest.raises(UserError, match=r"cut\.jsonl\.gz"):
    load_source(str(tmp_path / "cut.jsonl.gz"))


def test_same_question_other_answer_is_no_duplicate(tmp_path):
  rows = [{"prompt": "q", "answer": answer} for answer in ("1", "2", "1")]
  loaded = load_source(write(tmp_path / "data.jsonl", rows))
  assert [p.answer for p in loaded.problems] == ["1", "2"]
  assert loaded.duplicates == 1


@pytest.mark.parametrize(
  "name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "hf:x", "tfds:gsm8k", "folder/here"]
)
def test_names_of_sources(name):
  assert is_source(name)


@pytest.mark.parametrize("name", ["sums", "countdown"])
def test_names_of_tasks(name):
  assert not is_source(name)


def test_datasets_that_do_not_exist_are_rejected():
  for name in ("hf:nobody/nothing", "tfds:no_such_dataset", "hf:a:b:c:d", "tfds:"):
    with pytest.raises(UserError) as caught:
      load_source(name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


# --- real data ---


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data is not here")
@pytest.mark.parametrize(
  ("name", "count", "kind", "first"),
  [
    ("gsm8k_train", 7473, "math", "72"),
    ("gsm8k_test", 1319, "math", "18"),
    ("aime24", 30, "math", "204"),
    ("HumanEval", 164, "code", "has_close_elements"),
  ],
)
def test_real_files(name, count, kind, first):
  loaded = load_source(str(REAL / f"{name}.jsonl.gz"), check=check_gold)
  assert (len(loaded.problems), loaded.duplicates, loaded.bad) == (count, 0, ())
  assert {problem.kind for problem in loaded.problems} == {kind}
  assert loaded.problems[0].answer == first
  assert len({problem.id for problem in loaded.problems}) == count


@pytest.mark.parametrize(
  ("number", "answer"),
  [
    ("1234567890123456789012345678.5", "1234567890123456789012345678.5"),
    ("123456789012345678901234567890", "123456789012345678901234567890"),
    ("0.1", "0.1"),
    ("2.50", "2.5"),
    ("0.1234567890123456789", "0.1234567890123456789"),
  ],
)
def test_a_number_of_json_keeps_its_digits(tmp_path, number, answer):
  file = write(tmp_path / "data.jsonl", [f'{{"prompt": "q", "answer": {number}}}\n'.encode()])
  (problem,) = load_source(file).problems
  assert problem.answer == answer


@pytest.mark.parametrize(
  ("prompt", "choices", "is_added"),
  [
    ("What is 12 - 10?", ["3", "2", "10", "12"], True),
    ("Do you know?", ["no", "know"], True),
    ("Which? red, blue", ["red", "blue"], False),
    ("Which?\n(A) red\n(B) blue", ["red", "blue"], False),
    ("Which?\nA. red\nB. blue", ["red", "blue"], False),
  ],
)
def test_choices_are_added_unless_the_prompt_lists_them(tmp_path, prompt, choices, is_added):
  row = {"prompt": prompt, "answer": "A", "choices": choices}
  (problem,) = load_source(write(tmp_path / "data.jsonl", [row])).problems
  assert (problem.messages[-1]["content"] != prompt) is is_added


@pytest.mark.parametrize(
  "fields", ["prompt=a,answer=a", "prompt=a,prompt=b,answer=c", "prompt=a,answer=b,answer=c"]
)
def test_fields_that_name_a_column_or_a_field_twice_are_refused(fields):
  with pytest.raises(UserError, match="name each field once, and prompt and answer as two columns"):
    parse_fields(fields)
