"""Writes Hugging Face folders that vLLM, Transformers and llama.cpp's converter can load."""

from __future__ import annotations

import collections
import importlib.metadata
import itertools
import json
import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from etils import epath

from gtpo_jax.models.config import DTYPES, EXPERTS, ModelConfig
from gtpo_jax.models.hf.config_json import (
  is_multimodal,
  source_defaults,
  to_hf_config,
  with_carried,
)
from gtpo_jax.models.hf.folder import atomic_folder
from gtpo_jax.models.hf.load import DTYPE_CODES as NUMPY_NAMES
from gtpo_jax.models.hf.load import (
  PROCESSOR_FILES,
  TEXT_MODULE,
  has_others,
  parts_of,
  stored_tensors,
)
from gtpo_jax.models.hf.weights import hf_from_adapters, hf_from_params, hf_shapes
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.files import read_json
from gtpo_jax.runtime.paths import is_remote, list_files, storage_path

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9  # default of Transformers
DTYPE_CODES = {name: code for code, name in NUMPY_NAMES.items()}


def save(
  model: Transformer,
  params: Params,
  tokenizer: PreTrainedTokenizerBase | None,
  folder: str | Path,
  *,
  dtype: str | None = None,
  stop: Collection[int] = (),
  source: Path | None = None,
  files: Mapping[str, str | bytes] | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a model as a Hugging Face folder, with adapters merged.

  The folder has safetensors (several files and an index if the tensors exceed `shard_bytes`),
  config.json, generation_config.json, the tokenizer with its chat template, and `SHA256SUMS`, which
  `sha256sum -c` checks. It is written under a temporary name and renamed at the end. Host memory
  has one tensor at a time. If there are several processes, all must call this; the first one
  writes.

  Args:
    model: the architecture.
    params: its parameters.
    tokenizer: a tokenizer of transformers; None to write no tokenizer.
    folder: a folder that does not exist yet or is empty.
    dtype: "float32", "bfloat16" or "float16"; None for the dtype of the parameters.
    stop: token ids that end a completion, written to generation_config.json together with the
      tokenizer's end token.
    source: the Hugging Face folder that the model came from; its beginning-of-text id and its
      sampling defaults are kept, and what it has besides a text model. None if there is none.
    files: additional files by name, such as README.md; texts, or bytes.
    shard_bytes: the most bytes of tensors in one file.

  Raises:
    UserError: the folder is not empty or cannot be written, the dtype is unknown or cannot
      represent a value, or a config file of `source` is not valid JSON.
  """
  dtype = dtype or model.config.param_dtype
  if dtype not in DTYPES:
    raise UserError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
  defaults = source_defaults(source) if source else ({}, {})
  stored = {name: Stored(dtype, shape) for name, shape in hf_shapes(model).items()}
  tensors = _cast(hf_from_params(model, params), dtype)
  whole = read_json(source, "config.json") if source else None
  if whole and has_others(whole):
    stored, tensors = _with_other_parts(source, whole, stored, tensors)
  with atomic_folder(storage_path(folder)) as out:
    if out is None:
      collections.deque(tensors, maxlen=0)  # the first process needs our shards of each tensor
      return
    _write_weights(out, stored, tensors, shard_bytes)
    _write_configs(out, model.config, dtype, tokenizer, stop, defaults, whole)
    for name in PROCESSOR_FILES if whole and is_multimodal(whole) else ():
      if (source / name).exists():
        (out / name).write_text((source / name).read_text(encoding="utf-8"), encoding="utf-8")
    if tokenizer is not None:
      save_tokenizer(tokenizer, out)
    write_files(out, files)


class Stored(NamedTuple):
  """A tensor of a file."""

  dtype: str  # NumPy's name
  shape: tuple[int, ...]

  @property
  def bytes(self) -> int:
    """Its size in the file."""
    return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def _with_other_parts(
  source: Path,
  config: dict[str, Any],
  stored: Mapping[str, Stored],
  tensors: Iterator[tuple[str, np.ndarray]],
) -> tuple[dict[str, Stored], Iterator[tuple[str, np.ndarray]]]:
  """Names the text model's tensors as the source does, and adds the source's other tensors."""
  found = stored_tensors(source)
  parts = parts_of(config, found)
  others = {
    name: Stored(NUMPY_NAMES[found[name].dtype], found[name].shape) for name in parts.others
  }
  whole = lambda name: found[name][tuple(slice(None) for _ in found[name].shape)]
  renamed = ((parts.text[name], x) for name, x in tensors)
  carried = ((name, np.ascontiguousarray(whole(name))) for name in others)
  text = {parts.text[name]: entry for name, entry in stored.items()}
  return text | others, itertools.chain(renamed, carried)


def save_adapter(
  model: Transformer,
  params: Params,
  folder: str | Path,
  base: str,
  files: Mapping[str, str | bytes] | None = None,
  source: Path | None = None,
) -> None:
  """Writes only the adapters, as a folder that `peft` loads onto the model `base`.

  Args:
    model: the architecture with adapters.
    params: its parameters.
    folder: a folder that does not exist yet or is empty.
    base: path or hub id of the model without adapters.
    files: additional files by name.
    source: the folder of that model; None if it is a text model.

  Raises:
    UserError: the model has no adapters, or adapters of experts beside other MLPs, or the folder is
      not empty or cannot be written.
  """
  lora = model.config.lora
  if not lora.rank:
    raise UserError(
      "this model has no adapters (model.lora_rank = 0); export the full model instead"
    )
  if EXPERTS in lora.targets and model.config.mlps != (model.config.mixture.mlp,):
    raise UserError(
      "this model has dense MLPs or a shared expert, to which PEFT would apply the adapters of the "
      "experts too, because the matrices have the same names; export the full model, or leave "
      "'experts' out of model.lora_targets"
    )
  with atomic_folder(storage_path(folder)) as out:
    tensors = hf_from_adapters(model, params)
    if out is None:
      return
    modules = list(dict.fromkeys(name.split(".")[-3] for name in tensors))
    targets: Any = modules
    if source and is_multimodal(read_json(source, "config.json")):
      targets = rf".*\.{TEXT_MODULE}\..*\.({'|'.join(modules)})"  # others have the same names
      inner = f".{TEXT_MODULE}.layers."
      tensors = {name.replace(".layers.", inner, 1): x for name, x in tensors.items()}
    stored = {name: Stored("float32", x.shape) for name, x in tensors.items()}
    _write_tensors(out / "adapter_model.safetensors", stored, tensors.items())
    _write_json(
      out / "adapter_config.json",
      {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": targets,
      },
    )
    write_files(out, files)


def _cast(
  tensors: Iterable[tuple[str, np.ndarray]], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
  for name, x in tensors:
    with np.errstate(over="ignore"):  # an overflow is reported below
      x = x.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(x).all():
      raise UserError(
        f"tensor {name} has values that {dtype} cannot represent; save it as float32 or bfloat16"
      )
    yield name, x


def _write_configs(
  out: Path,
  config: ModelConfig,
  dtype: str,
  tokenizer: PreTrainedTokenizerBase | None,
  stop: Collection[int],
  defaults: tuple[dict[str, Any], dict[str, Any]],
  whole: dict[str, Any] | None,
) -> None:
  """Writes config.json and generation_config.json, which start from the source's `defaults`.

  `whole` is the source's config.json; None without a source.
  """
  eos = None if tokenizer is None else tokenizer.eos_token_id
  pad = None if tokenizer is None else tokenizer.pad_token_id
  if pad is None:
    pad = eos  # as Transformers does, with a warning
  bos = None if tokenizer is None else tokenizer.bos_token_id
  model = to_hf_config(config, dtype)
  if whole:
    model = with_carried(model, whole)
  if whole and is_multimodal(whole):
    text = {key: value for key, value in model.items() if key != "architectures"}
    model = whole | {"text_config": text}
  model |= defaults[0]
  generation = dict(defaults[1])
  if bos is not None:
    model["bos_token_id"] = bos
    generation["bos_token_id"] = bos
  if eos is not None:
    model["eos_token_id"] = eos
    stop = {*stop, eos}
  if stop:
    generation["eos_token_id"] = sorted(set(stop))
  if pad is not None:
    generation["pad_token_id"] = pad
  # Without a version, some versions of Transformers warn of a tokenizer fault of older ones.
  model["transformers_version"] = importlib.metadata.version("transformers")
  _write_json(out / "config.json", model)
  _write_json(out / "generation_config.json", generation)


def _write_weights(
  out: Path,
  stored: Mapping[str, Stored],
  tensors: Iterator[tuple[str, np.ndarray]],
  shard_bytes: int,
) -> None:
  """Writes all tensors to files of at most `shard_bytes`, with an index if there are several."""
  shards: list[dict[str, Stored]] = [{}]
  for name, entry in stored.items():
    if shards[-1] and _size({**shards[-1], name: entry}) > shard_bytes:
      shards.append({})
    shards[-1][name] = entry
  weight_map = {}
  for i, shard in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    if len(shards) == 1:
      file = "model.safetensors"
    _write_tensors(out / file, shard, itertools.islice(tensors, len(shard)))
    weight_map |= dict.fromkeys(shard, file)
  if len(shards) > 1:
    _write_json(
      out / "model.safetensors.index.json",
      {"metadata": {"total_size": _size(stored)}, "weight_map": weight_map},
    )


def _write_tensors(
  file: Path, stored: Mapping[str, Stored], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
  """Writes a safetensors file one tensor at a time; the library's writer needs all of them at once.

  The file consists of the header's length, the header and the data.
  """
  header = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, entry in stored.items():
    start = end
    end = start + entry.bytes
    code = DTYPE_CODES[entry.dtype]
    header[name] = {"dtype": code, "shape": entry.shape, "data_offsets": (start, end)}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
  with file.open("wb") as opened:
    opened.write(len(text).to_bytes(8, "little") + text)
    for _, x in tensors:
      opened.write(x.view(np.uint8).data)


def _size(stored: Mapping[str, Stored]) -> int:
  """Returns the number of bytes of tensors."""
  return sum(entry.bytes for entry in stored.values())


def write_files(out: Path, files: Mapping[str, str | bytes] | None) -> None:
  """Writes files to a folder: texts, or bytes."""
  for name, content in (files or {}).items():
    (out / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n")


CONFIG = "tokenizer_config.json"
# Arguments of the call that loaded the tokenizer, which Transformers 5 writes too.
NEW_CLASS, CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
LOADING_ARGUMENTS = ("backend", "is_local", "local_files_only")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: epath.Path) -> None:
  """Writes the tokenizer's files to the folder `out`.

  Transformers 5 writes the special tokens without a role of their own as a list named
  `extra_special_tokens`. Transformers 4 expects an object there and fails. Both versions read the
  older name, `additional_special_tokens`. Likewise, Transformers 5 gives the general class of
  tokenizers, which Llama 3 has, a name that Transformers 4 does not know.
  """
  with tempfile.TemporaryDirectory(prefix="gtpo_") as folder:
    tokenizer.save_pretrained(folder)
    file = Path(folder) / CONFIG
    values = json.loads(file.read_text(encoding="utf-8"))
    for name in LOADING_ARGUMENTS:
      values.pop(name, None)
    if values.get("tokenizer_class") == NEW_CLASS:
      values["tokenizer_class"] = CLASS_OF_BOTH
    if isinstance(values.get("extra_special_tokens"), list):
      values["additional_special_tokens"] = values.pop("extra_special_tokens")
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    for name in list_files(epath.Path(folder)):
      if not is_remote(out):
        (out / name).parent.mkdir(exist_ok=True)
      (out / name).write_bytes((Path(folder) / name).read_bytes())
