"""Tests that runs killed or stopped at marked points resume bit for bit."""

import re

import numpy as np
import pytest
from processes import PLAIN, SETTINGS, STEPS, read_result, start

from gtpo_jax.logs.log_files import read_jsonl

SPOT_GRACE_S = 30  # how long a spot machine runs after the signal
KILLS = [  # ordered so that each point can still be reached after the earlier kills
  "kill:evaluation:1",
  "kill:sampling:2",
  "kill:reward:3",
  "kill:evaluation:2",
  "kill:metrics:1",
  "kill:update:1",
  "kill:saving:1",
  "kill:written:1",
  "kill:recorded:1",
  "kill:committed:1",
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
  """The result of a run without a fault."""
  workdir = tmp_path_factory.mktemp("faults") / "undisturbed"
  done = start(workdir, "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  rows, _, step, leaves = result = read_result(workdir)
  assert step == STEPS == rows[-1]["step"]
  assert leaves["leftovers"]
  assert max(row.get("groups/kept", 0) for row in rows) > 0
  return result


@pytest.mark.parametrize(
  "kills",
  [pytest.param(KILLS[::4], marks=pytest.mark.slow), pytest.param(KILLS, marks=pytest.mark.manual)],
  ids=["three", "all"],
)
def test_a_run_killed_at_every_phase(kills, expected, tmp_path):
  """One run is killed at each point in turn, and repeats exactly the steps that were lost."""
  for event in kills:
    killed = start(tmp_path / "run", event, SETTINGS)
    assert killed.returncode == -9, (event, killed.returncode, killed.stdout, killed.stderr)
    assert "damaged" not in killed.stdout
  done = start(tmp_path / "run", "-", SETTINGS)
  assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
  assert read_result(tmp_path / "run") == expected


@pytest.mark.parametrize(
  "events",
  [
    pytest.param(["term:compile:1", "int:saving:1", "term:evaluation:1"], marks=pytest.mark.slow),
    *(
      pytest.param([event], marks=pytest.mark.manual)
      for event in (
        "term:chunk:9",
        "term:sampling:2",
        "term:reward:3",
        "term:update:2",
        "term:evaluation chunk:2",
        "term:evaluation:2",
        "term2:sampling:3",
        "term2:written:2",
        "term2:evaluation:1",
      )
    ),
  ],
  ids=", ".join,
)
def test_a_run_asked_to_stop(expected, tmp_path, events):
  """One run is asked to stop at each point in turn."""
  for event in events:
    stopped = start(tmp_path / "run", event, SETTINGS)
    status = 130 if event.startswith("int:") else 143
    assert stopped.returncode == status, (event, stopped.returncode, stopped.stdout, stopped.stderr)
    if not event.startswith("term2:"):
      (line,) = [line for line in stopped.stdout.splitlines() if "to resume: " in line]
      again = f"-m gtpo_jax train --config=configs/base.py --workdir={tmp_path / 'run'} --config."
      assert again in line
      line = next(line for line in stopped.stdout.splitlines() if "stopped at step" in line)
      assert float(re.search(r"; saved (\d+\.\d) s after the signal$", line)[1]) < SPOT_GRACE_S
      saved = max(int(entry.name) for entry in (tmp_path / "run" / "checkpoints").iterdir())
      assert saved == read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert "Traceback" not in stopped.stderr
  done = start(tmp_path / "run", "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  assert read_result(tmp_path / "run") == expected


XLA_ERRORS = [  # (event, the start of the advice; "" for a traceback)
  ("RESOURCE_EXHAUSTED:update:2", "out of memory during the update: raise batch.micro_batches"),
  ("UNAVAILABLE:update:2", ""),  # one process has no peers
  ("RESOURCE_EXHAUSTED:chunk:9", "out of memory during the sampling: lower sampling.slots"),
  ("INVALID_ARGUMENT:update:2", ""),
]


@pytest.mark.parametrize(
  "errors",
  [
    pytest.param(XLA_ERRORS[:2], marks=pytest.mark.slow),
    pytest.param(XLA_ERRORS, marks=pytest.mark.manual),
  ],
  ids=["two", "all"],
)
def test_an_xla_error_says_what_happened(errors, expected, tmp_path):
  """It prints advice or a traceback, and always XLA's full text. The run can be resumed."""
  for event, start_of_message in errors:
    failed = start(tmp_path / "run", event, SETTINGS)
    status = event.split(":")[0]
    assert failed.returncode == 1, failed.stderr
    assert f"{status}: injected\nthe second line of XLA's text" in failed.stderr
    assert ("Traceback" in failed.stderr) == (not start_of_message), failed.stderr
    if start_of_message:
      assert f"gtpo: {start_of_message}" in failed.stderr
    else:
      assert "This happened during the update." in failed.stderr
  done = start(tmp_path / "run", "-", SETTINGS)
  assert done.returncode == 0 and read_result(tmp_path / "run") == expected, done.stderr


STARTED_OVER = [("term:warm start:1", 143), ("kill:warm start:2", -9)]  # (event, exit status)


@pytest.mark.manual
@pytest.mark.parametrize(
  "events",
  [
    pytest.param(STARTED_OVER[1:], marks=pytest.mark.slow),
    pytest.param(STARTED_OVER, marks=pytest.mark.manual),
  ],
  ids=["killed", "stopped and killed"],
)
def test_the_warm_start_starts_over(events, tmp_path):
  settings = SETTINGS | {
    "warm_start.steps": 60,
    "warm_start.batch": 8,
    "sampling.max_tokens": 18,
    "steps": 1,
    "reward.verifier": "",
  }
  for event, code in events:
    first = start(tmp_path / "run", event, settings)
    assert first.returncode == code, first.stderr
    assert ("which the next run starts over" in first.stdout) == (code == 143)
  for workdir in (tmp_path / "run", tmp_path / "undisturbed"):
    assert start(workdir, "-", settings).returncode == 0
  assert read_result(tmp_path / "run") == read_result(tmp_path / "undisturbed")


@pytest.mark.parametrize(
  ("preset", "moves"),
  [
    pytest.param("tiny", False, marks=pytest.mark.slow),
    pytest.param("tiny-moe", False, marks=pytest.mark.manual),
    pytest.param("tiny-delta", False, marks=pytest.mark.manual),
    pytest.param("tiny", True, marks=pytest.mark.manual),
  ],
)
def test_tokens_that_were_carried_over_resume_exactly(preset, moves, tmp_path):
  """Unfinished completions are in the checkpoint; what was drawn since is drawn again.

  So are the experts that computed their tokens. If the run moves to eight devices, it goes on with
  the same completions.
  """
  more = {"algorithm.name": "gtpo", "algorithm.tis_cap": 2.0, "reward.parts": "correct"}
  engine = {"sampling.staleness": 2, "sampling.slots": 5, "sampling.chunk": 3}
  settings = {**PLAIN, **more, **engine, "model.preset": preset}
  done = start(tmp_path / "undisturbed", "-", settings)
  assert done.returncode == 0, done.stderr
  expected = read_result(tmp_path / "undisturbed")
  rows = expected[0]
  assert max(row.get("groups/unfinished", 0) for row in rows) > 0
  assert max(row.get("staleness/tokens", 0) for row in rows) > 0
  for event in ("kill:update:1", "term:chunk:30") if moves else ("term:chunk:30",):
    killed = start(tmp_path / "run", event, settings)
    assert killed.returncode == (-9 if event.startswith("kill") else 143), killed.stderr
  if not moves:
    done = start(tmp_path / "run", "-", settings)
    assert done.returncode == 0, done.stderr
    assert read_result(tmp_path / "run") == expected
    return
  # Which tokens are stale depends on the number of slots, here a multiple of two.
  mesh = {"mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 4}
  kept = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  done = start(tmp_path / "run", "-", settings | mesh, JAX_NUM_CPU_DEVICES="8")
  assert done.returncode == 0 and "8 x cpu" in done.stdout, done.stderr
  rows_of_eight, _, step, _ = read_result(tmp_path / "run")
  assert kept[-1]["groups/unfinished"] > 0 and rows_of_eight[: len(kept)] == rows[: len(kept)]
  assert step == STEPS
  for row in rows_of_eight[1:]:  # a step without a signal has no loss
    assert row["update/empty"] == 1 if row["loss"] is None else np.isfinite(row["loss"])
