"""The record of when, where and how a run was executed."""

import json
import time

import pytest

from gtpo_jax.logs.sessions import SessionRecord, command_line, duration, read_sessions


@pytest.fixture
def set_clock(monkeypatch):
  """Returns a function that sets the system's clock, and stops it."""
  return lambda seconds: monkeypatch.setattr(time, "time", lambda: seconds)


def test_a_session_and_its_resume(tmp_path, set_clock):
  set_clock(1_000_000_000)
  first = SessionRecord(tmp_path, first_step=0, began=time.monotonic())
  first.update(7)
  set_clock(1_000_000_600)
  second = SessionRecord(tmp_path, first_step=7, began=time.monotonic())
  assert len(read_sessions(tmp_path)) == 1  # the second has not completed a step yet
  second.update(9)
  rows = read_sessions(tmp_path)
  assert [(row["first_step"], row["last_step"]) for row in rows] == [(0, 7), (7, 9)]
  assert [row["started"] for row in rows] == ["2001-09-09T01:46:40Z", "2001-09-09T01:56:40Z"]
  assert "jax" in rows[0]["versions"] and "cpu" in rows[0]["devices"].lower()
  assert rows[0]["command"] == ""  # pytest is not a gtpo command


def test_a_clock_that_jumps_back_changes_no_duration(tmp_path, set_clock):
  set_clock(1_000_000_000)
  record = SessionRecord(tmp_path, 0, began=time.monotonic() - 60)
  set_clock(1_000_000_000 - 3600)
  record.update(1)
  sessions = read_sessions(tmp_path)
  assert 60 <= duration(sessions) <= 70
  assert sessions[0]["started"] == "2001-09-09T01:45:40Z"
  before = {"started": "2026-01-01T01:00:00Z", "until": "2026-01-01T00:00:00Z"}  # of 0.1
  assert duration([*sessions, before]) == duration(sessions)


def test_a_run_that_starts_over_has_a_new_record(tmp_path, set_clock):
  set_clock(1_000_000_000)
  SessionRecord(tmp_path, 0, began=time.monotonic()).update(3)
  set_clock(1_000_000_600)
  SessionRecord(tmp_path, 0, began=time.monotonic())
  (row,) = read_sessions(tmp_path)
  assert row["started"] == "2001-09-09T01:56:40Z" and row["last_step"] == 0


def test_the_duration_is_the_sum_over_sessions():
  first = {"started": "2026-01-01T00:00:00Z", "until": "2026-01-01T00:02:21Z"}
  later = {"started": "2026-03-01T12:00:00Z", "until": "2026-03-02T12:00:00Z"}
  assert duration([first, later]) == 141 + 86_400


@pytest.mark.parametrize(
  ("argv", "command"),
  [
    (["/usr/bin/gtpo", "train", "--workdir=my run"], "gtpo train '--workdir=my run'"),
    (["/x/gtpo_jax/__main__.py", "train"], "gtpo train"),
    (["script.py", "--key=secret"], ""),
  ],
)
def test_the_command_of_a_session(argv, command):
  assert command_line(argv) == command


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"started": "now"}]', '{"a": 1}'])
def test_a_damaged_record_is_no_record(text, tmp_path):
  (tmp_path / "sessions.json").write_text(text)
  assert read_sessions(tmp_path) == []


def test_the_record_is_plain_json(tmp_path):
  SessionRecord(tmp_path, 0, began=time.monotonic())
  (row,) = json.loads((tmp_path / "sessions.json").read_text())
  assert set(row["versions"]) == {"gtpo_jax", "python", "jax", "jaxlib", "flax"}
