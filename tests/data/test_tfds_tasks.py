"""Builds the synthetic tasks as a TFDS dataset and reads them back.

Each test runs its own process, since TFDS reads the environment variable of its folder only once.
"""

import json
import os
import subprocess
import sys

import pytest

from gtpo_jax.data.tasks import make_task

READ = """
import json, sys
from gtpo_jax.data.sources import load_source
loaded = load_source(sys.argv[1])
assert "tensorflow" not in sys.modules
row = lambda p: [p.id, p.messages[0]["content"], p.answer, p.kind, dict(p.extra)]
print(json.dumps([loaded.rows, list(map(row, loaded.problems))]))
"""


def read(name, folder):
  environment = {**os.environ, "TFDS_DATA_DIR": str(folder)}
  done = subprocess.run(
    [sys.executable, "-c", READ, name],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


def expected(task, ids):
  problems = [task.problem(int(i)) for i in ids]
  return [[p.id, p.messages[0]["content"], p.answer, p.kind, dict(p.extra)] for p in problems]


@pytest.mark.slow
def test_sums_are_built_and_read_back(tmp_path):
  task = make_task("sums", 1)
  num_train, train = read("tfds:gtpo_tasks/sums_1:train", tmp_path)
  num_test, test = read("tfds:gtpo_tasks/sums_1:test", tmp_path)
  assert (num_train, num_test) == (len(task.train_ids), len(task.held_out_ids))
  assert sorted(train) == sorted(expected(task, task.train_ids))
  assert sorted(test) == sorted(expected(task, task.held_out_ids))
  names = [file.name for file in tmp_path.rglob("*")]
  assert any(name.endswith("-of-00001") and "array_record" in name for name in names)


@pytest.mark.slow
def test_countdown_keeps_its_numbers(tmp_path):
  task = make_task("countdown", 3)
  num_test, test = read("tfds:gtpo_tasks/countdown_3:test", tmp_path)
  assert num_test == len(task.held_out_ids)
  numbers = [int(problem[0].split("-")[1]) for problem in test]
  assert test == expected(task, numbers)
