"""Hugging Face folders in: each tensor's slices read once, by the process that needs them, straight to where they lie."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh

from gtpo_jax.models.folder import find, read_config
from gtpo_jax.models.hf import params_from_hf
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import inside, printable, read_json
from gtpo_jax.runtime.mesh import single_device_mesh

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")


def load(
  name: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None
) -> tuple[Qwen2, Params]:
  """The model and parameters of a Hugging Face Qwen2 or Qwen2.5.

  Args:
    name: a folder with config.json and safetensors (one file, or shards with an index), or a hub id.
    dtype: "float32", "bfloat16" or "float16", of parameters and computation.
    mesh: where they go; the first device if None.

  Raises:
    UserError: it is not a Qwen2 checkpoint, or one that is damaged, incomplete or tries to reach outside its folder.
  """
  folder = find(str(name))
  model = Qwen2(read_config(folder, dtype), mesh or single_device_mesh())
  return model, read_params(model, folder)


def read_params(model: Qwen2, folder: Path) -> Params:
  """The parameters of a folder's safetensors on the model's mesh, without adapters.

  Host memory holds one tensor's slices at a time: a file is mapped when a tensor of it is read, and let go after.

  Raises:
    UserError: a file is damaged, the tensors are not the model's, or some hold NaN or infinity.
  """
  plain = without_lora(model)
  params = params_from_hf(plain, stored_tensors(folder))
  finite = jax.jit(lambda x: jnp.isfinite(x).all())
  names = [
    "/".join(key.key for key in path)
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if not bool(finite(x))
  ]
  if names:
    raise UserError(
      f"the weights in {str(folder)!r} hold NaN or infinity, in {', '.join(names[:8])}"
    )
  return params


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A tensor in a safetensors file, read by slices."""

  file: Path
  name: str
  shape: tuple[int, ...]

  def __getitem__(self, index: Any) -> np.ndarray:
    with safetensors.safe_open(
      self.file, framework="numpy"
    ) as opened:  # opened anew: what was read does not stay mapped
      return np.array(opened.get_slice(self.name)[index])


def stored_tensors(folder: Path) -> dict[str, _Tensor]:
  """Every tensor of a folder by name; checks the files' headers and the index, reads no data."""
  found: dict[str, _Tensor] = {}
  for file, promised in _files(folder):
    here = _header(file)
    if promised is not None and (missing := sorted(promised - here.keys())):
      raise UserError(
        f"{INDEX} says that {file.name} holds {', '.join(map(printable, missing[:4]))}, but it does not"
      )
    for name, entry in here.items():
      if name in found:
        raise UserError(f"tensor {name!r} is in {found[name].file.name} and again in {file.name}")
      if entry["dtype"] not in FLOATS:
        raise UserError(
          f"tensor {name!r} in {str(file)!r} is of type {entry['dtype']}; this port reads {', '.join(FLOATS)}"
        )
      found[name] = _Tensor(file, name, tuple(entry["shape"]))
  return found


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
  """The safetensors files of a folder, each with the names that the index promises of it."""
  if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
    weight_map = read_json(folder, INDEX).get("weight_map")
    if (
      not isinstance(weight_map, dict)
      or not weight_map
      or not all(isinstance(file, str) for file in weight_map.values())
    ):
      raise UserError(f"{str(folder / INDEX)!r} has no weight_map from tensors to files")
    names = sorted(set(weight_map.values()))
    for name in names:
      if not name.endswith(".safetensors"):
        raise UserError(
          f"{str(folder / INDEX)!r} names {name!r}; this port reads .safetensors alone"
        )
    yield from (
      (inside(folder, name), {key for key, file in weight_map.items() if file == name})
      for name in names
    )
    return
  names = sorted(file.name for file in folder.glob("*.safetensors"))
  if not names:
    pickles = sorted(
      file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)
    )
    hint = (
      f"; {pickles[0]} is a pickle, which may run code and is never opened: convert it"
      if pickles
      else ""
    )
    raise UserError(f"no safetensors in {str(folder)!r}{hint}")
  yield from ((inside(folder, name), None) for name in names)


def _header(file: Path) -> dict[str, dict[str, Any]]:
  """The entries of a safetensors file by tensor name, checked by the library; names that appear twice are refused."""
  try:
    with safetensors.safe_open(file, framework="numpy"):
      pass  # refuses truncation, wrong offsets and overlaps
    with file.open("rb") as opened:
      entries = json.loads(
        opened.read(int.from_bytes(opened.read(8), "little")), object_pairs_hook=list
      )
  except (safetensors.SafetensorError, OSError, ValueError) as error:
    raise UserError(
      f"{str(file)!r} is not a sound safetensors file: {first_line(error)}"
    ) from error
  for name, times in collections.Counter(name for name, _ in entries).items():
    if times > 1:
      raise UserError(f"{str(file)!r} holds tensor {name!r} {times} times")
  return {name: dict(entry) for name, entry in entries if name != "__metadata__"}
