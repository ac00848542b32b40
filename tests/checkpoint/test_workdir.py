"""One owner of a workdir at a time, for as long as it lives."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from gtpo_jax.checkpoint.workdir import claim, load_config
from gtpo_jax.config import Config
from gtpo_jax.config.sections import CheckpointSection
from gtpo_jax.reporting.curves import draw_curves
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from gtpo_jax.config import Config
from gtpo_jax.config.sections import CheckpointSection
from gtpo_jax.checkpoint.workdir import claim
with claim(Path(sys.argv[1]), Config()):
  print("mine", flush=True)
  time.sleep(600)
"""


def own(workdir):
  with claim(workdir, Config()):
    pass


def test_a_second_owner_is_refused_and_told_which_is_the_first(tmp_path):
  with claim(epath.Path(tmp_path / "run"), Config()):
    with pytest.raises(UserError) as error:
      own(tmp_path / "run")
    assert f"is in use by process {os.getpid()} on " in str(error.value) and "\n" not in str(
      error.value
    )
    own(tmp_path / "other")
  own(tmp_path / "run")


def test_the_lock_ends_with_a_killed_process(tmp_path):
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


def test_a_refusal_inside_lets_go(tmp_path):
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


def test_what_is_not_a_checkpoint_goes_through_etils_paths():
  """A bucket's stand-in, kept in memory: no lock, no append, and no local folder of that name."""
  fsspec = pytest.importorskip("fsspec")
  from fsspec.implementations.memory import MemoryFileSystem

  fsspec.register_implementation("gcs", MemoryFileSystem, clobber=True)
  workdir = epath.Path("gs://bucket/run")
  for first, last in ((0, 3), (2, 4)):
    with claim(workdir, Config()):
      journal = Journal(workdir, first, tensorboard=False)
      for step in range(first + 1, last + 1):
        journal.write(step, {"loss": step / 2})
  draw_curves(journal.read(), "title", workdir / "curves.png")
  assert [row["step"] for row in journal.read()] == [1, 2, 3, 4] and load_config(
    workdir
  ) == Config()
  assert (workdir / "curves.png").read_bytes()[:4] == b"\x89PNG" and not Path("gs:").exists()
  assert {path.name for path in workdir.iterdir()} == {"config.json", "curves.png", "metrics.jsonl"}


def test_another_config_is_taken_where_told_so_and_what_differs_is_said(tmp_path):
  run = epath.Path(tmp_path / "run")
  said = []
  own(run)
  (run / "checkpoints" / "3").mkdir(parents=True)
  other = Config(seed=5)
  with (
    pytest.raises(
      UserError, match=r"\(seed was 0, now 5\).* or set checkpoint.accept_changes to go on"
    ),
    claim(run, other),
  ):
    pass
  told = dataclasses.replace(other, checkpoint=CheckpointSection(accept_changes=True))
  with claim(run, told, said.append):
    assert said == ["changed since this run began: seed was 0, now 5"]
  assert load_config(run) == told
