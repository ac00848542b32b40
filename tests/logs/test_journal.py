"""The log files of a run: one line per step, also after a resume or a kill."""

import json
import struct
import time

import pytest

from gtpo_jax.cli.samples import options_to_sample
from gtpo_jax.environments.turns import Episode, Stop, ToolCall, Turn
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.log_files import read_jsonl


def fill(workdir, steps, first=0):
  """Logs the steps after `first` up to `steps`."""
  journal = Journal(workdir, first, tensorboard=False)
  for step in range(first + 1, steps + 1):
    journal.write(step, {"loss": step / 2})
    journal.write_sample(step, "1+2:", f"text {step}", correct=step % 2 == 0)
  journal.close()
  return journal


def steps_of(file):
  return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_one_line_per_step(tmp_path):
  journal = fill(tmp_path, 3)
  assert journal.read() == [
    {"step": 1, "loss": 0.5},
    {"step": 2, "loss": 1.0},
    {"step": 3, "loss": 1.5},
  ]
  assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
  assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[1]) == {
    "step": 2,
    "prompt": "1+2:",
    "completion": "text 2",
    "correct": True,
  }


def test_lines_are_on_disk_before_the_journal_is_closed(tmp_path):
  journal = Journal(tmp_path, 0, tensorboard=False)
  journal.write(1, {"loss": 1.0})
  assert steps_of(tmp_path / "metrics.jsonl") == [1]


def test_a_resumed_run_cuts_both_files_back_and_continues(tmp_path):
  fill(tmp_path, 5)
  fill(tmp_path, 7, first=3)
  for name in ("metrics.jsonl", "samples.jsonl"):
    assert steps_of(tmp_path / name) == [1, 2, 3, 4, 5, 6, 7]


def test_resuming_removes_lines_after_the_checkpoint(tmp_path):
  fill(tmp_path, 5)
  assert [row["step"] for row in Journal(tmp_path, 3, tensorboard=False).read()] == [1, 2, 3]
  assert steps_of(tmp_path / "samples.jsonl") == [1, 2, 3]
  assert Journal(tmp_path, 0, tensorboard=False).read() == []


def test_no_other_files_remain(tmp_path):
  fill(tmp_path, 4)
  fill(tmp_path, 6, first=2)
  assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("cut", [1, 5, -2])
def test_a_half_written_last_line_is_skipped_and_removed(tmp_path, cut):
  fill(tmp_path, 4)
  metrics = tmp_path / "metrics.jsonl"
  lines = metrics.read_text().splitlines(keepends=True)
  metrics.write_text("".join(lines[:3]) + lines[3].rstrip("\n")[:cut])
  assert [row["step"] for row in read_jsonl(metrics)] == [1, 2, 3]
  journal = Journal(tmp_path, 3, tensorboard=False)
  journal.write(4, {"loss": 9.0})
  losses = [(row["step"], row["loss"]) for row in journal.read()]
  assert losses == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]


def test_a_last_line_without_its_newline_still_counts(tmp_path):
  fill(tmp_path, 3)
  metrics = tmp_path / "metrics.jsonl"
  metrics.write_text(metrics.read_text().rstrip("\n"))
  journal = Journal(tmp_path, 3, tensorboard=False)
  journal.write(4, {"loss": 2.0})
  assert steps_of(metrics) == [1, 2, 3, 4]


def test_a_missing_file_has_no_rows(tmp_path):
  assert read_jsonl(tmp_path / "metrics.jsonl") == []
  assert Journal(tmp_path, 0, tensorboard=False).read() == []


@pytest.mark.parametrize(
  "text",
  ["two\nlines", "line\u2028separator \x85 \x1c", "\ud800 half a pair", '"quoted" \\', "日本"],
)
def test_any_text_takes_one_line_and_is_read_back(tmp_path, text):
  journal = Journal(tmp_path, 0, tensorboard=False)
  journal.write_sample(1, text, text, correct=False)
  journal.write_sample(2, "a", "b", correct=True)
  rows = read_jsonl(tmp_path / "samples.jsonl")
  assert [row["step"] for row in rows] == [1, 2]
  assert rows[0]["prompt"] == rows[0]["completion"] == text
  Journal(tmp_path, 1, tensorboard=False)
  assert read_jsonl(tmp_path / "samples.jsonl") == rows[:1]


def test_tensorboard_files_are_written_on_request(tmp_path):
  journal = Journal(tmp_path, 0, tensorboard=True)
  journal.write(1, {"loss": 1.0})
  journal.write_sample(1, "1+2:", "3", correct=True)
  journal.close()
  events = list(tmp_path.glob("events*"))
  assert len(events) == 1
  assert b"loss" in events[0].read_bytes()


def scalars(folder):
  """Returns (tag, step) of all events that TensorBoard shows, in order and without purged ones."""
  from tensorboardX.proto.event_pb2 import Event, SessionLog

  shown = []
  for file in sorted(folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns):
    data = file.read_bytes()
    while data:
      length = struct.unpack("<Q", data[:8])[0]
      event = Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      if event.session_log.status == SessionLog.START:
        shown = [(tag, step) for tag, step in shown if step < event.step]
      shown += [(value.tag, event.step) for value in event.summary.value]
  return shown


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
  for first, last in ((0, 5), (3, 6), (3, 4)):
    journal = Journal(tmp_path, first, tensorboard=True)
    for step in range(first + 1, last + 1):
      journal.write(step, {"loss": step / 2})
      journal.write_sample(step, "1+2:", "3", correct=True)
    journal.amend(last, {"eval/sums/mean@2": 0.5})
    journal.close()
    time.sleep(1.1)  # TensorBoard names event files by the second
  shown = scalars(tmp_path)
  assert sorted(shown) == sorted({*shown})
  assert [step for tag, step in shown if tag == "loss"] == [1, 2, 3, 4]
  for name in ("metrics.jsonl", "samples.jsonl"):
    assert steps_of(tmp_path / name) == [1, 2, 3, 4]


def test_a_sample_has_the_turns_of_its_episode(tmp_path):
  turns = (Turn("", calls=(ToolCall("add", {"x": "1+2"}),)), Turn("3", index=1))
  info = {"near": 0.5}
  episode = Episode(turns, Stop.ANSWERED, 1.5, (0.5, 1.0), True, True, 9, 0.1, info)
  journal = Journal(tmp_path, 0, tensorboard=False)
  journal.write_sample(1, "1+2:", "3", True, episode, "3")
  journal.close()
  (row,) = read_jsonl(tmp_path / "samples.jsonl")
  assert [turn["text"] for turn in row["turns"]] == ["", "3"]
  assert row["turns"][0]["calls"] == [{"name": "add", "arguments": {"x": "1+2"}, "id": ""}]
  assert (row["stop"], row["rewards"], row["info"]) == ("answered", [0.5, 1.0], {"near": 0.5})
  assert row["answer"] == "3"
  assert options_to_sample(tmp_path) == ["--prompt=1+2:", '--row={"answer": "3"}']
