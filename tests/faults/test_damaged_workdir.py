"""If files of a workdir were damaged between two runs, the logs end as if nothing had happened.

If something cannot be restored, the run says what. In each test a complete run of six steps is
copied, loses its newest checkpoint, is damaged in one way, and resumes from step 4.
"""

import random
import shutil

import pytest
from small_run import logs, train

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.cli.report.report import make_report
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.runtime.errors import UserError

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
  """The workdir of an undisturbed run."""
  workdir = tmp_path_factory.mktemp("damaged") / "complete"
  train(workdir)
  assert Checkpoints(workdir / "checkpoints").steps() == [2, 4, 6]
  return workdir


@pytest.fixture
def run(complete, tmp_path):
  """A copy that resumes from step 4."""
  shutil.copytree(complete, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
  return tmp_path / "run"


def lines_of(file):
  return file.read_bytes().splitlines(keepends=True)


def cut(workdir, name, index):
  """Truncates one line of a file."""
  lines = lines_of(workdir / name)
  lines[index] = lines[index][:20] + b"\n"
  (workdir / name).write_bytes(b"".join(lines))


def insert(workdir, name, line, index=1):
  lines = lines_of(workdir / name)
  (workdir / name).write_bytes(b"".join([*lines[:index], line + b"\n", *lines[index:]]))


def duplicate(workdir, name, index):
  lines = lines_of(workdir / name)
  insert(workdir, name, lines[index].rstrip(), index)


def swap(workdir, first, second):
  checkpoints = workdir / "checkpoints"
  (checkpoints / first).rename(checkpoints / "other")
  (checkpoints / second).rename(checkpoints / first)
  (checkpoints / "other").rename(checkpoints / second)


def remove_records(workdir):
  for record in (workdir / "checkpoints").rglob("integrity_record"):
    record.unlink()


def replace_by_folder(workdir, name):
  if (workdir / name).is_dir():
    shutil.rmtree(workdir / name)
  else:
    (workdir / name).unlink(missing_ok=True)
  (workdir / name).mkdir()


def replace_by_file(workdir, name):
  shutil.rmtree(workdir / name)
  (workdir / name).write_bytes(b"not a folder")


LINES = {  # damage to files, and the message about it; one run gets all of it
  "a byte in samples": (
    lambda run: insert(run, "samples.jsonl", b"\xff\xfe"),
    "samples.jsonl had 1 damaged line(s), which were removed",
  ),
  "deep evaluations": (
    lambda run: insert(run, "evaluations.jsonl", DEEP.encode()),
    "evaluations.jsonl had 1 damaged line(s), which were removed",
  ),
  "metrics without a step": (
    lambda run: insert(run, "metrics.jsonl", b'{"loss": 1.0}'),
    "metrics.jsonl had 2 damaged line(s), which were removed",
  ),
  "a number that no float can hold": (
    lambda run: insert(run, "metrics.jsonl", b'{"step": 1, "loss": 1' + b"0" * 400 + b"}"),
    "metrics.jsonl had 2 damaged line(s), which were removed",
  ),
  "a line of samples twice": (lambda run: duplicate(run, "samples.jsonl", 2), ""),
  "a line of evaluations twice": (lambda run: duplicate(run, "evaluations.jsonl", 0), ""),
  "the last line of metrics twice": (lambda run: duplicate(run, "metrics.jsonl", -3), ""),
  "temporary files": (
    lambda run: [
      (run / name).write_bytes(b"\xff")
      for name in ("metrics.tmp", "config.tmp", "samples.tmp", "evaluations.tmp", "credit/2.tmp")
    ],
    "",
  ),
  "a lock with other bytes": (lambda run: (run / "lock").write_bytes(b"\xff\0" * 99), ""),
  "a damaged plot": (lambda run: (run / "curves.png").write_bytes(b""), ""),
}

HEALED = {
  "damaged lines and small files": (
    lambda run: [damage(run) for damage, _ in LINES.values()],
    sorted({message for _, message in LINES.values()}),
  ),
  "lines in another order": (
    lambda run: (run / "metrics.jsonl").write_bytes(
      b"".join(sorted(lines_of(run / "metrics.jsonl"), reverse=True))
    ),
    [],
  ),
  "evaluations torn": (
    lambda run: [cut(run, "evaluations.jsonl", index) for index in range(3)],
    [
      "evaluations.jsonl had 3 damaged line(s), which were removed",
      "the evaluation of step 0 was damaged, and was computed again",
      "the evaluation of step 2 was damaged, and was computed again",
    ],
  ),
  "a folder of evaluations": (
    lambda run: replace_by_folder(run, "evaluations.jsonl"),
    ["evaluations.jsonl was not a file and was renamed to evaluations.jsonl.damaged"],
  ),
  "the first row of metrics torn": (
    lambda run: cut(run, "metrics.jsonl", 0),
    ["the evaluation of step 0 was damaged, and was computed again"],
  ),
  "the integrity record of the newest checkpoint emptied": (
    lambda run: (run / "checkpoints" / "4" / "integrity_record").write_bytes(b""),
    ["the checkpoint of step 4 is damaged"],
  ),
  "no integrity records": (
    remove_records,
    ["integrity_record is missing", "there is none before it"],
  ),
  "two checkpoints swapped": (
    lambda run: swap(run, "2", "4"),
    ["the checkpoint of step 4 is damaged (it contains step 2)"],
  ),
}


@pytest.mark.some(0, slow=2)
@pytest.mark.parametrize("case", HEALED)
def test_damage_that_can_be_repaired(case, complete, run):
  damage, messages = HEALED[case]
  damage(run)
  result, said = train(run)
  assert result.finished
  assert logs(run) == logs(complete)
  for message in messages:
    assert message in "\n".join(said)
  if case == "a folder of evaluations":  # it leaves a folder behind; the other logs are as before
    assert len(make_report([run])) > 10_000


LOST = {
  "a row of metrics torn": (
    lambda run: cut(run, "metrics.jsonl", 3),
    ["metrics.jsonl lacks step 3, which cannot be known again"],
    {"metrics": [3]},
  ),
  "a folder of metrics": (
    lambda run: replace_by_folder(run, "metrics.jsonl"),
    [
      "metrics.jsonl was not a file and was renamed to metrics.jsonl.damaged",
      "metrics.jsonl lacks steps 1, 2, 3, 4, which cannot be known again",
    ],
    {"metrics": [1, 2, 3, 4]},
  ),
  "samples, an evaluation, its checkpoint and credit": (
    lambda run: [
      cut(run, "samples.jsonl", 4),
      cut(run, "samples.jsonl", 5),
      cut(run, "evaluations.jsonl", 1),
      shutil.rmtree(run / "checkpoints" / "2"),
      (run / "credit" / "2.npz").write_bytes(b"\xff" * 99),
    ],
    [
      "samples.jsonl lacks step 3, which cannot be known again",
      "the evaluation of step 2 was damaged, and its intervals are lost: no checkpoint of step 2",
      "credit/2.npz is damaged and was renamed to 2.npz.damaged",
    ],
    {"samples": [3], "evaluations": [2], "credit": [2]},
  ),
  "a file instead of records of credit": (
    lambda run: replace_by_file(run, "credit"),
    [
      "credit was not a folder and was renamed to credit.damaged",
      "credit lacks steps 1, 2, 4, which cannot be known again",
    ],
    {"credit": [1, 2, 4]},
  ),
}


@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize("case", LOST)
def test_damage_that_cannot_be_repaired_is_reported(case, complete, run):
  """Except for the steps that are reported as missing, the logs are those of the complete run."""
  damage, messages, lacking = LOST[case]
  damage(run)
  result, said = train(run)
  assert result.finished
  for message in messages:
    assert any(message in line for line in said), said
  expected, found = logs(complete), logs(run)
  for name, steps in lacking.items():
    step_of = lambda row: row if isinstance(row, int) else row["step"]
    for both in (expected, found):
      both[name] = [row for row in both[name] if step_of(row) not in steps]
  assert found == expected


def damage_at_random(file, draw):
  """Removes, inserts, zeroes, repeats or moves a piece of a file, or truncates it."""
  data = file.read_bytes()
  start, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
  end = min(end, start + draw.choice([1, 40, 4000]))
  piece, rest = data[start:end], data[:start] + data[end:]
  other = draw.randrange(len(rest) + 1)
  file.write_bytes(
    draw.choice(
      [
        rest,
        data[:start] + draw.randbytes(9) + data[start:],
        data[:start] + bytes(end - start) + data[end:],
        data[:end] + piece + data[end:],
        rest[:other] + piece + rest[other:],
        data[:start],
      ]
    )
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "seed", [0, *(pytest.param(seed, marks=pytest.mark.manual) for seed in range(1, 40))]
)
def test_random_damage_to_every_log(seed, complete, run):
  """The run ends in the same state, and each log has each of its steps at most once, in order."""
  draw = random.Random(seed)
  files = [file for file in run.rglob("*") if file.is_file() and file.name != "config.json"]
  files = [file for file in files if file.relative_to(run).parts[0] not in ("checkpoints", "base")]
  assert len(files) >= 8
  for file in files:
    if draw.random() < 0.7:
      damage_at_random(file, draw)
  result, said = train(run)
  assert result.finished and not any("\n" in line for line in said)
  found = logs(run)
  assert found["leaves"] == logs(complete)["leaves"]
  for name in ("metrics", "evaluations"):
    steps = [row["step"] for row in found[name]]
    assert steps == sorted(set(steps)) and steps[-1] == 6, name
  assert len(make_report([run])) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (b"\xff\xfe", "is not valid JSON"),
    (b'{"steps": 1, "steps": 2}', "has the key 'steps' twice (1 and 2)"),
    (DEEP.encode(), "is not valid JSON"),
    pytest.param(
      b'{"a":' * 400 + b"1" + b"}" * 400, "is not usable: unknown", marks=pytest.mark.manual
    ),
    pytest.param(b"[]", "is not a config", marks=pytest.mark.manual),
    pytest.param(b"", "is not valid JSON", marks=pytest.mark.manual),
    (None, "is not a file"),
  ],
  ids=["bytes", "twice", "deep", "nested", "list", "empty", "folder"],
)
def test_a_damaged_config_is_refused(content, reason, complete, run):
  if content is None:
    replace_by_folder(run, "config.json")
  else:
    (run / "config.json").write_bytes(content)
  messages = []
  for use in (train, lambda run: make_report([run])):
    with pytest.raises(UserError) as error:
      use(run)
    messages.append(str(error.value))
    assert "config.json" in messages[-1]
    assert "\n" not in messages[-1] and len(messages[-1]) < 600
  assert reason in messages[0]
  if content == DEEP.encode():
    (run / "config.json").unlink()
    train(run)
    assert logs(run) == logs(complete)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints", "base"])
def test_a_file_in_place_of_the_checkpoints_is_refused(name, run):
  shutil.rmtree(run / "checkpoints")
  (run / "checkpoints").mkdir()
  replace_by_file(run, name)
  with pytest.raises(UserError, match="must be a folder of checkpoints, but is a file; remove it"):
    train(run)


@pytest.mark.slow
def test_an_evaluation_at_an_earlier_end_is_repeated(tmp_path):
  """A run that was extended after step 3, and then lost that step, evaluates it again."""
  train(tmp_path / "run", steps=3)
  train(tmp_path / "run")
  steps = lambda: [row["step"] for row in read_jsonl(tmp_path / "run" / "evaluations.jsonl")]
  assert steps() == [0, 2, 3, 4, 6]
  for folder in (tmp_path / "run" / "checkpoints").iterdir():
    if folder.name != "2":
      shutil.rmtree(folder)
  expected = read_jsonl(tmp_path / "run" / "evaluations.jsonl")
  train(tmp_path / "run")
  assert steps() == [0, 2, 3, 4, 6]
  assert read_jsonl(tmp_path / "run" / "evaluations.jsonl") == expected
