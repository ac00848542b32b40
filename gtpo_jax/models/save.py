"""Hugging Face folders out: what vLLM, Transformers and llama.cpp open, written whole or not at all."""

from __future__ import annotations

import collections
import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, sync_global_devices

from gtpo_jax.models.hf import LAYER_NAMES, hf_from_adapters, hf_from_params, hf_shapes
from gtpo_jax.models.presets import DTYPES, ModelConfig
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.runtime.errors import UserError

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9
MANIFEST = "SHA256SUMS"
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of safetensors


def save(
  model: Qwen2,
  params: Params,
  tokenizer: PreTrainedTokenizerBase | None,
  folder: str | Path,
  *,
  dtype: str | None = None,
  stop: Collection[int] = (),
  files: Mapping[str, str] | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a model as a Hugging Face folder; adapters are merged.

  It holds safetensors (shards of at most `shard_bytes` with an index), config.json, generation_config.json, the tokenizer with its
  chat template, and `SHA256SUMS`, which `sha256sum -c` checks. It is written under another name and renamed at the end. Host memory
  holds one tensor. Of several processes all must call; the first one writes.

  Args:
    model, params: what is written.
    tokenizer: of transformers; None for none.
    folder: must not exist yet, or be empty.
    dtype: "float32", "bfloat16" or "float16"; the parameters' own if None.
    stop: ids that end a completion, for generation_config.json, besides the tokenizer's end token.
    files: further text files by name, such as README.md.
    shard_bytes: the most bytes of tensors a file.

  Raises:
    UserError: the folder holds something already, or the dtype is unknown.
  """
  dtype = dtype or model.config.param_dtype
  if dtype not in DTYPES:
    raise UserError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
  shapes = hf_shapes(model)
  tensors = _converted(hf_from_params(model, params), dtype)
  with _whole(Path(folder)) as out:
    if out is None:
      collections.deque(tensors, maxlen=0)  # the writer needs our part of each
      return
    _write_weights(out, shapes, tensors, dtype, shard_bytes)
    eos = None if tokenizer is None else tokenizer.eos_token_id
    _write_json(
      out / "config.json",
      hf_config(model.config, dtype) | ({} if eos is None else {"eos_token_id": eos}),
    )
    ends = sorted({*stop, *([] if eos is None else [eos])})
    pad = None if tokenizer is None else tokenizer.pad_token_id
    _write_json(
      out / "generation_config.json",
      ({"eos_token_id": ends} if ends else {}) | ({} if pad is None else {"pad_token_id": pad}),
    )
    if tokenizer is not None:
      tokenizer.save_pretrained(out)
    _write_files(out, files)


def save_adapter(
  model: Qwen2,
  params: Params,
  folder: str | Path,
  base: str,
  files: Mapping[str, str] | None = None,
) -> None:
  """Writes the adapters alone, as a folder that `peft` loads onto the model `base`.

  Raises:
    UserError: the model has no adapters, or the folder holds something already.
  """
  lora = model.config.lora
  if not lora.rank:
    raise UserError("this model has no adapters (model.lora_rank = 0); export it whole")
  modules = [
    name.removesuffix(".weight").split(".")[-1]
    for (module, leaf), name, _ in LAYER_NAMES
    if leaf == "kernel" and module in lora.targets
  ]
  with _whole(Path(folder)) as out:
    tensors = hf_from_adapters(model, params)
    if out is None:
      return
    _write_tensors(
      out / "adapter_model.safetensors",
      {name: x.shape for name, x in tensors.items()},
      tensors.items(),
      "float32",
    )
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
        "target_modules": modules,
      },
    )
    _write_files(out, files)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """The contents of config.json."""
  values = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "hidden_act": "silu",
    "max_position_embeddings": config.context,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tied,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "torch_dtype": dtype,
  }
  if config.head_dim * config.heads != config.width:
    values["head_dim"] = config.head_dim
  if config.yarn:
    yarn = config.yarn
    values["rope_scaling"] = {
      "type": "yarn",
      "rope_type": "yarn",
      "factor": yarn.factor,
      "original_max_position_embeddings": yarn.original,
      "beta_fast": yarn.beta_fast,
      "beta_slow": yarn.beta_slow,
    }
    if yarn.attention_factor is not None:
      values["rope_scaling"]["attention_factor"] = yarn.attention_factor
  return values


def _converted(
  tensors: Iterable[tuple[str, np.ndarray]], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
  for name, x in tensors:
    with np.errstate(over="ignore"):  # what does not fit is found below
      x = x.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(x).all():
      raise UserError(
        f"tensor {name} holds values that {dtype} cannot; save it as float32 or bfloat16"
      )
    yield name, x


def _write_weights(
  out: Path,
  shapes: Mapping[str, tuple[int, ...]],
  tensors: Iterator[tuple[str, np.ndarray]],
  dtype: str,
  shard_bytes: int,
) -> None:
  shards: list[dict[str, tuple[int, ...]]] = [{}]
  for name, shape in shapes.items():
    if shards[-1] and _size({**shards[-1], name: shape}, dtype) > shard_bytes:
      shards.append({})
    shards[-1][name] = shape
  weight_map = {}
  for i, held in enumerate(shards):
    file = (
      "model.safetensors"
      if len(shards) == 1
      else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    )
    _write_tensors(out / file, held, itertools.islice(tensors, len(held)), dtype)
    weight_map |= dict.fromkeys(held, file)
  if len(shards) > 1:
    _write_json(
      out / "model.safetensors.index.json",
      {"metadata": {"total_size": _size(shapes, dtype)}, "weight_map": weight_map},
    )


def _write_tensors(
  file: Path,
  shapes: Mapping[str, tuple[int, ...]],
  tensors: Iterable[tuple[str, np.ndarray]],
  dtype: str,
) -> None:
  """A safetensors file, a tensor at a time, where the library's writer wants them all: the header's length, the header, the data."""
  header = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, shape in shapes.items():
    start = end
    end = end + _size({name: shape}, dtype)
    header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (start, end)}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
  with file.open("wb") as opened:
    opened.write(len(text).to_bytes(8, "little") + text)
    for _, x in tensors:
      opened.write(x.view(np.uint8).data)


def _size(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
  """Bytes of tensors of these shapes."""
  return sum(map(math.prod, shapes.values())) * np.dtype(DTYPES[dtype]).itemsize


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path | None]:
  """A folder to write into that appears as `folder`, with its manifest, when all is written; nothing is left of it else.

  None in every process but the first, which alone writes; they too go on when it is there.
  """
  folder = Path(os.path.abspath(folder))  # "." has no name to be renamed to
  out, refusal = None, None
  if jax.process_index() == 0:
    try:
      out = _begin(folder)
    except UserError as error:
      refusal = error
  if broadcast_one_to_all(np.bool_(refusal is not None)):
    raise refusal or UserError(f"cannot write {str(folder)!r}: process 0 says why")
  try:
    yield out
    if out is not None:
      names = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
      (out / MANIFEST).write_text("".join(f"{_sha256(out / name)}  {name}\n" for name in names))
      out.replace(folder)
    sync_global_devices("saved")
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
  finally:
    if out is not None:
      shutil.rmtree(out, ignore_errors=True)


def _begin(folder: Path) -> Path:
  """The folder that is to become `folder`; what a killed save of that name left is taken away."""
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"{str(folder)!r} holds something already; name a new folder")
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
      shutil.rmtree(old)
    out = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    out.mkdir()
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from error
  return out


def _write_files(out: Path, files: Mapping[str, str] | None) -> None:
  for name, text in (files or {}).items():
    (out / name).write_text(text, encoding="utf-8")


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n")


def _sha256(file: Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
