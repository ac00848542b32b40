"""Runs with environments that are killed or stopped in the middle of a turn, and two processes."""

import pytest
from processes import SETTINGS, read_result, start, start_two

STEPS = 4
EPISODES = {
  **SETTINGS,
  "steps": STEPS,
  "algorithm.name": "gtpo",
  "algorithm.tis_cap": 2.0,
  "env.make": "run:Oracle",
  "env.max_turns": 4,
  "eval.every": 0,
  "reward.verifier": "",
  "sampling.max_tokens": 48,
  "sampling.stop": '("1", "2", "3")',  # a random policy rarely draws a stop token
  "sampling.staleness": 1,
  "sampling.slots": 6,
  "sampling.chunk": 3,
  "checkpoint.every": 1,
}


def result_of(workdir):
  """Returns the result of a run without the snapshots of episodes, which contain seconds."""
  rows, samples, step, leaves = read_result(workdir)
  assert leaves["leftovers"].pop("['snapshots']")
  return rows, samples, step, leaves


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
  """The result of a run without a fault, some of whose episodes go on in the next step."""
  workdir = tmp_path_factory.mktemp("faults") / "undisturbed"
  done = start(workdir, "-", EPISODES)
  assert done.returncode == 0, done.stderr
  rows, _, step, leaves = result = result_of(workdir)
  assert step == STEPS == rows[-1]["step"] and leaves["leftovers"]
  assert max(row.get("groups/unfinished", 0) for row in rows) > 0
  assert max(row.get("env/turns", 0) for row in rows) > 1.3
  return result


@pytest.mark.slow
def test_killed_and_stopped_in_the_middle_of_a_turn(expected, tmp_path):
  run = tmp_path / "run"
  for event, code in (("kill:turn:50", -9), ("term:turn:25", 143)):
    stopped = start(run, event, EPISODES)
    assert stopped.returncode == code, (event, stopped.stdout, stopped.stderr)
    assert "Traceback" not in stopped.stderr, (event, stopped.stderr)
  done = start(run, "-", EPISODES)
  assert done.returncode == 0, done.stderr
  assert result_of(run) == expected


@pytest.mark.manual
def test_two_processes_play_the_same_episodes(expected, tmp_path):
  """Only the first has environments. Both go on alike after one of them is killed."""
  codes, printed = start_two(tmp_path / "whole", "-", 0, EPISODES)
  assert codes == [0, 0], printed
  whole = result_of(tmp_path / "whole")
  assert whole[1][:4] == expected[1][:4]  # the samples of the first step, before any update
  codes, printed = start_two(tmp_path / "run", "kill:turn:50", 0, EPISODES)
  assert codes[0] == -9, printed
  codes, printed = start_two(tmp_path / "run", "-", 0, EPISODES)
  assert codes == [0, 0], printed
  assert result_of(tmp_path / "run") == whole
