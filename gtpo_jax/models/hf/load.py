"""Reads Hugging Face folders. Each process reads only the slices that its devices need, each once.

Nothing in a folder is ever executed: safetensors and JSON are data, and pickles are rejected. Of
models that have other parts than text, only the text model is loaded and trained; an export carries
the rest over from its source.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.families import FAMILIES
from gtpo_jax.models.hf.config_json import describe_unused_keys, is_multimodal, read_config
from gtpo_jax.models.hf.folder import find
from gtpo_jax.models.hf.weights import hf_tensors, read_hf
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.number_formats import quantize
from gtpo_jax.models.params import Params, abstract_params, declared_params, scale_path
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import printable, read_json, safe_join
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.runtime.paths import is_remote, read_range, storage_errors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The dtypes that can be read, by safetensors' names.
DTYPE_CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
LENGTH_BYTES = 8  # a file begins with the length of its header
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_NAMES = 8  # the most files that a line lists
MAKERS_OWN = "consolidated"  # the same weights in Mistral's own format
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
  name: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None
) -> tuple[Transformer, Params]:
  """Returns the model and the parameters of a Hugging Face folder.

  Args:
    name: a folder with config.json and safetensors (one file, or shards with an index), or a hub
      id.
    dtype: "float32", "bfloat16" or "float16", the dtype of parameters and computation.
    mesh: the mesh of the parameters; None for the first device.

  Raises:
    UserError: the architecture is not supported, or the folder is damaged or incomplete, or has
      links to files outside it.
  """
  folder = find(str(name))
  model = Transformer(read_config(folder, dtype), mesh or single_device_mesh())
  return model, read_params(model, folder)


def read_params(model: Transformer, folder: Path) -> Params:
  """Returns the parameters of a folder's safetensors on the model's mesh, without adapters.

  Matrices are quantised one by one if the model is. Host memory has slices of only one tensor at a
  time: a file is mapped while a slice is read, and unmapped afterwards. What the folder has and
  this does not use is printed to stderr, once per process: keys of config.json, and files.

  Raises:
    UserError: a file is damaged, the tensors are not the model's, or some contain NaN or infinity.
  """
  finite = jax.jit(lambda x: jnp.isfinite(x).all())
  for line in (describe_unused_keys(folder), _describe_unused_files(folder)):
    if line and is_first_process():
      _say_once(line)
  replace = None
  params = {}
  names = []
  tensors = stored_tensors(folder)
  parts = parts_of(read_json(folder, "config.json"), tensors)
  of_text = {name: tensors[stored] for name, stored in parts.text.items()}
  plain = without_lora(model)
  as_stored = dataclasses.replace(plain.config, compute_dtype=model.config.param_dtype)
  for path, x in read_hf(Transformer(as_stored, model.mesh), of_text):
    replace = replace or _converter(model)  # only now, since the sizes in config.json are right
    if not bool(finite(x)):
      names.append("/".join(path))
    params |= replace(path, x)
  if names:
    listed = ", ".join(sorted(names)[:MAX_NAMES])
    sizes = [
      np.abs(of_text[entry.name][(slice(None),) * len(entry.shape)].astype(np.float32)).max()
      for entry in hf_tensors(without_lora(model))
      if "/".join(entry.path) in names
    ]
    if np.isfinite(sizes).all():
      dtype = model.config.param_dtype
      raise UserError(
        f"the weights in {str(folder)!r} are as large as {max(sizes):g}, in {listed}, but {dtype} "
        f"ends at {float(jnp.finfo(dtype).max):g}; read them as bfloat16 or float32"
      )
    raise UserError(f"the weights in {str(folder)!r} contain NaN or infinity, in {listed}")
  return unflatten_dict(params)


@functools.cache
def _say_once(line: str) -> None:
  print(f"gtpo: {line}", file=sys.stderr, flush=True)


def _converter(
  model: Transformer,
) -> Callable[[tuple[str, ...], jax.Array], dict[tuple[str, ...], jax.Array]]:
  """Returns a function of a path and a parameter to the stored parameters that replace it.

  It frees a matrix that it quantises or casts.
  """
  stored = flatten_dict(abstract_params(model))
  declared = flatten_dict(declared_params(model))
  quantizes = model.config.quantize

  def replace(path: tuple[str, ...], x: jax.Array) -> dict[tuple[str, ...], jax.Array]:
    paths = [path]
    if quantizes and scale_path(path) in declared:
      paths.append(scale_path(path))
    elif x.dtype == stored[path].dtype:
      return {path: x}

    dtypes = tuple(stored[path].dtype for path in paths)
    shardings = tuple(stored[path].sharding for path in paths)
    format_ = quantizes if paths[1:] else ""
    in_place = _conversion(format_, declared[path].last_input, dtypes, shardings)
    arrays = jax.block_until_ready(in_place(x))
    x.delete()
    return dict(zip(paths, arrays, strict=True))

  return replace


@functools.cache
def _conversion(
  quantizes: str, axis: int, dtypes: tuple[Any, ...], shardings: tuple[Any, ...]
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
  """Returns a program that quantises a matrix along an axis, if asked, and casts the results.

  The layers of a model share it.
  """

  def convert(x: jax.Array) -> tuple[jax.Array, ...]:
    arrays = quantize(x, axis, quantizes) if quantizes else (x,)
    return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))

  return jax.jit(convert, out_shardings=shardings)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a safetensors file; indexing reads a slice of it."""

  file: Path
  name: str
  shape: tuple[int, ...]
  dtype: str  # safetensors' name
  start: int  # position of the first byte in the file

  def __getitem__(self, index: Any) -> np.ndarray:
    if is_remote(self.file):
      return self._read_rows(index)
    # The file is opened for each read; otherwise the pages already read would stay mapped.
    with safetensors.safe_open(self.file, framework="numpy") as opened:
      return np.array(opened.get_slice(self.name)[index])

  def _read_rows(self, index: Any) -> np.ndarray:
    """Reads the rows that `index` selects, and selects the rest of it in memory."""
    index = index if isinstance(index, tuple) else (index,)
    if not self.shape or not index or not isinstance(index[0], slice):
      return self._read(0, 1, self.shape)[index]
    first, end, _ = index[0].indices(self.shape[0])
    rows = self._read(first, self.shape[0], (end - first, *self.shape[1:]))
    return rows[(slice(None), *index[1:])]

  def _read(self, first: int, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Reads an array of `shape` that begins at row `first` of the tensor's `count` rows."""
    dtype = np.dtype(DTYPES[DTYPE_CODES[self.dtype]])
    row_bytes = math.prod(self.shape) * dtype.itemsize // max(count, 1)
    start = self.start + first * row_bytes
    with storage_errors(f"cannot read {str(self.file)!r}"):
      data = read_range(self.file, start, start + math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
  """Returns every tensor of a folder by name. Checks headers and index but reads no data."""
  tensors: dict[str, StoredTensor] = {}
  unlisted: dict[str, str] = {}
  for file, indexed in _files(folder):
    header = _header(file)
    if indexed is not None and (missing := sorted(indexed - header.keys())):
      names = ", ".join(map(printable, missing[:4]))
      raise UserError(f"{INDEX} lists {names} in {file.name}, but that file does not have them")
    if indexed is not None:
      unlisted |= dict.fromkeys(header.keys() - indexed, file.name)
    for name, entry in header.items():
      if name in tensors:
        raise UserError(f"tensor {name!r} is in {tensors[name].file.name} and again in {file.name}")
      if entry["dtype"] not in DTYPE_CODES:
        raise UserError(
          f"tensor {name!r} in {str(file)!r} has dtype {entry['dtype']}; "
          f"supported are {', '.join(DTYPE_CODES)}"
        )
      start = entry["data_offsets"][0]
      tensors[name] = StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], start)
  if unlisted:
    name, holder = min(unlisted.items())
    raise UserError(
      f"{holder} has the tensor {printable(name)}, but {INDEX} does not list it there"
    )
  return tensors


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
  """Yields the safetensors files, each with the tensor names that the index lists for it.

  The names are None if the folder has no index.
  """
  if _has_index(folder):
    weight_map = _weight_map(folder)
    if SINGLE not in weight_map.values() and (folder / SINGLE).exists():
      raise UserError(
        f"{str(folder)!r} has {SINGLE} and {INDEX}, which does not list it; remove the older one"
      )
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


def _has_index(folder: Path) -> bool:
  index = folder / INDEX
  return index.exists() or (not is_remote(index) and index.is_symlink())


def _describe_unused_files(folder: Path) -> str:
  """Returns one line about safetensors that the index does not list, or the empty string."""
  if not _has_index(folder):
    return ""
  used = set(_weight_map(folder).values())
  names = sorted({file.name for file in folder.glob("*.safetensors")} - used)
  names = [name for name in names if not name.startswith(MAKERS_OWN)]
  if not names:
    return ""
  listed = ", ".join(map(printable, names[:MAX_NAMES])) + (" ..." if len(names) > MAX_NAMES else "")
  return f"{str(folder)!r} has {len(names)} file(s) that {INDEX} does not list: {listed}"


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
  """Returns a safetensors file's entries by tensor name, with offsets from the file's start."""
  try:
    if not is_remote(file):
      with safetensors.safe_open(file, framework="numpy"):
        pass  # raises for truncated files, wrong offsets and overlaps
    with file.open("rb") as opened:
      length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
      if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
      entries = json.loads(opened.read(length), object_pairs_hook=list)
    if is_remote(file):
      _check_offsets(entries, file.stat().length - LENGTH_BYTES - length)
  except (safetensors.SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
    raise UserError(
      f"{str(file)!r} is not a valid safetensors file: {first_line(error)}"
    ) from error
  for name, count in collections.Counter(name for name, _ in entries).items():
    if count > 1:
      raise UserError(f"{str(file)!r} has tensor {name!r} {count} times")
  tensors = {name: dict(entry) for name, entry in entries if name != "__metadata__"}
  for entry in tensors.values():
    entry["data_offsets"] = [LENGTH_BYTES + length + offset for offset in entry["data_offsets"]]
  return tensors


def _check_offsets(entries: list[tuple[str, list]], size: int) -> None:
  """Checks offsets and sizes as the library does in a file that it opens itself."""
  end = 0
  tensors = [dict(entry) for name, entry in entries if name != "__metadata__"]
  for entry in sorted(tensors, key=lambda entry: entry["data_offsets"]):
    start, stop = entry["data_offsets"]
    known = DTYPES.get(DTYPE_CODES.get(entry["dtype"], ""))
    if start != end or stop < start:
      raise ValueError(f"its tensors overlap or leave gaps at byte {start}")
    if known and stop - start != math.prod(entry["shape"]) * np.dtype(known).itemsize:
      raise ValueError(f"a tensor of shape {entry['shape']} has {stop - start} bytes")
    end = stop
  if end != size:
    raise ValueError(f"its tensors have {end} bytes, the file has {size}")


# Replacements for the start of the names of a text model's tensors: first as Transformers saves
# such models, then as version 5 names the tensors in memory.
PREFIXES = {"language_model.": "", "model.language_model.": "model."}
HEAD = "lm_head."
TEXT_MODULE = "language_model"  # of the whole model, where adapters are
# Files that programs need to prepare other inputs than text.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class Parts(NamedTuple):
  """The names of the tensors of a folder."""

  text: dict[str, str]  # of the text model, by their names in a folder of text only
  others: list[str]


def parts_of(config: dict[str, Any], names: Iterable[str]) -> Parts:
  """Returns the names of the tensors of a folder with this config.json."""
  if is_multimodal(config):
    return split_names(names)
  untrained = _untrained(config)
  names = list(names)
  others = [name for name in names if name.startswith(untrained)]
  return Parts({name: name for name in names if name not in others}, others)


def has_others(config: dict[str, Any]) -> bool:
  """Returns whether a folder with this config.json may have tensors that are not loaded."""
  return is_multimodal(config) or bool(_untrained(config))


def _untrained(config: dict[str, Any]) -> tuple[str, ...]:
  return FAMILIES[config["model_type"]].untrained


def split_names(names: Iterable[str]) -> Parts:
  """Separates the names of the text model's tensors from the others."""
  parts = Parts({}, [])
  for name in names:
    prefix = next(filter(name.startswith, (*PREFIXES, HEAD)), None)
    if prefix is None:
      parts.others.append(name)
      continue
    plain = PREFIXES.get(prefix, prefix) + name.removeprefix(prefix)
    if plain in parts.text:
      both = f"{printable(parts.text[plain])} and {printable(name)}"
      raise UserError(f"{both} are tensors of one parameter, {printable(plain)}; remove one")
    parts.text[plain] = name
  return parts
