"""Runs with a judge: they are stopped and killed while it grades, and the key stays secret."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections import Counter

import pytest
from judge_server import serving
from processes import ROOT, SETTINGS, command, environment, read_result, run_py, start_together

from gtpo_jax.cli.report.overview import judge_cost
from gtpo_jax.cli.report.runs import read_run
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.rewards.judge.judge import PROBE

pytestmark = pytest.mark.slow
KEY = "sk-never-written-0123456789"
CONCURRENCY = 4


def grade_of(message):
  """A grade from 0 to 10 that only depends on the message."""
  return hashlib.sha256(message.encode()).digest()[0] % 11


def answer(message, count):
  time.sleep(0.01)
  return f"The key is {KEY}. Grade: {grade_of(message)}"


def settings(server, **changes):
  judge = {"base_url": server.url, "model": "m", "concurrency": CONCURRENCY}
  judge["template"] = "{prompt}|{completion}|{answer}"
  section = {f"reward.judge.{key}": value for key, value in judge.items()}
  return {
    **SETTINGS,
    "reward.verifier": "",
    "reward.parts": "correct,judge*0.5",
    **section,
    **changes,
  }


def secret_environment():
  return environment(GTPO_JUDGE_API_KEY=KEY, WANDB_MODE="offline")


def run(workdir, server, at=None, signum=None, **changes):
  """Trains; the `at`-th request from now sends the process a signal. Returns status and output."""
  process = subprocess.Popen(
    command(workdir, "-", settings(server, **changes)),
    cwd=ROOT,
    env=secret_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  first = len(server.bodies)

  def interrupting(message, count):
    if signum and len(server.bodies) == first + at:
      process.send_signal(signum)
      time.sleep(3)  # so that it is under way when the run stops
    return answer(message, count)

  server.answer = interrupting
  try:
    printed = process.communicate(timeout=600)[0]
  finally:
    process.kill()
  return process.returncode, printed


def completions(server):
  """How often each completion was graded."""
  return Counter(message for message in server.messages if message != PROBE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The workdir, the result and the requests of a run without a fault."""
  workdir = tmp_path_factory.mktemp("judge") / "run"
  with serving(answer) as server:
    code, printed = run(workdir, server, **{"log.wandb": "judged", "log.tensorboard": True})
    assert code == 0, printed
    assert server.most <= CONCURRENCY
    yield workdir, read_result(workdir), printed, server


def test_a_run_with_a_judge(undisturbed):
  workdir, _, printed, server = undisturbed
  counts = completions(server)
  assert set(counts.values()) == {1}
  rows = list(read_jsonl(workdir / "metrics.jsonl"))
  evaluations = list(read_jsonl(workdir / "evaluations.jsonl"))
  assert sum(row.get("judge/requests", 0) for row in rows + evaluations) == len(counts)
  assert sum(row.get("judge/tokens", 0) for row in rows + evaluations) == 7 * len(counts)
  assert all(row["judge/failed"] == row["reward/no_verdict"] == 0 for row in rows[1:])
  assert all(0 < row["judge/seconds"] < 60 and 0 <= row["judge/grade"] <= 1 for row in rows[1:])
  lines = (workdir / "judge.jsonl").read_text().splitlines()
  assert len(lines) == len(counts)
  assert f"judge: m at {server.url} has replied in" in printed
  ((_, cost),) = judge_cost(read_run(workdir))
  assert (
    cost.startswith(f"m: {len(counts):,} requests of 0.") and f"{7 * len(counts):,} tok" in cost
  )


def test_the_key_is_nowhere(undisturbed):
  workdir, _, printed, server = undisturbed
  assert KEY not in printed
  files = [file for file in workdir.rglob("*") if file.is_file()]
  names = {file.name for file in files}
  assert {"config.json", "judge.jsonl", "sessions.json", "metrics.jsonl"} <= names
  assert any(file.suffix == ".wandb" for file in files)
  assert not [file for file in files if KEY.encode() in file.read_bytes()]
  assert all(headers["Authorization"] == f"Bearer {KEY}" for _, headers in server.headers)


@pytest.mark.manual
def test_stopped_and_killed_while_the_judge_grades(undisturbed, tmp_path):
  """The results are those of the undisturbed run; only requests under way are repeated."""
  _, expected, _, _ = undisturbed
  workdir = tmp_path / "run"
  faults = [  # the request, the signal, and the exit status
    (30, signal.SIGTERM, 143),
    (60, signal.SIGKILL, -9),
    (40, signal.SIGINT, 130),
    (50, signal.SIGKILL, -9),
  ]
  with serving(answer) as server:
    for at, signum, status in faults:
      code, printed = run(workdir, server, at, signum)
      assert code == status, printed
    code, printed = run(workdir, server)
    assert code == 0, printed
    repeated = sum(count - 1 for count in completions(server).values())
    assert repeated <= len(faults) * CONCURRENCY
  assert read_result(workdir) == expected


def test_an_evaluation_of_the_run_asks_for_no_grade_twice(undisturbed, tmp_path):
  workdir, _, _, server = undisturbed
  first = completions(server)
  options = [f"--model={workdir}", f"--json={tmp_path / 'eval.json'}"]
  done = subprocess.run(
    run_py("-", "eval", *options),
    cwd=ROOT,
    env=secret_environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  summary = json.loads((tmp_path / "eval.json").read_text())
  assert summary["judge/cached"] > 0 == summary["judge/requests"]
  assert "judge/cached" in done.stdout and "judge: m at" in done.stdout
  assert completions(server) == first
  assert KEY not in done.stdout + done.stderr


@pytest.mark.manual
def test_only_the_first_of_two_processes_asks(undisturbed, tmp_path, monkeypatch):
  monkeypatch.setitem(os.environ, "GTPO_JUDGE_API_KEY", KEY)
  with serving(answer) as server:
    line = command(tmp_path / "run", "-", settings(server, steps=2))
    codes, printed = start_together([line] * 2)
    assert codes == [0, 0], printed
    assert set(completions(server).values()) == {1} and server.messages.count(PROBE) == 1


def test_a_judge_that_is_gone_ends_the_run_and_its_state_is_saved(tmp_path):
  changes = {"reward.judge.retries": 0}
  with serving(answer) as server:

    def gone(message, count):
      return answer(message, count) if len(server.bodies) < 200 else (503, b"gone", {})

    process = subprocess.Popen(
      command(tmp_path / "run", "-", settings(server, **changes)),
      cwd=ROOT,
      env=secret_environment(),
      stderr=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    server.answer = gone
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert "has not answered for the last" in last and "start its server again" in last
    code, printed = run(tmp_path / "run", server, **changes)
    assert code == 0 and "resumed at step" in printed, printed
