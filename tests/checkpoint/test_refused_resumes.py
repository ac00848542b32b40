"""A run that is refused changes no byte of the workdir that it would have resumed."""

import hashlib
import json
import random
import shutil

import pytest

from gtpo_jax.config import freeze
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train
from gtpo_jax.runtime.errors import RunError, UserError

SMALL = {
  "steps": 2,
  "batch": {"prompts": 2, "group": 4},
  "data": {"terms": 2, "max_prompt_tokens": 20},
  "eval": {"problems": 2, "samples": 1, "batch": 2},
  "model": {"preset": "tiny", "random_weights": True},
  "sampling": {"max_tokens": 8},
}
# What the runs begin with, beside SMALL.
BEGUN = (
  {},
  {"model": {"lora_rank": 2}, "optimizer": {"schedule": "cosine"}},
  {"sampling": {"staleness": 1, "slots": 4, "chunk": 2}},
  {"data": {"train": "rows.jsonl", "eval": "rows.jsonl", "terms": 0}},
)
# What resumed runs may change.
CHANGES = (
  {"seed": 1},
  {"steps": 3},
  {"steps": 1},
  {"eval": {"samples": 2, "temperature": 0.5}},
  {"eval": {"problems": 1}},
  {"algorithm": {"name": "grpo"}},
  {"algorithm": {"alpha2": 0.3}},
  {"algorithm": {"kl_weight": 0.1}},
  {"model": {"lora_rank": 4}},
  {"model": {"lora_rank": 0}},
  {"model": {"param_dtype": "bfloat16"}},
  {"model": {"compute_dtype": "bfloat16"}},
  {"optimizer": {"schedule": "linear"}},
  {"optimizer": {"momentum_dtype": "bfloat16"}},
  {"sampling": {"staleness": 0}},
  {"sampling": {"staleness": 2}},
  {"sampling": {"slots": 8}},
  {"sampling": {"max_tokens": 6}},
  {"batch": {"prompts": 4}},
  {"batch": {"micro_batches": 2}},
  {"data": {"terms": 3}},
  {"data": {"train": "other.jsonl", "eval": "rows.jsonl", "terms": 0}},
)


def merged(*trees):
  """Returns nested dicts as one; later values replace earlier ones."""
  result = {}
  for tree in trees:
    for key, value in tree.items():
      result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
  return result


def attempt(settings, workdir):
  """Starts a run and requests a stop at once; returns the message if it is refused."""
  try:
    train(freeze(settings), workdir, Display(enabled=False), lambda: True)
  except (UserError, RunError) as error:
    return str(error)
  return ""


def contents(folder):
  files = sorted(path for path in folder.rglob("*") if path.is_file())
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
  }


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
  """Workdirs of runs of two steps, one for each of BEGUN, beside their data."""
  folder = tmp_path_factory.mktemp("begun")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    for name in ("rows", "other"):
      rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(4)]
      (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for i, settings in enumerate(BEGUN):
      train(freeze(merged(SMALL, settings)), folder / str(i), Display(enabled=False))
    yield folder


def check(folder, draw):
  """Resumes a copy of one of the workdirs with a few changes; returns the message if refused."""
  i = draw.randrange(len(BEGUN))
  changes = draw.sample(CHANGES, draw.choice((1, 1, 2, 3)))
  accept = {"checkpoint": {"accept_changes": draw.random() < 0.6}}
  workdir = folder / "copy"
  shutil.copytree(folder / str(i), workdir)
  before = contents(workdir)
  message = attempt(merged(SMALL, BEGUN[i], *changes, accept), workdir)
  if message:
    assert "\n" not in message
    assert contents(workdir) == before, (i, changes, accept, message)
    original = attempt(merged(SMALL, BEGUN[i]), workdir)
    assert not original, (i, changes, accept, original)
  shutil.rmtree(workdir)
  return message


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.manual)])
def test_a_refused_resume_changes_no_byte(begun, count):
  draw = random.Random(0)
  messages = [check(begun, draw) for _ in range(count)]
  refused = [message for message in messages if message]
  assert len(refused) > count / 4 and len(set(refused)) > count / 10
