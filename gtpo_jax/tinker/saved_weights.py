"""Saved weights: immutable folders that clients name as tinker://RUN/KIND/NAME.

A folder of adapters is one that PEFT loads, a folder of a whole model one of Hugging Face. Beside
that it has the arrays of training and who owns it. It appears with all its files or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from pydantic import BaseModel, Field

from gtpo_jax.models.hf.folder import MANIFEST
from gtpo_jax.serving.requests import ApiError, bad, shown

TRAINING, SAMPLER, STATE = "weights", "sampler_weights", "state"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}  # with the protocol's name
ABOUT = "tinker.json"
ARRAYS = "training.arrays"  # safetensors; by that name it would be part of the model
OLD = ".old"  # ends the names of weights that others are about to replace
EPHEMERAL = "~"  # begins the names of weights that clients know only by their sampler
KEPT_EPHEMERAL = 16  # of a run
LATEST = 253_402_300_800  # seconds from 1970 to the year 10000
ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,127}")


@dataclasses.dataclass(frozen=True)
class Spec:
  """What a client has asked a model to be."""

  base_model: str  # the name that the client uses
  rank: int  # of the adapters; 0 for all weights
  seed: int = 0  # of the adapters' random matrices
  train_mlp: bool = True  # whether matrices of MLPs have adapters
  train_attn: bool = True  # whether matrices of attention have adapters
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the client's own

  @property
  def targets(self) -> tuple[str, ...]:
    """The matrices that have adapters."""
    return ATTENTION * self.train_attn + MLP * self.train_mlp


_Time = Annotated[float, Field(ge=0, lt=LATEST)]


class About(BaseModel):
  """What is noted beside weights."""

  run: str  # the model that they are from
  owner: str  # the client
  spec: Spec  # what the client has asked that model to be
  created: _Time  # when, in seconds since 1970
  seq: int = -1  # the number of the request that has saved them
  metadata: dict[str, str] | None = None  # the client's own
  expires: _Time | None = None  # when they are deleted; None for never


class Saved(NamedTuple):
  """Saved weights."""

  folder: Path  # where they are
  about: About  # whose they are

  @property
  def path(self) -> str:
    """The name that clients use."""
    return f"tinker://{self.about.run}/{self.folder.parent.name}/{self.folder.name}"

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the arrays of training by name; what was bfloat16 is float32.

    Raises:
      ApiError: a file of the folder is missing, or not as it was written.
    """
    try:
      lines = (self.folder / MANIFEST).read_text().splitlines()
      digests = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
      needed = {ABOUT, ARRAYS, *(x.name for x in self.folder.glob("*.safetensors"))}
      if not needed <= set(digests):
        raise ValueError(MANIFEST)
      for name, digest in digests.items():
        with (self.folder / name).open("rb") as opened:
          if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
            raise ValueError(name)
      return safetensors.numpy.load((self.folder / ARRAYS).read_bytes())
    except (OSError, ValueError, safetensors.SafetensorError):
      raise bad(
        f"{self.path} is damaged: its files are not as they were saved; load other weights"
      ) from None

  def describe(self) -> dict[str, Any]:
    """Returns what the protocol says of a checkpoint."""
    about = self.about
    return {
      "checkpoint_id": f"{self.folder.parent.name}/{self.folder.name}",
      "checkpoint_type": KINDS[self.folder.parent.name],
      "time": _time(about.created),
      "tinker_path": self.path,
      "size_bytes": sum(file.stat().st_size for file in self.folder.iterdir()),
      "public": False,
      "user_metadata": about.metadata,
      "expires_at": about.expires and _time(about.expires),
    }


def read_saved(folder: Path, expired: bool = False) -> Saved | None:
  """Returns the weights in a folder; None without a readable note, or if their time is over.

  `expired` ones are returned too if they are asked for.
  """
  try:
    about = About.model_validate_json((folder / ABOUT).read_bytes())
  except (OSError, ValueError):
    return None
  return Saved(folder, about) if expired or (about.expires or np.inf) > time.time() else None


class Store:
  """The folders of a workdir."""

  def __init__(self, workdir: Path):
    self._root = workdir / "runs"
    self._still = threading.Lock()  # no weights are between their old and their new place
    for old in self._root.glob(f"*/*/.*{OLD}"):  # a process was killed in `replace`
      folder = old.with_name(old.name.removeprefix(".").removesuffix(OLD))
      if folder.exists():
        shutil.rmtree(old)
      else:
        os.replace(old, folder)
    self.expire()

  def folder(self, run: str, kind: str, name: str = "") -> Path:
    """Returns where weights are or will be; without a name, where all of a kind are."""
    return self._root / run.replace(":", "-") / kind / name

  def find(self, owner: str, path: Any) -> Saved:
    """Returns the weights that a client names."""
    parts = path.removeprefix("tinker://").split("/") if isinstance(path, str) else []
    right = len(parts) == 3 and parts[1] in KINDS and NAME.fullmatch(parts[2])
    if right and NAME.fullmatch(parts[0].replace(":", "-")):
      with self._still:
        saved = read_saved(self.folder(*parts))
      if saved and (saved.about.owner, saved.about.run) == (owner, parts[0]):
        return saved
    raise ApiError(404, f"there are no weights {shown(path)}")

  def runs(self, owner: str) -> dict[str, list[Saved]]:
    """Returns the weights that a client has named, by run, the oldest first."""
    found: dict[str, list[Saved]] = {}
    for folder in sorted(self._root.glob("*/*/[!.]*")):
      saved = read_saved(folder) if folder.parent.name in KINDS else None
      if saved and saved.about.owner == owner:
        named = found.setdefault(saved.about.run, [])
        if not folder.name.startswith(EPHEMERAL):
          named.append(saved)
    for named in found.values():
      named.sort(key=lambda x: x.about.created)
    return found

  def expire(self) -> None:
    """Deletes the weights whose time is over."""
    for folder in self._root.glob("*/*/*"):
      saved = read_saved(folder, expired=True)
      if saved and (saved.about.expires or np.inf) < time.time():
        shutil.rmtree(folder, ignore_errors=True)

  def replace(self, new: Path, folder: Path) -> None:
    """Puts weights that are written whole in the place of older ones, of the same name."""
    old = folder.with_name(f".{folder.name}{OLD}")
    with self._still:
      if folder.exists():
        os.replace(folder, old)
      os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)

  def of_sampler(self, source: dict[str, Any]) -> Saved | None:
    """Returns the weights that a sampler samples from, for live ones the newest; None if gone."""
    folder = self.folder(*source["path"].removeprefix("tinker://").split("/"))
    if source["live"]:
      folder = max(_numbered(folder.parent, EPHEMERAL).items(), default=(0, folder))[1]
    with self._still:
      return read_saved(folder)

  def snapshot(self, run: str) -> Saved:
    """Returns the newest state of a model."""
    seq = self.snapshot_seq(run)
    if seq < 0:
      raise bad("the model was not created")
    if saved := read_saved(self.folder(run, STATE, str(seq))):
      return saved
    raise bad(f"the state of {run} is damaged; make a new model, from saved weights for example")

  def snapshot_seq(self, run: str) -> int:
    """Returns the number of the last request whose effect is in `snapshot`; -1 for none."""
    return max(_numbered(self.folder(run, STATE)), default=-1)

  def tidy(self, run: str, newest: int) -> None:
    """Deletes the states of a model before the newest, and weights that no sampler needs."""
    old = [x for seq, x in _numbered(self.folder(run, STATE)).items() if seq < newest]
    ephemeral = sorted(_numbered(self.folder(run, SAMPLER), EPHEMERAL).items())
    for folder in old + [x for _, x in ephemeral[:-KEPT_EPHEMERAL]]:
      shutil.rmtree(folder)

  def drop(self, run: str) -> None:
    """Deletes what only the session of a model has used."""
    ephemeral = _numbered(self.folder(run, SAMPLER), EPHEMERAL).values()
    for folder in (self.folder(run, STATE), *ephemeral):
      shutil.rmtree(folder, ignore_errors=True)


def _numbered(root: Path, start: str = "") -> dict[int, Path]:
  """Returns the folders whose names are numbers after `start`."""
  named = ((x.name.removeprefix(start), x) for x in root.glob(f"{start}[0-9]*"))
  return {int(number): folder for number, folder in named if number.isdecimal()}


def _time(seconds: float) -> str:
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def describe_run(run: str, saved: list[Saved]) -> dict[str, Any]:
  """Returns what the protocol says of a training run with saved weights, the oldest first."""
  last = {x.folder.parent.name: x.describe() for x in saved}
  spec = saved[-1].about.spec
  return {
    "training_run_id": run,
    "base_model": spec.base_model,
    "model_owner": "you",
    "is_lora": bool(spec.rank),
    "lora_rank": spec.rank or None,
    "last_request_time": _time(saved[-1].about.created),
    "last_checkpoint": last.get(TRAINING),
    "last_sampler_checkpoint": last.get(SAMPLER),
    "user_metadata": spec.metadata,
  }


def arrays_of(**trees: Any) -> bytes:
  """Returns trees of arrays as a file of safetensors, by their names and paths."""
  found = {}
  for path, x in jax.tree_util.tree_leaves_with_path(trees):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    x = np.asarray(jax.device_get(x))
    found[name] = x.astype(np.float32) if x.dtype.name in ("bfloat16", "float16") else x
  return safetensors.numpy.save({name: np.asarray(x, order="C") for name, x in found.items()})


def tree_of(arrays: dict[str, np.ndarray], name: str, like: Any) -> Any:
  """Returns the tree `name` of `arrays_of`, on the devices and with the dtypes of `like`."""

  def place(path: Any, abstract: Any) -> jax.Array:
    key = "/".join((name, jax.tree_util.keystr(path, simple=True, separator="/")))
    array = arrays[key].astype(abstract.dtype).reshape(abstract.shape)
    return jax.device_put(array, abstract.sharding)

  return jax.tree_util.tree_map_with_path(place, like)
