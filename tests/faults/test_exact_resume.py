"""Processes that are killed or asked to stop at marked points, and taken up again: nothing is lost, to the bit."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from gtpo_jax.reporting.journal import read_jsonl
from gtpo_jax.seal import check_seal

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
STEPS = 6
SETTINGS = {  # several micro-batches, and groups left over from step to step
    "steps": STEPS, "data.terms": 2, "data.max_prompt_tokens": 20, "sampling.max_tokens": 14, "batch.prompts": 4, "batch.group": 4,
    "batch.micro_batches": 2, "batch.max_gen_batches": 20, "algorithm.name": "dapo", "reward.verifier": "run:judge", "warm_start.steps": 0,
    "optimizer.learning_rate": 1e-3, "eval.every": 3, "eval.problems": 8, "eval.samples": 2, "eval.batch": 8, "checkpoint.every": 2}
KILLS = ["kill:evaluation:1", "kill:sampling:2", "kill:reward:3", "kill:metrics:3", "kill:update:3", "kill:saving:1",
         "kill:written:1", "kill:sealed:1", "kill:committed:1", "kill:evaluation:2"]
CLOCK = ("time/", "tokens/s", "compiles")


def start(workdir, event, settings):
  arguments = [sys.executable, HERE / "run.py", event, "train", "--config=configs/base.py", f"--workdir={workdir}",
               *(f"--config.{key}={value}" for key, value in settings.items())]
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
  return subprocess.run(list(map(str, arguments)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def left_behind(workdir):
  """All that must not depend on what happened on the way: metrics, samples, and the digests of the last checkpoint."""
  rows = [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in read_jsonl(workdir / "metrics.jsonl")]
  assert [row["step"] for row in rows] == list(range(len(rows)))
  steps = sorted(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  seal = check_seal(epath.Path(workdir / "checkpoints" / str(steps[-1])), ["params", "rest", "leftovers"])
  return rows, read_jsonl(workdir / "samples.jsonl"), steps[-1], seal["leaves"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run to which nothing happened."""
  workdir = tmp_path_factory.mktemp("faults") / "whole"
  done = start(workdir, "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  rows, _, step, leaves = found = left_behind(workdir)
  assert step == STEPS == rows[-1]["step"] and leaves["leftovers"] and max(row.get("groups/kept", 0) for row in rows) > 0
  return found


@pytest.mark.slow
def test_killed_at_every_phase(whole, tmp_path):
  """One run, killed at one point after another; what a kill takes away is sampled and learned again, the same."""
  for event in KILLS:
    killed = start(tmp_path / "run", event, SETTINGS)
    assert killed.returncode == -9, (event, killed.returncode, killed.stdout, killed.stderr)
    assert "damaged" not in killed.stdout
  done = start(tmp_path / "run", "-", SETTINGS)
  assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
  assert left_behind(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.parametrize("event", ["term:compile:1", "term:sampling:2", "term:saving:1", "term:evaluation:2", "term2:sampling:3",
                                   "term2:written:2", "term2:evaluation:1"])
def test_asked_to_stop(whole, tmp_path, event):
  stopped = start(tmp_path / "run", event, SETTINGS)
  assert stopped.returncode == 143, (stopped.returncode, stopped.stdout, stopped.stderr)
  if event.startswith("term:"):
    assert "stopped at step" in stopped.stdout and "saved" in stopped.stdout and "to go on:" in stopped.stdout
    saved = max(int(entry.name) for entry in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
  assert "Traceback" not in stopped.stderr
  done = start(tmp_path / "run", "-", SETTINGS)
  assert done.returncode == 0, done.stderr
  assert left_behind(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("event", "code"), [("term:warm start:1", 143), ("kill:warm start:2", -9)])
def test_the_warm_start_begins_anew(tmp_path, event, code):
  settings = SETTINGS | {"warm_start.steps": 60, "warm_start.batch": 8, "sampling.max_tokens": 18, "steps": 1, "reward.verifier": ""}
  first = start(tmp_path / "run", event, settings)
  assert first.returncode == code, first.stderr
  assert ("which is not saved and begins anew" in first.stdout) == (code == 143)
  for workdir in (tmp_path / "run", tmp_path / "whole"):
    assert start(workdir, "-", settings).returncode == 0
  assert left_behind(tmp_path / "run") == left_behind(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(whole, tmp_path):
  disk = tmp_path / "disk"
  disk.mkdir()
  if os.system(f"mount -t tmpfs -o size=20m none {disk} 2>/dev/null"):
    pytest.skip("mounting needs root")
  try:
    full = start(disk / "run", "-", SETTINGS)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    line = full.stderr.strip().splitlines()
    assert len(line) == 1 and "cannot be saved" in line[0], full.stderr
    os.system(f"mount -o remount,size=200m {disk}")
    done = start(disk / "run", "-", SETTINGS)
    assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
    assert left_behind(disk / "run") == whole
  finally:
    os.system(f"umount {disk}")
