"""A run resumes only with the data and policies it began with, or names what has changed."""

import dataclasses
import json

import pytest

from gtpo_jax.checkpoint.provenance import check_provenance, provenance_of
from gtpo_jax.config import default_config, freeze
from gtpo_jax.data.sources import load_source
from gtpo_jax.data.tasks import TaskPart, make_task
from gtpo_jax.runtime.errors import UserError

ROWS = [
  {"prompt": f"1+{i}:", "answer": str(i + 1), "kind": "last_number", "extra": {"level": i}}
  for i in range(3)
]


def config_of(train, evaluation=""):
  config = default_config()
  config.data.train = str(train)
  config.data.eval = str(evaluation)
  return freeze(config)


def problems(folder, rows):
  file = folder / "a.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return list(load_source(str(file)).problems)


def test_provenance_covers_the_contents_of_data_files(tmp_path):
  config = config_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
  original = problems(tmp_path, ROWS)

  def provenance(train, held_out=original):
    return provenance_of(config, [(train, 1.0)], held_out)

  expected = provenance(original)
  assert list(expected) == [
    f"data.train '{tmp_path}/a.jsonl'",
    f"data.eval '{tmp_path}/b.jsonl' (eval.problems = 500)",
  ]
  assert all(value.startswith("3 problems, sha256 ") for value in expected.values())
  assert provenance(problems(tmp_path, ROWS)) == expected
  others = [
    original[:2],
    original[::-1],
    *(
      [dataclasses.replace(original[0], **change), *original[1:]]
      for change in (
        {"answer": "2"},
        {"id": "x"},
        {"kind": "math"},
        {"extra": {"level": 9}},
        {"messages": ({"role": "user", "content": "1+0: "},)},
      )
    ),
  ]
  changed = {tuple(provenance(other).values()) for other in others}
  changed |= {tuple(provenance(original, other).values()) for other in others}
  assert len(changed) == 2 * len(others) and tuple(expected.values()) not in changed


def test_tasks_are_omitted():
  task = make_task("sums", 2, 0)
  assert provenance_of(config_of("sums"), [(TaskPart(task, task.train_ids), 1.0)], []) == {}


def test_a_change_is_refused_with_the_difference_unless_accepted():
  said = []
  saved = {"data.train 'a'": "3 problems, sha256 aa", "guide.path": "0123"}
  current = saved | {"data.train 'a'": "4 problems, sha256 bb"}
  check_provenance(saved, dict(saved), False, said.append)
  check_provenance({}, current, False, said.append)
  assert said == []
  with pytest.raises(
    UserError,
    match=r"\(data.train 'a' was 3 problems, sha256 aa, now 4 problems, sha256 bb\); restore them",
  ):
    check_provenance(saved, current, False, said.append)
  check_provenance(saved, current, True, said.append)
  change = "data.train 'a' was 3 problems, sha256 aa, now 4 problems, sha256 bb"
  assert said == [f"changed since this run began: {change}"]
