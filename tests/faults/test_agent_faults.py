"""Runs with an agent that are killed or stopped in the middle of an episode, and two processes."""

import pytest
from processes import SETTINGS, read_result, start, start_two

STEPS = 3
AGENTS = {
  **SETTINGS,
  "steps": STEPS,
  "algorithm.tis_cap": 2.0,
  "env.agent": "run:player",
  "env.workers": 16,
  "eval.every": 3,
  "eval.problems": 2,
  "eval.batch": 2,
  "reward.verifier": "",
  "sampling.max_tokens": 96,
  "sampling.chunk": 3,
  "checkpoint.every": 1,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
  """The result of a run without a fault, which keeps groups for the next step."""
  workdir = tmp_path_factory.mktemp("faults") / "undisturbed"
  done = start(workdir, "-", AGENTS)
  assert done.returncode == 0, done.stderr
  rows, samples, step, _ = result = read_result(workdir)
  assert step == STEPS == rows[-1]["step"]
  assert max(row.get("groups/kept", 0) for row in rows) > 0
  assert all(row["env/conversations"] == 2 for row in rows[1:])
  assert all(row["mismatch/max_abs_logp"] < 1e-4 for row in rows[1:])
  assert all(row["env/stop/env_done"] == 1 for row in rows[1:])
  assert any(len(sample["turns"]) == 3 for sample in samples)
  return result


@pytest.mark.manual
def test_killed_and_stopped_in_the_middle_of_an_episode(expected, tmp_path):
  run = tmp_path / "run"
  for event, code in (("kill:turn:50", -9), ("term:turn:25", 143)):
    stopped = start(run, event, AGENTS)
    assert stopped.returncode == code, (event, stopped.stdout, stopped.stderr)
    assert "Traceback" not in stopped.stderr, (event, stopped.stderr)
  done = start(run, "-", AGENTS)
  assert done.returncode == 0, done.stderr
  assert read_result(run) == expected


@pytest.mark.manual
def test_two_processes_play_the_same_episodes(expected, tmp_path):
  """Only the first calls agents. Both go on alike after one of them is killed."""
  codes, printed = start_two(tmp_path / "whole", "-", 0, AGENTS)
  assert codes == [0, 0], printed
  whole = read_result(tmp_path / "whole")
  assert whole[1][:4] == expected[1][:4]  # the samples of the first step, before any update
  codes, printed = start_two(tmp_path / "run", "kill:turn:50", 0, AGENTS)
  assert codes[0] == -9, printed
  codes, printed = start_two(tmp_path / "run", "-", 0, AGENTS)
  assert codes == [0, 0], printed
  assert read_result(tmp_path / "run") == whole
