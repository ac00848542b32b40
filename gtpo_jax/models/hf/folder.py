"""Finds Hugging Face model folders, on disk or on the hub."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path

from etils import epath

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.paths import PACKAGES, is_remote, scheme, storage_errors, storage_path

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
    return _from_object_store(name)
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
  """Returns a folder, or raises UserError if it has only an adapter of PEFT."""
  if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
    raise UserError(
      f"{name!r} is an adapter of PEFT, not a model; merge it into its base model with "
      "peft: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
      ".save_pretrained(FOLDER), and save the tokenizer there too"
    )
  return folder


def _from_object_store(name: str) -> epath.Path:
  folder = storage_path(name)
  with storage_errors(f"cannot read {name!r}", UserError):
    if not (folder / "config.json").exists():
      raise UserError(
        f"no model and no run at {name!r}: there is no config.json; name the workdir of a run or a "
        "model folder"
      )
  return folder


@functools.cache  # a process uses one revision, even if the hub changes
def _from_hub(name: str) -> Path:
  from huggingface_hub import snapshot_download
  from huggingface_hub.utils import disable_progress_bars

  disable_progress_bars()
  try:
    folder = snapshot_download(
      name, allow_patterns=list(HUB_FILES), ignore_patterns=list(UNUSED_FILES)
    )
  except Exception as error:  # from the hub, the network library or the disk
    raise UserError(
      f"{name!r} is neither a local folder nor cached, and the download from the hub failed "
      f"({first_line(error)[:160]}); download it on a machine with network access, or name a folder"
    ) from error
  return _checked(Path(folder), name)


def fingerprints(name: str | None) -> dict[str, str]:
  """Returns what tells a model folder from another one, by name; {} for none or a remote one.

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
  try:
    values = json.loads((folder / "config.json").read_text())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(values, dict) and "model_type" in values
