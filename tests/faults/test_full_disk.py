"""The disk becomes full, or a quota is used up, just before a run opens one of its files.

The workdir is on a file system of its own. The run ends with one error that names the cause.
Once there is space, the same run ends as if nothing had happened.
"""

import errno
import os
import re
import shutil
import sys

import pytest
from small_run import logs, train

from gtpo_jax.runtime.errors import RunError, UserError

CHANGES = {"steps": 2, "log": {"credit_every": 1}}


class OpenedFiles:
  """Audits the files that are opened for writing in a folder, and may act before one of them is.

  Numbers in their names are replaced by N. Only files that Python opens are seen: those of arrays
  are opened by TensorStore.
  """

  def __init__(self):
    self._folder = None
    sys.addaudithook(self._hook)  # for the rest of the process; does nothing without a folder

  def watch(self, folder, name=None, act=None):
    """Collects the names in `names`; calls `act` when the file `name` is first opened."""
    self.names = set()
    self._folder, self._name, self._act = folder and str(folder), name, act

  def _hook(self, event, args):
    if event != "open" or self._folder is None or not isinstance(args[0], str | bytes):
      return
    path = os.fsdecode(args[0])
    if not path.startswith(self._folder + os.sep) or not args[2] & (os.O_WRONLY | os.O_RDWR):
      return
    name = re.sub(r"\d+", "N", os.path.relpath(path, self._folder))
    self.names.add(name)
    if name == self._name and self._act:
      act, self._act = self._act, None
      act()


@pytest.fixture
def disk(tmp_path):
  """A file system of 64 MiB, and the error of a write when it is full."""
  folder = tmp_path / "disk"
  folder.mkdir()
  if os.system(f"mount -t tmpfs -o size=64m none {folder} 2>/dev/null"):
    pytest.skip("mounting needs root")
  yield folder, errno.ENOSPC
  os.system(f"umount --lazy {folder}")


@pytest.fixture
def quota(tmp_path):
  """A folder with a quota of 64 MiB on a larger file system, and the error of a write beyond it."""
  image = tmp_path / "image"
  folder = tmp_path / "volume"
  folder.mkdir()
  with image.open("wb") as file:
    file.truncate(512 << 20)
  commands = (
    f"mkfs.btrfs -q {image}",
    f"mount -o loop {image} {folder}",
    f"btrfs quota enable {folder}",
    f"btrfs subvolume create {folder}/disk",
    f"btrfs qgroup limit 64M {folder}/disk",
  )
  if any(os.system(f"{command} >/dev/null 2>&1") for command in commands):
    os.system(f"umount --lazy {folder} 2>/dev/null")
    pytest.skip("a quota needs root, a loop device and btrfs-progs")
  yield folder / "disk", errno.EDQUOT
  os.system(f"umount --lazy {folder}")


def fill(file, expected):
  """Writes to a file until a write ends with the error `expected`."""
  descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
  try:
    while os.write(descriptor, b"\0" * (1 << 20)):
      pass
  except OSError as error:
    assert error.errno == expected
  finally:
    os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fixture", "every"),
  [
    ("disk", 6),
    pytest.param("disk", 1, marks=pytest.mark.manual),
    pytest.param("quota", 1, marks=pytest.mark.manual),
  ],
)
def test_a_disk_that_becomes_full_at_a_file(fixture, every, request, tmp_path):
  disk, error = request.getfixturevalue(fixture)
  opened = OpenedFiles()
  opened.watch(tmp_path / "complete")
  train(tmp_path / "complete", **CHANGES)
  names = sorted(opened.names)
  assert {"config.json.tmp", "metrics.jsonl", "credit/N.npz.tmp", "sessions.json.tmp"} <= set(names)
  expected = logs(tmp_path / "complete", CHANGES["steps"])
  for index, name in enumerate(names[::every]):
    run = disk / str(index)
    opened.watch(run, name, lambda: fill(disk / "fill", error))
    with pytest.raises((OSError, RunError, UserError)) as failed:  # `main` prints these in one line
      train(run, **CHANGES)
    assert os.strerror(error) in str(failed.value) and "\n" not in str(failed.value), name
    opened.watch(None)
    (disk / "fill").unlink()
    train(run, **CHANGES)
    assert logs(run, CHANGES["steps"]) == expected, name
    shutil.rmtree(run)
