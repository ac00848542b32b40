"""Two processes of one run, of which one is killed, asked to stop, unheard, or sees other data: both end, and together go on exactly."""

import json
import shutil

import pytest
from processes import SETTINGS, STEPS, command, left_behind, start, start_two, together

from gtpo_jax.reporting.journal import read_jsonl

TWO_KILLS = [  # each can be reached wherever the ones before it left the run
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
  ("kill:sealed:1", 0),
  ("kill:committed:1", 0),
]


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
    ours = [line for line in printed[1 - victim].splitlines() if line.startswith("gtpo: ")]
    if codes[1 - victim] == 1:  # else JAX's own watch ended it, in its own words
      assert (
        len(ours) == 1
        and f"process {1 - victim} of 2: another process is gone or out of reach" in ours[0]
      ), (event, printed)
      assert "Traceback" not in printed[1 - victim], (event, printed)
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
def test_two_processes_that_do_not_see_the_same_data(tmp_path):
  """As without a file system that both see: they would learn from different problems."""
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
  codes, printed = together([line, own_view])
  assert codes[1] == 2 and codes[0] not in (0, 2), (codes, printed)
  ours = [row for row in printed[1].splitlines() if row.startswith("gtpo: ")]
  assert (
    len(ours) == 1
    and "is not the same everywhere: the first process has 1 problems, sha256 " in ours[0]
  ), printed


@pytest.mark.slow
def test_two_processes_of_which_nobody_reads_one(tmp_path):
  """As `| head` does, or a launcher that is gone: what cannot be printed must not keep the others waiting."""
  line = command(tmp_path / "run", "-", SETTINGS)
  unread = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -c 1', "bash", *line]
  codes, printed = together([unread, line])
  assert codes[0] == 1 and codes[1] not in (0, 2), (codes, printed)


@pytest.mark.slow
def test_a_run_moves_between_one_process_and_two(whole_of_two, tmp_path):
  """What is restored has the digests of what was saved, or it would be set aside."""
  shutil.copytree(whole_of_two[0], tmp_path / "one")
  done = start(tmp_path / "one", "-", SETTINGS | {"steps": STEPS + 1})
  assert (
    done.returncode == 0
    and f"resumed at step {STEPS}" in done.stdout
    and "damaged" not in done.stdout
  ), done.stderr
  codes, printed = start_two(tmp_path / "one", "-", 0, SETTINGS | {"steps": STEPS + 2})
  assert (
    codes == [0, 0] and f"resumed at step {STEPS + 1}" in printed[0] and "damaged" not in printed[0]
  ), printed
  assert [row["step"] for row in read_jsonl(tmp_path / "one" / "metrics.jsonl")] == list(
    range(STEPS + 3)
  )
