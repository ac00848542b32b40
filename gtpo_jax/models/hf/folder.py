"""Finds Hugging Face folders, on disk or on the hub, and writes them atomically.

A written folder appears with all its files and checksums, or not at all. An object store cannot
rename a folder. There the files are written where they belong, and the checksums last: a folder
without checksums is incomplete.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.experimental.multihost_utils import broadcast_one_to_all, sync_global_devices

from gtpo_jax.runtime.busy_hub import HubBusy, patiently
from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.paths import (
  PACKAGES,
  check_object_writable,
  is_remote,
  list_files,
  scheme,
  storage_errors,
  storage_path,
  storage_reason,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", "tokenizer.model")
UNUSED_FILES = ("consolidated*", "original/*")  # the same weights in the makers' own formats


def find(name: str) -> Path:
  """Returns the folder of a model, which is downloaded if `name` is a hub id not yet cached.

  Args:
    name: a folder, possibly in an object store, or a hub id such as Qwen/Qwen2.5-0.5B.

  Raises:
    UserError: there is no such folder, and no such model in the cache or on the hub.
  """
  if is_remote(name) and scheme(name) in PACKAGES:
    folder = storage_path(name)
    with storage_errors(f"cannot read {name!r}", UserError):
      if not (folder / "config.json").exists():
        raise UserError(
          f"no model and no run at {name!r}: there is no config.json; name the workdir of a run or "
          "a model folder"
        )
    return folder
  folder = Path(name)
  is_folder = False
  try:
    is_folder = folder.is_dir()
    # If runs/ is a folder, runs/misspelt is a wrong path rather than a hub id.
    is_path = folder.exists() or folder.parent.is_dir()
  except (OSError, ValueError):  # too long for a path, or contains a NUL
    is_path = True
  if is_folder:
    return _checked(folder, name)
  if is_path or not HUB_ID.fullmatch(name):
    raise UserError(
      f"no folder at {name[:200]!r}; name the workdir of a run, a model folder, "
      "or a hub id such as Qwen/Qwen2.5-0.5B"
    )
  return _from_hub(name)


def _checked(folder: Path, name: str) -> Path:
  """Returns a folder; raises UserError if it has only an adapter of PEFT, or a pipe or device."""
  with contextlib.suppress(OSError):  # what cannot be listed is refused when it is read
    for file in sorted(folder.iterdir()):
      if file.exists() and not (file.is_file() or file.is_dir()):  # reading it might never end
        raise UserError(f"{str(file)!r} is not a regular file; copy its contents into one")
  if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
    raise UserError(
      f"{name!r} is an adapter of PEFT, not a model; merge it into its base model with "
      "peft: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
      ".save_pretrained(FOLDER), and save the tokenizer there too"
    )
  return folder


@functools.cache  # a process uses one revision, even if the hub changes
def _from_hub(name: str) -> Path:
  from huggingface_hub import snapshot_download
  from huggingface_hub.utils import disable_progress_bars

  disable_progress_bars()
  fetch = functools.partial(
    snapshot_download, name, allow_patterns=list(HUB_FILES), ignore_patterns=list(UNUSED_FILES)
  )
  try:
    folder = patiently(name, fetch)
  except HubBusy:
    raise
  except Exception as error:  # from the hub, the network library or the disk
    raise UserError(
      f"{name!r} is neither a local folder nor completely cached, and the download from the hub "
      f"failed ({first_line(error)[:160]}); download it on a machine with network access, or name "
      "a folder"
    ) from error
  return _checked(Path(folder), name)


def fingerprints(name: str | None) -> dict[str, str]:
  """Returns the fingerprint of a model folder, by name; {} for none or a remote one.

  This is a digest of the names of its files, the sizes of those with weights, and the contents of
  all others.
  """
  if not name or is_remote(name):
    return {}
  folder = find(name)
  files = {file for pattern in HUB_FILES for file in folder.glob(pattern)}
  digest = hashlib.sha256()
  for file in sorted(files):
    is_weights = file.suffix == ".safetensors"
    content = str(file.stat().st_size).encode() if is_weights else file.read_bytes()
    digest.update(f"{file.name} {len(content)}\n".encode() + content)
  return {
    f"model.path {name!r}": f"a folder of {len(files)} files, sha256 {digest.hexdigest()[:16]}"
  }


def is_hf_folder(folder: Path) -> bool:
  """Returns whether the folder's config.json describes a Hugging Face model.

  A run's workdir also has a config.json, in another format.
  """
  file = folder / "config.json"
  try:
    values = json.loads(file.read_text()) if file.is_file() else None
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(values, dict) and "model_type" in values


MANIFEST = "SHA256SUMS"


@contextlib.contextmanager
def atomic_folder(folder: epath.Path) -> Iterator[epath.Path | None]:
  """Yields a temporary folder; on exit a manifest is added and it is renamed to `folder`.

  If the body raises, the temporary folder is deleted. In an object store `folder` itself takes the
  place of the temporary folder. Every process must enter the context. The first process gets the
  temporary folder and writes the files; the others get None, and their context exits once `folder`
  exists.

  Raises:
    UserError: `folder` is not empty or cannot be created (every process raises this), or a file
      cannot be written.
  """
  if not is_remote(folder):
    folder = epath.Path(os.path.abspath(folder))  # a folder cannot be renamed to "."
  out = None
  finished = False
  failure = None
  if jax.process_index() == 0:
    try:
      out = _make_temporary(folder)
    except UserError as error:
      failure = error
  if broadcast_one_to_all(np.bool_(failure is not None)):
    raise failure or UserError(f"cannot write {str(folder)!r}: see the error of process 0")
  try:
    yield out
    if out is not None:
      # In the format that `sha256sum -c` reads.
      lines = [f"{_sha256(out / name)}  {name}\n" for name in sorted(list_files(out))]
      (out / MANIFEST).write_text("".join(lines))
      if not is_remote(out):
        os.replace(out, folder)  # epath refuses an empty folder
    finished = True
    sync_global_devices("saved")
  except Exception as error:
    in_store = is_remote(folder) and not isinstance(error, UserError | RunError)
    if not in_store and not isinstance(error, OSError):  # object stores raise many types
      raise
    raise UserError(f"cannot write {str(folder)!r}: {storage_reason(error)}") from error
  finally:
    if out is not None and not (finished and is_remote(out)):
      with contextlib.suppress(Exception):
        out.rmtree()


def _make_temporary(folder: epath.Path) -> epath.Path:
  """Creates the temporary folder beside `folder`, and deletes those of killed processes."""
  if is_remote(folder):
    with storage_errors(f"cannot write {str(folder)!r}", UserError):
      if folder.exists():
        complete = (folder / MANIFEST).exists()
        state = "not empty" if complete else f"not empty, and incomplete: it has no {MANIFEST}"
        raise UserError(f"{str(folder)!r} is {state}; remove it, or name a new folder")
      check_object_writable(folder / MANIFEST)
    return folder
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"{str(folder)!r} is not empty; name a new folder")
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
      shutil.rmtree(old)
    out = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    out.mkdir()
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from error
  return out


def _sha256(file: epath.Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
