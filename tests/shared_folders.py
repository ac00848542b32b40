"""Folders that are filled once for all processes of pytest, which xdist starts."""

import fcntl
import os


def create_once(tmp_path_factory, name, create):
  """Returns a temporary folder that `create(folder)` has filled in one of the processes.

  The others wait for it. No test may change the folder.
  """
  base = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    base = base.parent  # of all workers
  folder = base / name
  complete = base / f"{name}.complete"
  with (base / f"{name}.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not complete.exists():
      folder.mkdir()
      create(folder)
      complete.touch()
  return folder
