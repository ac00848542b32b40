"""Runs that draw problems by their difficulty resume bit for bit, in one process and in two."""

import pytest
from processes import SETTINGS, STEPS, read_result, start, start_two

EXPLORE = SETTINGS | {"data.difficulty": "explore", "data.largest": 9}
SETTINGS_OF = {
  "dynamic": EXPLORE,
  "plain": EXPLORE | {"algorithm.name": "gtpo"},
  "stale": EXPLORE | {"sampling.staleness": 1},
}
KILLS = ["kill:sampling:2", "kill:reward:3", "kill:update:1", "kill:saving:1", "kill:committed:1"]


@pytest.mark.manual
@pytest.mark.parametrize("which", SETTINGS_OF)
def test_a_run_killed_while_it_explores(which, tmp_path):
  settings = SETTINGS_OF[which]
  done = start(tmp_path / "whole", "-", settings)
  assert done.returncode == 0, done.stderr
  rows, _, step, leaves = expected = read_result(tmp_path / "whole")
  assert step == STEPS and leaves["leftovers"]
  assert 0 < rows[-1]["difficulty/tried"] < 1 and rows[-1]["difficulty/repeated"] > 0
  for event in KILLS:
    killed = start(tmp_path / "run", event, settings)
    assert killed.returncode == -9, (event, killed.stdout, killed.stderr)
  done = start(tmp_path / "run", "-", settings)
  assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
  assert read_result(tmp_path / "run") == expected


@pytest.mark.manual
def test_two_processes_draw_the_same_problems(tmp_path):
  codes, printed = start_two(tmp_path / "two", "-", 0, EXPLORE)
  assert codes == [0, 0], printed
  for event, victim in (("kill:sampling:2", 1), ("kill:saving:1", 0)):
    codes, printed = start_two(tmp_path / "run", event, victim, EXPLORE)
    assert codes[victim] == -9, (event, codes, printed)
  codes, printed = start_two(tmp_path / "run", "-", 0, EXPLORE)
  assert codes == [0, 0], printed
  assert read_result(tmp_path / "run") == read_result(tmp_path / "two")
