"""Log files are read back whatever they contain, and are whole after a repair."""

import json
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.log_files import LogFile, is_evaluation, is_metrics, is_sample, read_jsonl

CASES = int(os.environ.get("GTPO_FUZZ_CASES", "40"))
DEEP = b"[" * 100_000
DAMAGED_LINES = [
  b"\xff\xfe",
  DEEP,
  b'{"loss": 1.0}',
  b'{"step": -1}',
  b'{"step": true}',
  b'{"step": "3"}',
  b'{"step": 3.0}',
  b'{"step": 3, "loss": "text"}',
  b'{"step": 3, "loss": [1]}',
  b'{"step": 3, "lo',
  b"[1, 2]",
  b"null",
  b"3",
  b"\0" * 512,
]


def metrics(folder):
  return LogFile(folder / "metrics.jsonl", is_metrics)


def line(step, **more):
  return json.dumps({"step": step, "loss": step / 2, **more}).encode()


def write(file, *lines):
  file.path.write_bytes(b"".join(part + b"\n" for part in lines))


def steps(file):
  return [row["step"] for row in file.rows()]


@pytest.mark.parametrize("damaged", DAMAGED_LINES, ids=lambda data: repr(data[:20]))
@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_damaged_line_is_removed_and_said(damaged, position, tmp_path):
  file = metrics(tmp_path)
  lines = [line(step) for step in range(4)]
  write(file, *lines[:position], damaged, *lines[position:])
  assert steps(file) == [0, 1, 2, 3]
  repair = file.repair(3)
  assert repair.messages(range(4)) == ["metrics.jsonl had 1 damaged line(s), which were removed"]
  assert file.path.read_bytes() == b"".join(part + b"\n" for part in lines)
  assert file.repair(3).messages(range(4)) == []


def test_a_lost_line_is_named(tmp_path):
  file = metrics(tmp_path)
  write(file, line(0), b'{"step": 1, "lo', line(2), line(3))
  assert file.repair(3).messages(range(1, 4)) == [
    "metrics.jsonl had 1 damaged line(s), which were removed",
    "metrics.jsonl lacks step 1, which cannot be known again",
  ]
  write(file, line(0))
  (message,) = file.repair(20).messages(range(1, 21))
  assert "lacks steps 1, 2, 3, 4, 5, 6, 7, 8 and 12 more" in message


def test_each_step_is_there_once_and_in_order_and_the_last_row_wins(tmp_path):
  file = metrics(tmp_path)
  write(file, line(0), line(2), line(1), line(3), line(3, new=1), line(2, new=2), line(9))
  repair = file.repair(3)
  assert (repair.steps, repair.removed, repair.damaged) == ([0, 1, 2, 3], [9], 0)
  assert [(row["step"], row.get("new")) for row in file.rows()] == [
    (0, None),
    (1, None),
    (2, 2),
    (3, 1),
  ]


def test_samples_may_share_a_step_and_repeat_themselves(tmp_path):
  """A completion that was sampled twice in one step stays; a line that is there twice does not."""
  file = LogFile(tmp_path / "samples.jsonl", is_sample, per_step=2)
  sample = lambda step, text: json.dumps(
    {"step": step, "prompt": "p", "completion": text, "correct": True}
  ).encode()
  healthy = [sample(1, "a"), sample(1, "a"), sample(2, "b"), sample(2, "c")]
  write(file, *healthy)
  before = file.path.stat().st_mtime_ns
  assert file.repair(2).messages(range(1, 3)) == []
  assert file.path.stat().st_mtime_ns == before  # a healthy file is not written again
  write(file, *healthy, healthy[-1])
  file.repair(2)
  assert file.path.read_bytes().splitlines() == healthy
  write(file, *healthy[2:], *healthy[:2])
  file.repair(2)
  assert file.path.read_bytes().splitlines() == healthy


def test_a_folder_in_the_place_of_a_file_is_moved_aside(tmp_path):
  for name in ("metrics.jsonl", "metrics.jsonl.damaged"):
    (tmp_path / name).mkdir()
  file = metrics(tmp_path)
  assert read_jsonl(file.path) == []
  assert file.repair(2).messages(()) == [
    "metrics.jsonl was not a file and was renamed to metrics.jsonl.damaged.2"
  ]
  file.append({"step": 3})
  assert steps(file) == [3]


def test_a_row_is_inserted_before_later_steps(tmp_path):
  file = metrics(tmp_path)
  for step in (0, 3, 1):
    file.insert({"step": step})
  assert steps(file) == [0, 1, 3]


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
  max_leaves=8,
)
ROWS = st.fixed_dictionaries(
  {"step": st.integers(-1, 6) | JSON},
  optional={
    "loss": JSON,
    "prompt": JSON,
    "completion": st.text(),
    "correct": st.booleans() | JSON,
    "intervals": JSON,
    "eval/sums/mean@2": st.floats() | JSON,
  },
)
LINES = st.lists(
  st.binary(max_size=40) | (JSON | ROWS).map(lambda value: json.dumps(value).encode()), max_size=12
)
VALIDATORS = {
  "metrics.jsonl": (is_metrics, 1),
  "samples.jsonl": (is_sample, 2),
  "evaluations.jsonl": (is_evaluation, 1),
}


@settings(max_examples=CASES, deadline=None)
@given(lines=LINES, end=st.sampled_from([b"", b"\n", b"{", b"\xff"]), last=st.integers(0, 5))
@example(lines=[b"\xff"], end=b"", last=2)  # the first three: a traceback in earlier versions
@example(lines=[DEEP], end=b"\n", last=2)
@example(lines=[b'{"loss": 1.0}'], end=b"\n", last=2)
@example(lines=[line(1), line(2), line(2)], end=b"\n", last=2)
def test_any_bytes_become_whole_files(lines, end, last, tmp_path_factory):
  """The journal opens; every file then has valid rows in order, and opening again changes nothing.

  The rows of healthy steps before the restored one stay as they are.
  """
  folder = tmp_path_factory.mktemp("logs")
  data = b"\n".join(lines) + end
  for name in VALIDATORS:
    (folder / name).write_bytes(data)
  said = []
  Journal(folder, last, tensorboard=False, samples=2, say=said.append)
  contents = {}
  for name, (is_valid, per_step) in VALIDATORS.items():
    contents[name] = (folder / name).read_bytes()
    rows = [json.loads(text) for text in contents[name].split(b"\n") if text.strip()]
    assert all(map(is_valid, rows))
    found = [row["step"] for row in rows]
    assert found == sorted(found) and all(step <= last for step in found)
    if per_step == 1:
      assert len(found) == len(set(found))
  assert all("\n" not in message for message in said)
  journal = Journal(folder, last, tensorboard=False, samples=2)
  assert {name: (folder / name).read_bytes() for name in VALIDATORS} == contents
  for step in journal.evaluations.lost(lambda step: step % 2 == 0):
    journal.evaluations.restore(step, {"problems": 1, "intervals": {}}, {"eval/sums/mean@2": 0.5})
  assert journal.evaluations.lost(lambda step: step % 2 == 0) == []
