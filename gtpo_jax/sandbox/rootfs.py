"""The sandbox's root file system: a copy of this interpreter and of the libraries it loads."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "gtpo_sandbox_"
DEVICES = ("null", "zero", "urandom")
LIBRARY_PATH_FILE = ".libraries"  # contains the sandbox's value of LD_LIBRARY_PATH
LDD_TIMEOUT_S = 120
STALE_AFTER_S = 3600  # an unlocked folder older than this is left over from a killed process
# Parts of the standard library that programs do not need.
_LEFT_OUT = shutil.ignore_patterns(
  *str.split("test tests idlelib ensurepip lib2to3 tkinter turtledemo __phello__"),
  *str.split("site-packages dist-packages config-* *.opt-?.pyc *.a _sysconfigdata*"),
)


def interpreter() -> str:
  """Returns the path of the Python executable itself, not of a virtual environment's link."""
  return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def root_filesystem() -> Path:
  """Copies the interpreter and the libraries it loads into a temporary folder, and returns it.

  The folder is removed at exit. A copy is needed because the sandbox's unprivileged user cannot
  read files in the home of a trainer that runs as root. Also, one mount is faster than forty.
  """
  _remove_stale()
  root = Path(tempfile.mkdtemp(prefix=PREFIX))
  lock = os.open(root, os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_SH)  # tells _remove_stale and systemd-tmpfiles that it is in use
  atexit.register(_remove, root, os.getpid())
  root.chmod(0o755)
  for name in ("dev", "tmp"):
    (root / name).mkdir()
  for name in DEVICES:
    (root / "dev" / name).touch()

  binaries = [interpreter()]
  # The folders of the interpreter, not those of a virtual environment.
  bases = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
  for folder in {sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")}:
    source = os.path.realpath(folder)
    shutil.copytree(source, str(root) + folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
    binaries += map(str, Path(folder, "lib-dynload").glob("*.so"))
  libraries = _libraries_of(binaries)
  for path in (binaries[0], *libraries):
    Path(str(root) + path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, str(root) + path)
  library_folders = dict.fromkeys(os.path.dirname(path) for path in libraries)
  (root / LIBRARY_PATH_FILE).write_text(":".join(library_folders))
  return root


def _libraries_of(binaries: list[str]) -> list[str]:
  """Returns the paths of the C libraries that the binaries load."""
  ldd = subprocess.run(
    ["ldd", *binaries], capture_output=True, text=True, timeout=LDD_TIMEOUT_S, check=False
  )
  return sorted(set(re.findall(r"(?m)^\s+(?:\S+ => )?(/\S+) \(0x", ldd.stdout)))


def _remove(root: Path, pid: int) -> None:
  if os.getpid() == pid:  # a forked child must not remove its parent's folder
    shutil.rmtree(root, ignore_errors=True)


def _remove_stale() -> None:
  """Removes folders that killed processes left: this user's, older than an hour, and unlocked."""
  for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
    with suppress(OSError):
      status = folder.stat(follow_symlinks=False)
      if status.st_uid != os.geteuid() or time.time() - status.st_mtime < STALE_AFTER_S:
        continue
      handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
      try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
      finally:
        os.close(handle)
