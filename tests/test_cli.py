"""Runs the command line in real processes: exit codes, and a one-line error for every mistake."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from command_line import ROOT, SMALL, TRAIN, command_line, environment, gtpo, quick_command_line

from gtpo_jax import cli
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.text import visible
from gtpo_jax.rewards import last_number_correct


def test_the_closing_line_of_a_run_has_one_of_its_prompts(finished_run):
  workdir, printed = finished_run
  (line,) = [line for line in printed.splitlines() if "; try: " in line]
  *_, model, prompt = shlex.split(line)
  assert model == f"--model={workdir}"
  assert prompt.removeprefix("--prompt=") in {
    row["prompt"] for row in read_jsonl(workdir / "samples.jsonl")
  }


def test_train_prints_its_result(finished_run):
  workdir, out = finished_run
  assert "warm-started base model: held-out pass@1" in out
  assert "gtpo: held-out pass@1" in out
  assert "points" in out
  assert str(workdir / "curves.png") in out
  assert "\x1b" not in out  # plain lines without a terminal


def test_sample_prints_completions(finished_run, capsys):
  args = ["sample", f"--model={finished_run[0]}", "--prompt=12+3+4:", "--n=3", "--temperature=0"]
  assert cli.main(args) == 0
  out, err = capsys.readouterr()
  lines = out.splitlines()
  assert len(lines) == 3
  assert len(set(lines)) == 1  # greedy
  assert err == ""


def test_sample_sends_no_control_characters_to_a_terminal(finished_run, capsys, monkeypatch):
  """The tokens of an almost uniform distribution contain some. A file gets them as they are."""
  args = ["sample", f"--model={finished_run[0]}", "--prompt=1+2:", "--temperature=100"]
  controls = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
  assert cli.main(args) == 0
  plain = capsys.readouterr().out
  assert controls.search(plain)
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  assert cli.main(args) == 0
  shown = capsys.readouterr().out
  assert not controls.search(shown)
  assert shown == visible(plain, "\n\t")


def test_sample_ends_at_a_stop_string(finished_run, capsys, monkeypatch):
  """A terminal, to which text goes while it is sampled, shows no part of the string either."""
  args = ["sample", f"--model={finished_run[0]}", "--prompt=12+3+4:", "--temperature=0"]

  def printed(*options):
    assert cli.main([*args, *options]) == 0
    return capsys.readouterr().out[:-1]

  whole = printed()
  assert len(whole) > 4
  for terminal in (False, True):
    monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
    for stop in (whole[2:4], whole[3:5], whole[:1], whole[1:]):
      expected = whole[: whole.index(stop)]
      assert printed(f"--stop={stop}", "--stop=never") == expected, (terminal, stop)


@pytest.mark.slow
def test_sample_from_the_base_model_of_a_run_on_more_devices(finished_run, tmp_path):
  """--step=0 selects the base model, --max_tokens=1 works, and the run's mesh is ignored."""
  workdir = tmp_path / "pod"
  shutil.copytree(finished_run[0], workdir)
  config = json.loads((workdir / "config.json").read_text())
  config["mesh"] = {"data": 2, "fsdp": 8, "tensor": 4}
  (workdir / "config.json").write_text(json.dumps(config))
  user_environment = environment()
  user_environment.pop("JAX_PLATFORMS", None)  # set only in tests
  args = command_line(
    "sample", f"--model={workdir}", "--prompt=12+3+4:", "--step=0", "--max_tokens=1"
  )
  done = subprocess.run(
    args, cwd=ROOT, env=user_environment, capture_output=True, text=True, timeout=300
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert len(done.stdout.strip()) <= 10  # one token


def test_eval_prints_and_writes_json(finished_run, tmp_path, capsys):
  """The numbers are those of the completions, which are written too, with right verdicts."""
  rows = [
    {"id": f"q{i}", "prompt": f"1{i}+{i % 7 + 1}+2:", "answer": (5, 2, 8)[i % 3]} for i in range(10)
  ]
  data = tmp_path / "sums.jsonl"
  data.write_text("".join(json.dumps(row | {"kind": "last_number"}) + "\n" for row in rows))
  args = ["eval", f"--model={finished_run[0]}", f"--data={data}", "--k=1,4"]
  args += [f"--json={tmp_path / 'out.json'}", f"--completions={tmp_path / 'completions.jsonl'}"]
  assert cli.main([*args, "--config.eval.temperature=0.5"]) == 0
  numbers = json.loads((tmp_path / "out.json").read_text())
  assert numbers["settings"]["eval.temperature"] == 0.5  # of the run's config, here only
  assert (numbers["step"], numbers["problems"], numbers["samples"]) == (2, 8, 4)
  verdicts = []
  for row in map(json.loads, (tmp_path / "completions.jsonl").read_text().splitlines()):
    assert row["prompt"] == next(x["prompt"] for x in rows if x["id"] == row["id"])
    verdicts.append([sample["correct"] for sample in row["samples"]])
    for sample in [*row["samples"], row["greedy"]]:
      is_right = last_number_correct(sample["text"], row["answer"]) and sample["finished"]
      assert sample["correct"] == is_right == bool(sample["reward"])
  share = sum(map(sum, verdicts)) / 32
  assert numbers["eval/sums/pass@1"] == pytest.approx(share)
  assert numbers["eval/sums/mean@4"] == pytest.approx(share)
  assert numbers["eval/sums/pass@4"] == pytest.approx(sum(map(any, verdicts)) / 8)
  printed = capsys.readouterr().out
  assert f"{data}: 10 problems of 10 rows" in printed and "eval/sums/pass@4" in printed
  assert "8 of them are evaluated (eval.problems)" in printed
  cut_off = numbers["eval/sums/cut_off"]
  warned = "were cut off at sampling.max_tokens" in printed
  assert warned == (cut_off > 0.2)


def test_eval_warns_of_completions_that_are_cut_off(finished_run, capsys):
  args = ["eval", f"--model={finished_run[0]}", "--config.sampling.max_tokens=2"]
  assert cli.main([*args, "--config.eval.samples=1"]) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  assert re.fullmatch(
    r"warning: \d+% of the completions were cut off at sampling.max_tokens = 2, and count as "
    r"wrong; raise it, with --config.sampling.max_tokens=4 for example",
    last,
  )


@pytest.mark.slow
def test_plan_makes_the_virtual_devices_it_plans_for():
  done = gtpo("plan", *TRAIN[1:], "--topology=cpu:2", "--lengths=lognormal:2,2")
  assert done.returncode == 0 and "fits" in done.stdout, done.stderr
  said = r"staleness +slots idle \d+% of sampling; sampling.staleness=[12] would .*lognormal:2,2, "
  said += r"of which 6% reach sampling\.max_tokens = 36\)"
  assert re.search(said, done.stdout), done.stdout


@pytest.mark.slow
def test_doctor_finds_this_machine_ready():
  done = gtpo("doctor")
  assert done.returncode == 0
  assert "jax" in done.stdout
  ready, command = done.stdout.splitlines()[-1].split(": ")
  assert ready == "ready"
  assert command.endswith("-m gtpo_jax train --config=tiny --workdir=runs/tiny")
  program = shlex.split(command)[:3]
  again = subprocess.run([*program, "--version"], cwd=ROOT, env=environment(), check=True)
  assert again.returncode == 0


def test_doctor_names_what_the_sandbox_lacks(tmp_path):
  """A machine without bubblewrap can train, but cannot score programs."""
  env = {**environment(), "PATH": str(tmp_path)}
  done = subprocess.run(
    command_line("doctor"), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
  )
  (line,) = [line for line in done.stdout.splitlines() if line.startswith("sandbox")]
  assert done.returncode == 0
  message = "none, so programs cannot be scored: bwrap is not installed: install bubblewrap"
  assert message in line


@pytest.mark.manual
def test_ctrl_c_on_a_terminal_says_that_the_run_will_be_saved(tmp_path):
  """The run's output is a pseudo-terminal.

  `tests/logs/test_display.py` tests what the panel says the run is waiting for; steps here may
  end before the panel is drawn again.
  """
  workdir = tmp_path / "run"
  args = ["train", "--config=tiny", f"--workdir={workdir}", "--config.steps=2000", *SMALL]
  mine, its = pty.openpty()
  env = {**environment(), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
  process = subprocess.Popen(
    quick_command_line(*args, "--config.eval.every=0"),
    cwd=ROOT,
    env=env,
    stdin=its,
    stdout=its,
    stderr=its,
  )
  os.close(its)
  shown = bytearray()

  def read():
    while True:
      try:
        data = os.read(mine, 4096)
      except OSError:  # the process has ended
        return
      if not data:
        return
      shown.extend(data)

  reader = threading.Thread(target=read)
  reader.start()
  try:
    wait_for_step(workdir, 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
  finally:
    process.kill()
    reader.join(10)
    os.close(mine)
  screen = shown.decode(errors="replace")
  _, said, after = screen.partition("stopping as soon as possible, then saving")
  assert said
  assert re.search(r"stopped at step \d+ of 2000; saved", after)


def wait_for_step(workdir, step, process):
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline and process.poll() is None:
    file = workdir / "metrics.jsonl"
    if file.exists() and f'"step": {step},' in file.read_text():
      return
    time.sleep(0.05)
  pytest.fail(f"step {step} was not reached")


def test_the_process_exits_with_the_status():
  done = gtpo("trian")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("gtpo: unknown command 'trian'")
