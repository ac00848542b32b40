"""One owner of a workdir at a time, for as long as it lives."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_jax.config import Config
from gtpo_jax.errors import UserError
from gtpo_jax.workdir import claim

ROOT = Path(__file__).parents[1]
OWNER = """
import sys, time
from pathlib import Path
from gtpo_jax.config import Config
from gtpo_jax.workdir import claim
with claim(Path(sys.argv[1]), Config()):
  print("mine", flush=True)
  time.sleep(600)
"""


def own(workdir):
  with claim(workdir, Config()):
    pass


def test_a_second_owner_is_refused_and_told_which_is_the_first(tmp_path):
  with claim(tmp_path / "run", Config()):
    with pytest.raises(UserError) as error:
      own(tmp_path / "run")
    assert f"is in use by process {os.getpid()} on " in str(error.value) and "\n" not in str(error.value)
    own(tmp_path / "other")
  own(tmp_path / "run")


def test_the_lock_ends_with_a_killed_process(tmp_path):
  owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], cwd=ROOT,
                           stdout=subprocess.PIPE, text=True)
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
