"""Tests faults in one of two processes of a run: both end, and together they resume bit for bit.

The process is killed, stopped, cannot print, or reads other data.
"""

import json
import shutil

import pytest
from processes import ROOT, SETTINGS, STEPS, command, read_result, start, start_together, start_two

from gtpo_jax.logs.log_files import read_jsonl

KILLS = [  # (event, victim), ordered so that each point can still be reached
  ("kill:evaluation:1", 0),
  ("kill:sampling:1", 0),
  ("kill:sampling:2", 1),
  ("kill:reward:3", 0),
  ("kill:evaluation:2", 0),
  ("kill:metrics:1", 0),
  ("kill:update:1", 1),
  ("kill:saving:1", 1),
  ("kill:saving:1", 0),
  ("kill:written:1", 0),
  ("kill:recorded:1", 0),
  ("kill:committed:1", 0),
]
STOPS = [  # (event, victim, the step at which the run stops)
  ("term:compile:1", 0, 0),
  ("term:chunk:2", 1, 0),
  ("term:update:3", 0, 3),
  ("term:evaluation chunk:2", 1, 3),
  ("term:saving:1", 0, 4),
  ("term:sampling:1", 1, 4),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The workdir and the result of two processes without a fault."""
  workdir = tmp_path_factory.mktemp("faults") / "two"
  codes, printed = start_two(workdir, "-", 0, SETTINGS)
  assert codes == [0, 0], printed
  assert printed[1].count("\n") <= 2  # the second prints only gloo's line
  return workdir, read_result(workdir)


def kill_one(run, event, victim):
  """Kills one of two processes; the other exits soon with one message."""
  codes, printed = start_two(run, event, victim, SETTINGS)
  assert codes[victim] == -9 and codes[1 - victim] not in (0, 2), (event, codes, printed)
  assert "damaged" not in printed[0]
  ours = [line for line in printed[1 - victim].splitlines() if line.startswith("gtpo: ")]
  if codes[1 - victim] == 1:  # otherwise JAX's coordinator ended it, with its own message
    assert len(ours) == 1, (event, printed)
    assert f"process {1 - victim} of 2: another process exited or is unreachable" in ours[0]
    assert "Traceback" not in printed[1 - victim], (event, printed)


def stop_together(run, event, victim, step):
  """Asks one of two processes to stop; both do, and the state of the last step is saved."""
  codes, printed = start_two(run, event, victim, SETTINGS)
  assert codes[victim] == 143 and codes[1 - victim] in (130, 143), (event, codes, printed)
  assert f"stopped at step {step} of {STEPS}; saved" in printed[0], (event, printed)
  assert max(int(entry.name) for entry in (run / "checkpoints").iterdir()) == step
  assert "Traceback" not in "".join(printed), (event, printed)


def resumes_exactly(run, undisturbed):
  codes, printed = start_two(run, "-", 0, SETTINGS)
  assert codes == [0, 0] and "damaged" not in printed[0], printed
  assert read_result(run) == undisturbed[1]


@pytest.mark.manual
def test_one_of_two_processes_is_killed_at_every_point(undisturbed, tmp_path):
  for event, victim in KILLS:
    kill_one(tmp_path / "run", event, victim)
  resumes_exactly(tmp_path / "run", undisturbed)


@pytest.mark.manual
def test_two_processes_stop_together_in_every_phase(undisturbed, tmp_path):
  for event, victim, step in STOPS:
    stop_together(tmp_path / "run", event, victim, step)
  resumes_exactly(tmp_path / "run", undisturbed)


def refused(codes, printed, message):
  """Both processes have refused to begin, in one line that says why."""
  assert codes == [2, 2], (codes, printed)
  for text in printed:
    ours = [row for row in text.splitlines() if row.startswith("gtpo: ")]
    assert len(ours) == 1 and "Traceback" not in text, printed
    assert "is not the same on all processes: " in ours[0] and message in ours[0], printed


@pytest.mark.slow
@pytest.mark.parametrize(
  ("settings", "variables", "message"),
  [
    pytest.param(
      {"optimizer.learning_rate": 3e-3},
      {},
      "optimizer.learning_rate is not",
      marks=pytest.mark.manual,
    ),
    ({"seed": 5, "steps": 9}, {}, "the first process has 0, process 1 5; nor are steps; start"),
    pytest.param({"data.train": "countdown"}, {}, "data.train is not", marks=pytest.mark.manual),
    ({}, {"JAX_ENABLE_X64": "1"}, "the first process has False, process 1 True"),
    ({}, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "XLA_FLAGS is not"),
  ],
)
def test_two_processes_that_differ_do_not_begin(settings, variables, message, tmp_path):
  lines = [command(tmp_path / "run", "-", SETTINGS | more) for more in ({}, settings)]
  lines[1] = ["env", *(f"{name}={value}" for name, value in variables.items()), *lines[1]]
  refused(*start_together(lines), message)
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_with_one_relative_workdir_in_two_folders_do_not_begin(tmp_path):
  line = command("run", "-", SETTINGS)
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "configs").symlink_to(ROOT / "configs")
  lines = [["env", f"--chdir={tmp_path / name}", *line] for name in ("a", "b")]
  refused(*start_together(lines), "/a/run, process 1 ")


@pytest.mark.slow
def test_an_error_of_one_process_is_told_to_the_other(tmp_path):
  lines = [command(tmp_path / "run", "-", SETTINGS | more) for more in ({}, {"seed": -1})]
  codes, printed = start_together(lines)
  assert codes == [2, 2], (codes, printed)
  assert "gtpo: process 1 of 2: seed must be" in printed[1]
  assert "gtpo: process 0 of 2: process 1 has failed: seed must be" in printed[0]


@pytest.mark.slow
def test_two_processes_with_different_data_are_rejected(tmp_path):
  """Without a shared file system, they would train on different problems."""
  for name, answer in (("first", 12), ("second", 13)):
    (tmp_path / name).write_text(
      json.dumps({"prompt": "10+2:", "answer": answer, "kind": "last_number"}) + "\n"
    )
  data = tmp_path / "data.jsonl"
  data.write_bytes((tmp_path / "first").read_bytes())
  line = command(tmp_path / "run", "-", SETTINGS | {"data.train": data, "data.eval": "sums"})
  own_view = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    f'mount --bind {tmp_path / "second"} {data} && exec "$@"',
    "sh",
    *line,
  ]
  codes, printed = start_together([line, own_view])
  refused(codes, printed, "the first process has 1 problems, sha256 ")


@pytest.mark.slow
def test_one_of_two_processes_has_a_closed_output_pipe(tmp_path):
  """This happens with `| head` or if the launcher exits. The other process must not wait for it."""
  line = command(tmp_path / "run", "-", SETTINGS)
  unread = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -c 1', "bash", *line]
  codes, printed = start_together([unread, line])
  assert codes[0] == 1, (codes, printed)
  assert codes[1] not in (0, 2), (codes, printed)


@pytest.mark.slow
def test_a_run_moves_between_one_process_and_two(undisturbed, tmp_path):
  """If the restored state did not have the saved digests, it would be reported as damaged."""
  shutil.copytree(undisturbed[0], tmp_path / "one")
  done = start(tmp_path / "one", "-", SETTINGS | {"steps": STEPS + 1})
  assert done.returncode == 0, done.stderr
  assert f"resumed at step {STEPS}" in done.stdout
  assert "damaged" not in done.stdout
  codes, printed = start_two(tmp_path / "one", "-", 0, SETTINGS | {"steps": STEPS + 2})
  assert codes == [0, 0], printed
  assert f"resumed at step {STEPS + 1}" in printed[0]
  assert "damaged" not in printed[0]
  rows = read_jsonl(tmp_path / "one" / "metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(STEPS + 3))


@pytest.mark.manual
def test_two_processes_carry_tokens_over_together(tmp_path):
  """Both go on with the same completions, after a kill too."""
  settings = {
    **SETTINGS,
    "steps": 4,
    "eval.every": 0,
    "sampling.staleness": 1,
    "sampling.slots": 6,
    "sampling.chunk": 3,
    "algorithm.tis_cap": 2.0,
  }
  codes, printed = start_two(tmp_path / "whole", "-", 0, settings)
  assert codes == [0, 0], printed
  expected = read_result(tmp_path / "whole")
  assert max(row.get("groups/unfinished", 0) for row in expected[0]) > 0
  codes, printed = start_two(tmp_path / "run", "kill:chunk:20", 1, settings)
  assert codes[1] == -9, printed
  codes, printed = start_two(tmp_path / "run", "-", 0, settings)
  assert codes == [0, 0], printed
  assert read_result(tmp_path / "run") == expected
