"""Processes that are killed or asked to stop at marked points, and taken up again: nothing is lost, to the bit."""
import os
import shutil
import socket
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


def command(workdir, event, settings):
  return list(map(str, [sys.executable, HERE / "run.py", event, "train", "--config=configs/base.py", f"--workdir={workdir}",
                        *(f"--config.{key}={value}" for key, value in settings.items())]))


def environment(**more):
  return {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), **more}


def start(workdir, event, settings):
  return subprocess.run(command(workdir, event, settings), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


def start_two(workdir, event, victim, settings):
  """Two processes, to one of which something happens: their statuses and what they printed."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  processes = []
  for i in range(2):
    env = environment(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(i))
    processes.append(subprocess.Popen(command(workdir, event if i == victim else "-", settings), cwd=ROOT, env=env, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True))
  try:
    printed = [process.communicate(timeout=600)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], printed


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
    ours = [line for line in full.stderr.splitlines() if line.startswith("gtpo: ")]  # Orbax and tensorboardX add their threads' own
    assert full.returncode == 1 and len(ours) == 1 and "No space left on device" in ours[0], full.stderr
    os.system(f"mount -o remount,size=200m {disk}")
    done = start(disk / "run", "-", SETTINGS)
    assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
    assert left_behind(disk / "run") == whole
  finally:
    os.system(f"umount {disk}")


# --- two processes ---

TWO_KILLS = [("kill:sampling:2", 1), ("kill:reward:2", 0), ("kill:update:3", 1), ("kill:saving:1", 0), ("kill:sealed:1", 0),
             ("kill:saving:1", 1), ("kill:evaluation:1", 0)]


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("faults") / "two"
  codes, printed = start_two(workdir, "-", 0, SETTINGS)
  assert codes == [0, 0], printed
  assert printed[1].count("\n") <= 2  # the second one has nothing to say but gloo's own line
  return workdir, left_behind(workdir)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(whole_of_two, tmp_path):
  """The other ends soon with one message, and both together go on exactly."""
  for event, victim in TWO_KILLS:
    codes, printed = start_two(tmp_path / "run", event, victim, SETTINGS)
    assert codes[victim] == -9 and codes[1 - victim] not in (0, 2), (event, codes, printed)
    assert "damaged" not in printed[0]
  codes, printed = start_two(tmp_path / "run", "-", 0, SETTINGS)
  assert codes == [0, 0] and "damaged" not in printed[0], printed
  assert left_behind(tmp_path / "run") == whole_of_two[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_two_processes_stop_together(whole_of_two, tmp_path, victim):
  codes, printed = start_two(tmp_path / "run", "term:sampling:2", victim, SETTINGS)
  assert codes[victim] == 143 and codes[1 - victim] in (130, 143), (codes, printed)
  assert "stopped at step" in printed[0]
  codes, printed = start_two(tmp_path / "run", "-", 0, SETTINGS)
  assert codes == [0, 0] and left_behind(tmp_path / "run") == whole_of_two[1], printed


@pytest.mark.slow
def test_a_run_moves_between_one_process_and_two(whole, whole_of_two, tmp_path):
  """What is restored has the digests of what was saved, or it would be set aside."""
  shutil.copytree(whole_of_two[0], tmp_path / "one")
  done = start(tmp_path / "one", "-", SETTINGS | {"steps": STEPS + 1})
  assert done.returncode == 0 and f"resumed at step {STEPS}" in done.stdout and "damaged" not in done.stdout, done.stderr
  codes, printed = start_two(tmp_path / "one", "-", 0, SETTINGS | {"steps": STEPS + 2})
  assert codes == [0, 0] and f"resumed at step {STEPS + 1}" in printed[0] and "damaged" not in printed[0], printed
  assert [row["step"] for row in read_jsonl(tmp_path / "one" / "metrics.jsonl")] == list(range(STEPS + 3))
