"""A workdir has one owner at a time, and belongs to one config."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.checkpoint.workdir import claim, load_config
from gtpo_jax.config import Config, difference, freeze, resolved_dict
from gtpo_jax.config.monitoring import CheckpointSection
from gtpo_jax.logs.curves import draw_curves
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.spool import open_logs
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.paths import storage_path

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from gtpo_jax.config import Config
from gtpo_jax.config.monitoring import CheckpointSection
from gtpo_jax.checkpoint.workdir import claim
with claim(Path(sys.argv[1]), Config()):
  print("mine", flush=True)
  time.sleep(600)
"""


def own(workdir, config=None):
  with claim(workdir, config or Config()):
    pass


def test_a_second_owner_is_refused_and_the_first_is_named(tmp_path):
  with claim(epath.Path(tmp_path / "run"), Config()):
    with pytest.raises(UserError) as error:
      own(tmp_path / "run")
    assert f"is in use by process {os.getpid()} on " in str(error.value) and "\n" not in str(
      error.value
    )
    own(tmp_path / "other")
  own(tmp_path / "run")


def test_a_killed_process_releases_the_lock(tmp_path):
  owner = subprocess.Popen(
    [sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  try:
    assert owner.stdout.readline() == "mine\n"
    with pytest.raises(UserError, match=f"in use by process {owner.pid} on"):
      own(tmp_path)
  finally:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
  own(tmp_path)


def test_an_error_inside_releases_the_lock(tmp_path):
  with pytest.raises(UserError, match="something else"), claim(tmp_path, Config()):
    raise UserError("something else")
  own(tmp_path)


def test_a_read_only_workdir_is_refused(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  if os.system(f"mount -t tmpfs -o ro none {workdir} 2>/dev/null"):
    pytest.skip("mounting needs root")
  try:
    with pytest.raises(UserError, match=r"cannot write into workdir .*: Read-only file system"):
      own(workdir)
  finally:
    os.system(f"umount {workdir}")


@pytest.mark.slow
def test_the_config_and_the_logs_of_a_workdir_in_a_bucket(store):
  workdir = storage_path(f"{store.url}/run")
  for first, last in ((0, 3), (2, 4)):
    with claim(workdir, Config()), open_logs(workdir) as logs:
      journal = Journal(logs.folder, first, tensorboard=True)
      for step in range(first + 1, last + 1):
        journal.write(step, {"loss": step / 2})
      draw_curves(journal.read(), "title", logs.folder / "curves.png")
      journal.close()
  rows = read_jsonl(workdir / "metrics.jsonl")
  assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
  assert not difference(load_config(workdir), Config())
  assert store.read("run/curves.png")[:4] == b"\x89PNG" and not Path("gs:").exists()
  events = [name for name in store.names("run/") if "tfevents" in name]
  others = ["run/config.json", "run/curves.png", "run/metrics.jsonl/000000"]
  assert events and store.names("run/") == sorted([*others, *events])


def test_another_config_is_accepted_if_allowed_and_the_differences_are_printed(tmp_path):
  run = epath.Path(tmp_path / "run")
  said = []
  own(run)
  (run / "checkpoints" / "3").mkdir(parents=True)
  other = Config(seed=5)
  with (
    pytest.raises(
      UserError, match=r"\(seed was 0, now 5\).* or set checkpoint.accept_changes to continue"
    ),
    claim(run, other),
  ):
    pass
  accepting = dataclasses.replace(other, checkpoint=CheckpointSection(accept_changes=True))
  with claim(run, accepting, said.append) as claimed:
    assert said == ["changed since this run began: seed was 0, now 5"]
    assert not difference(load_config(run), Config())  # until everything has accepted
    claimed.record_config()
  assert not difference(load_config(run), accepting)


def test_what_may_change_depends_on_the_whole_config(tmp_path):
  base = {"optimizer": {"schedule": "cosine"}, "sampling": {"staleness": 1}}
  cases = (
    ({}, {"steps": 7, "sampling": {"slots": 8}}, ""),
    ({"optimizer": {"schedule": "cosine"}}, {"sampling": {"slots": 8}}, ""),
    (base, {"steps": 7}, "steps was 3, now 7, but the schedule of the learning rate depends on it"),
    (base, {"sampling": {"chunk": 8}}, "sampling.chunk was 0, now 8, but with sampling.staleness"),
    (base, {"eval": {"samples": 3}, "mesh": {"fsdp": 1}, "batch": {"micro_batches": 2}}, ""),
    ({}, {"batch": {"group": 8}}, "batch.group was 16, now 8"),
    (
      {"model": {"compute_dtype": "bfloat16"}},
      {"model": {"compute_dtype": "float16"}},
      "compute_dtype was 'bfloat16', now 'float16', set it to 'bfloat16' to continue as before",
    ),
  )
  for i, (settings, change, message) in enumerate(cases):
    before = {"steps": 3, **settings}
    run = started(tmp_path / str(i), resolved_dict(freeze(before)))
    now = freeze(
      {**before, **change, "sampling": {**before.get("sampling", {}), **change.get("sampling", {})}}
    )
    if message:
      with pytest.raises(UserError, match=message):
        own(run, now)
    else:
      own(run, now)


def started(workdir, values):
  """A workdir with a checkpoint, whose config.json has these values."""
  (workdir / "checkpoints" / "3").mkdir(parents=True)
  (workdir / "config.json").write_text(json.dumps(values))
  return workdir


@pytest.mark.parametrize("name", RECIPES)
def test_config_json_has_every_setting_that_the_algorithm_reads(name, tmp_path):
  teacher = {"path": "runs/teacher" if name in ("opd", "rlsd") else ""}
  config = freeze({"algorithm": {"name": name}, "teacher": teacher})
  own(tmp_path / "run", config)
  section = json.loads((tmp_path / "run" / "config.json").read_text())["algorithm"]
  recorded = {key: value for key, value in section.items() if value is not None}
  assert recorded == {"name": name, **config.resolved_algorithm.recipe.settings}
  loaded = load_config(tmp_path / "run")
  assert loaded.resolved_algorithm == config.resolved_algorithm
  assert not difference(loaded, config)


def test_a_published_value_that_has_changed_since_is_refused(tmp_path):
  """The run was started when the published eps_high of gtpo had another value."""
  values = resolved_dict(Config())
  values["algorithm"]["eps_high"] = 0.3
  run = started(tmp_path / "run", values)
  with pytest.raises(UserError, match=r"\(algorithm.eps_high was 0.3, now 0.28\)"):
    own(run)
