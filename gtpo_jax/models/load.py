"""Reads Hugging Face folders. Each process reads only the slices that its devices need, each once.

Nothing in a folder is ever executed: safetensors and JSON are data, and pickles are rejected.
"""

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

from gtpo_jax.models.folder import find
from gtpo_jax.models.hf import params_from_hf
from gtpo_jax.models.hf_config import read_config
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.params import Params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import printable, read_json, safe_join
from gtpo_jax.runtime.mesh import single_device_mesh

INDEX = "model.safetensors.index.json"
DTYPE_CODES = ("F32", "BF16", "F16")  # safetensors' names of the formats that can be read
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
  name: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None
) -> tuple[Qwen2, Params]:
  """Returns the model and the parameters of a Hugging Face Qwen2 or Qwen2.5.

  Args:
    name: a folder with config.json and safetensors (one file, or shards with an index), or a hub
      id.
    dtype: "float32", "bfloat16" or "float16", the dtype of parameters and computation.
    mesh: the mesh of the parameters; None for the first device.

  Raises:
    UserError: the folder is not a Qwen2 checkpoint, is damaged or incomplete, or has links to files
      outside it.
  """
  folder = find(str(name))
  model = Qwen2(read_config(folder, dtype), mesh or single_device_mesh())
  return model, read_params(model, folder)


def read_params(model: Qwen2, folder: Path) -> Params:
  """Returns the parameters of a folder's safetensors on the model's mesh, without adapters.

  Host memory has slices of only one tensor at a time: a file is mapped while a slice is read, and
  unmapped afterwards.

  Raises:
    UserError: a file is damaged, the tensors are not the model's, or some contain NaN or infinity.
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
      f"the weights in {str(folder)!r} contain NaN or infinity, in {', '.join(names[:8])}"
    )
  return params


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a safetensors file; indexing reads a slice of it."""

  file: Path
  name: str
  shape: tuple[int, ...]

  def __getitem__(self, index: Any) -> np.ndarray:
    # The file is opened for each read; otherwise the pages already read would stay mapped.
    with safetensors.safe_open(self.file, framework="numpy") as opened:
      return np.array(opened.get_slice(self.name)[index])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
  """Returns every tensor of a folder by name. Checks headers and index but reads no data.

  Raises:
    UserError: a file is damaged, the index is wrong, or a dtype is not supported.
  """
  tensors: dict[str, StoredTensor] = {}
  for file, indexed in _files(folder):
    header = _header(file)
    if indexed is not None and (missing := sorted(indexed - header.keys())):
      names = ", ".join(map(printable, missing[:4]))
      raise UserError(f"{INDEX} lists {names} in {file.name}, but that file does not have them")
    for name, entry in header.items():
      if name in tensors:
        raise UserError(f"tensor {name!r} is in {tensors[name].file.name} and again in {file.name}")
      if entry["dtype"] not in DTYPE_CODES:
        raise UserError(
          f"tensor {name!r} in {str(file)!r} has dtype {entry['dtype']}; "
          f"supported are {', '.join(DTYPE_CODES)}"
        )
      tensors[name] = StoredTensor(file, name, tuple(entry["shape"]))
  return tensors


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
  """Yields the safetensors files, each with the tensor names that the index lists for it.

  The names are None if the folder has no index.
  """
  if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
    weight_map = _weight_map(folder)
    for name in sorted(set(weight_map.values())):
      yield safe_join(folder, name), {key for key, file in weight_map.items() if file == name}
    return
  names = sorted(file.name for file in folder.glob("*.safetensors"))
  if not names:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    hint = ""
    if pickles:
      hint = f"; {pickles[0]} is a pickle, which may run code; convert it to safetensors"
    raise UserError(f"no safetensors in {str(folder)!r}{hint}")
  yield from ((safe_join(folder, name), None) for name in names)


def _weight_map(folder: Path) -> dict[str, str]:
  """Returns the index: tensor name -> file name."""
  path = str(folder / INDEX)
  weight_map = read_json(folder, INDEX).get("weight_map")
  if (
    not isinstance(weight_map, dict)
    or not weight_map
    or not all(isinstance(file, str) for file in weight_map.values())
  ):
    raise UserError(f"{path!r} has no weight_map from tensors to files")
  for name in sorted(set(weight_map.values())):
    if not name.endswith(".safetensors"):
      raise UserError(f"{path!r} names {name!r}; only .safetensors files are supported")
  return weight_map


def _header(file: Path) -> dict[str, dict[str, Any]]:
  """Returns the entries of a safetensors file by tensor name.

  Raises:
    UserError: the file is not valid safetensors, or a name appears twice.
  """
  try:
    with safetensors.safe_open(file, framework="numpy"):
      pass  # raises for truncated files, wrong offsets and overlaps
    with file.open("rb") as opened:
      length = int.from_bytes(opened.read(8), "little")
      entries = json.loads(opened.read(length), object_pairs_hook=list)
  except (safetensors.SafetensorError, OSError, ValueError) as error:
    raise UserError(
      f"{str(file)!r} is not a valid safetensors file: {first_line(error)}"
    ) from error
  for name, count in collections.Counter(name for name, _ in entries).items():
    if count > 1:
      raise UserError(f"{str(file)!r} has tensor {name!r} {count} times")
  return {name: dict(entry) for name, entry in entries if name != "__metadata__"}
