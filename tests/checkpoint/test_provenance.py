"""What a run must find again: other contents of its data, or another guide, are refused with the difference."""

import dataclasses
import json

import pytest

from gtpo_jax.checkpoint.provenance import check_identity, identity_of
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


def test_the_contents_of_data_files_are_part_of_a_run(tmp_path):
  config = config_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
  given = problems(tmp_path, ROWS)
  identity = lambda train, held_out=given: identity_of(config, [(train, 1.0)], held_out, {})
  began = identity(given)
  assert list(began) == [f"data.train '{tmp_path}/a.jsonl'", f"data.eval '{tmp_path}/b.jsonl'"]
  assert all(what.startswith("3 problems, sha256 ") for what in began.values())
  assert identity(problems(tmp_path, ROWS)) == began
  others = [
    given[:2],
    given[::-1],
    *(
      [dataclasses.replace(given[0], **change), *given[1:]]
      for change in (
        {"answer": "2"},
        {"id": "x"},
        {"kind": "math"},
        {"extra": {"level": 9}},
        {"messages": ({"role": "user", "content": "1+0: "},)},
      )
    ),
  ]
  found = {tuple(identity(other).values()) for other in others} | {
    tuple(identity(given, other).values()) for other in others
  }
  assert len(found) == 2 * len(others) and tuple(began.values()) not in found


def test_a_task_is_what_the_config_says_and_policies_are_their_digests():
  task = make_task("sums", 2, 0)
  frozen = {"guide.path": "0123"}
  assert (
    identity_of(config_of("sums"), [(TaskPart(task, task.train_ids), 1.0)], [], frozen) == frozen
  )


def test_what_has_changed_is_refused_with_the_difference_unless_told():
  said = []
  then = {"data.train 'a'": "3 problems, sha256 aa", "guide.path": "0123"}
  now = then | {"data.train 'a'": "4 problems, sha256 bb"}
  check_identity(then, dict(then), False, said.append)
  check_identity({}, now, False, said.append)
  assert said == []
  with pytest.raises(
    UserError,
    match=r"\(data.train 'a' was 3 problems, sha256 aa, now 4 problems, sha256 bb\); give it what it had",
  ):
    check_identity(then, now, False, said.append)
  check_identity(then, now, True, said.append)
  assert said == [
    "changed since this run began: data.train 'a' was 3 problems, sha256 aa, now 4 problems, sha256 bb"
  ]
