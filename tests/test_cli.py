"""The command line as a user meets it: real processes, exit codes, one line for every mistake."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--config.data.terms=2", "--config.batch.prompts=4", "--config.batch.group=4", "--config.warm_start.steps=20",
         "--config.eval.problems=8", "--config.eval.samples=2", "--config.eval.batch=8", "--config.checkpoint.every=50"]


def command(*args):
  return [sys.executable, "-m", "gtpo_jax", *map(str, args)]


def environment():
  return {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}


def gtpo(*args):
  return subprocess.run(command(*args), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("cli") / "run"
  done = gtpo("train", "--config=configs/tiny.py", f"--workdir={workdir}", "--config.steps=2", *SMALL)
  assert done.returncode == 0, done.stderr
  return workdir, done.stdout


def test_train_says_what_happened(finished_run):
  workdir, out = finished_run
  assert "warm-started base model: held-out pass@1" in out
  assert "gtpo: held-out pass@1" in out and "points" in out and str(workdir / "curves.png") in out
  assert "\x1b" not in out  # plain lines where there is no terminal


def test_sample_prints_completions(finished_run):
  done = gtpo("sample", f"--model={finished_run[0]}", "--prompt=12+3+4:", "--n=3", "--temperature=0")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 3 and len(set(lines)) == 1  # greedy
  base = gtpo("sample", f"--model={finished_run[0]}", "--prompt=12+3+4:", "--step=0", "--max_tokens=4")
  assert base.returncode == 0, base.stderr


def test_eval_prints_and_writes_json(finished_run, tmp_path):
  done = gtpo("eval", f"--model={finished_run[0]}", "--k=1,4", f"--json={tmp_path / 'out.json'}")
  assert done.returncode == 0, done.stderr
  numbers = json.loads((tmp_path / "out.json").read_text())
  assert numbers["step"] == 2 and numbers["problems"] == 8
  assert 0 <= numbers["eval/sums/pass@1"] <= numbers["eval/sums/pass@4"] <= 1
  assert numbers["eval/sums/mean@4"] == pytest.approx(numbers["eval/sums/pass@1"])
  assert "eval/sums/pass@4" in done.stdout


def test_doctor_is_content():
  done = gtpo("doctor")
  assert done.returncode == 0 and "jax" in done.stdout and "ready: gtpo train" in done.stdout


def test_ctrl_c_saves_and_the_same_command_goes_on(finished_run, tmp_path):
  workdir = tmp_path / "run"
  args = ["train", "--config=configs/tiny.py", f"--workdir={workdir}", "--config.steps=2000", "--config.eval.every=0", *SMALL]
  with (tmp_path / "out").open("w") as out:
    process = subprocess.Popen(command(*args), cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
      wait_for_step(workdir, 2, process)
      process.send_signal(signal.SIGINT)
      assert process.wait(timeout=60) == 130
    finally:
      process.kill()
  text = (tmp_path / "out").read_text()
  assert "stopped at step" in text and "saved" in text and f"to go on: gtpo train --config=configs/tiny.py --workdir={workdir}" in text
  steps = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert steps == list(range(steps[-1] + 1)) and steps[-1] >= 2

  more = [arg.replace("steps=2000", f"steps={steps[-1] + 1}") for arg in args]
  again = gtpo(*more)
  assert again.returncode == 0 and f"resumed at step {steps[-1]}" in again.stdout, again.stdout + again.stderr
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines] == list(range(steps[-1] + 2))


def wait_for_step(workdir, step, process):
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline and process.poll() is None:
    file = workdir / "metrics.jsonl"
    if file.exists() and f'"step": {step},' in file.read_text():
      return
    time.sleep(0.05)
  pytest.fail(f"step {step} was not reached")


@pytest.mark.parametrize(("args", "message"), [
    (["trian"], "unknown command 'trian', did you mean 'train'?"),
    (["train", "--workdir=w"], "required: --config"),
    (["train", "--config=configs/tiny.py", "--workdri=w"], "unknown option '--workdri', did you mean '--workdir'?"),
    (["train", "--config=configs/tinny.py", "--workdir=w"], "no config file at 'configs/tinny.py', did you mean 'configs/tiny.py'?"),
    (["train", "--config=configs/tiny.py", "--workdir=w", "--config.batch.grup=4"],
     "unknown config key 'batch.grup', did you mean 'batch.group'?"),
    (["train", "--config=configs/tiny.py", "--workdir=w", "--config.batch.group=1"], "batch.group must be at least 2, got 1"),
    (["train", "--config=configs/tiny.py", "--workdir=w", "--config.mesh.data=3"],
     "a mesh of data 3 x fsdp 1 x tensor 1 does not fit 1 device(s)"),
    (["train", "--config=configs/tiny.py", "--workdir=w", "--config.mesh.tensor=-1"], "only one mesh axis may be -1"),
    (["train", "--config=configs/tiny.py", "--workdir=setup.py"], "workdir 'setup.py' is a file"),
    (["train", "--config=configs/tiny.py", "--workdir=/proc/none"], "cannot write into workdir '/proc/none'"),
    (["train", "--config=configs/tiny.py", "--workdir={tmp}/w", "--config.data.max_prompt_tokens=8"], "20 tokens, over the limit of 8"),
    (["sample", "--model=none", "--prompt=1"], "no folder at 'none'"),
    (["sample", "--model={run}", "--prompt= "], "--prompt is empty"),
    (["sample", "--model={run}", "--prompt=" + "1+" * 30], "over the limit of 24"),
    (["sample", "--model={run}", "--prompt=1", "--step=9"], "no checkpoint of step 9"),
    (["sample", "--model={run}", "--prompt=1", "--top_p=2"], "sampling.top_p must be in (0, 1], got 2.0"),
    (["eval", "--model={run}", "--k=a"], "--k must be whole numbers"),
], ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "")
def test_a_mistake_gets_one_line_and_status_2(args, message, finished_run, tmp_path):
  done = gtpo(*(arg.format(run=finished_run[0], tmp=tmp_path) for arg in args))
  assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("gtpo: ") and message in lines[0], done.stderr
