"""Hugging Face folders out: what vLLM, Transformers and llama.cpp open, written whole or not at all."""
from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import save_file

from gtpo_jax.errors import UserError
from gtpo_jax.models.hf import LAYER_NAMES, hf_from_adapters, hf_from_params, hf_shapes
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.presets import DTYPES, ModelConfig
from gtpo_jax.models.qwen2 import Params, Qwen2

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9
MANIFEST = "SHA256SUMS"


def save(model: Qwen2, params: Params, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path, *, dtype: str | None = None,
         stop: Collection[int] = (), files: Mapping[str, str] | None = None, shard_bytes: int = SHARD_BYTES) -> None:
  """Writes a model as a Hugging Face folder; adapters are merged.

  It holds safetensors (shards of at most `shard_bytes` with an index), config.json, generation_config.json, the tokenizer with its
  chat template, and `SHA256SUMS`, which `sha256sum -c` checks. It is written under another name and renamed at the end. Host memory
  holds one shard.

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
  params, model = jax.jit(lambda p: merge_lora(model, p))(params) if model.config.lora.rank else params, without_lora(model)
  with _whole(Path(folder)) as out:
    _write_weights(model, params, out, dtype, shard_bytes)
    eos = None if tokenizer is None else tokenizer.eos_token_id
    _write_json(out / "config.json", hf_config(model.config, dtype) | ({} if eos is None else {"eos_token_id": eos}))
    ends = sorted({*stop, *([] if eos is None else [eos])})
    pad = None if tokenizer is None else tokenizer.pad_token_id
    _write_json(out / "generation_config.json", ({"eos_token_id": ends} if ends else {}) | ({} if pad is None else {"pad_token_id": pad}))
    if tokenizer is not None:
      tokenizer.save_pretrained(out)
    _write_files(out, files)


def save_adapter(model: Qwen2, params: Params, folder: str | Path, base: str, files: Mapping[str, str] | None = None) -> None:
  """Writes the adapters alone, as a folder that `peft` loads onto the model `base`.

  Raises:
    UserError: the model has no adapters, or the folder holds something already.
  """
  lora = model.config.lora
  if not lora.rank:
    raise UserError("this model has no adapters (model.lora_rank = 0); export it whole")
  modules = [name.removesuffix(".weight").split(".")[-1] for (module, leaf), name, _ in LAYER_NAMES
             if leaf == "kernel" and module in lora.targets]
  with _whole(Path(folder)) as out:
    _write_tensors(out / "adapter_model.safetensors", hf_from_adapters(model, params))
    _write_json(out / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "target_modules": modules})
    _write_files(out, files)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """The contents of config.json."""
  values = {
      "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": config.vocab_size, "hidden_size": config.width,
      "intermediate_size": config.mlp, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
      "num_key_value_heads": config.kv_heads, "hidden_act": "silu", "max_position_embeddings": config.context,
      "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "tie_word_embeddings": config.tied, "attention_dropout": 0.0,
      "use_sliding_window": False, "use_cache": True, "initializer_range": 0.02, "torch_dtype": dtype}
  if config.head_dim * config.heads != config.width:
    values["head_dim"] = config.head_dim
  if config.yarn:
    yarn = config.yarn
    values["rope_scaling"] = {"type": "yarn", "rope_type": "yarn", "factor": yarn.factor, "original_max_position_embeddings": yarn.original,
                              "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    if yarn.attention_factor is not None:
      values["rope_scaling"]["attention_factor"] = yarn.attention_factor
  return values


def _write_weights(model: Qwen2, params: Params, out: Path, dtype: str, shard_bytes: int) -> None:
  itemsize, shards, size = np.dtype(DTYPES[dtype]).itemsize, [[]], 0
  shapes = hf_shapes(model)
  for name, shape in shapes.items():
    bytes_ = int(np.prod(shape)) * itemsize
    if shards[-1] and size + bytes_ > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += bytes_
  weight_map = {}
  for i, names in enumerate(shards):
    file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    with np.errstate(over="ignore"):  # what does not fit is found below
      tensors = {name: x.astype(DTYPES[dtype]) for name, x in hf_from_params(model, params, set(names)).items()}
    for name, x in tensors.items():
      if not np.isfinite(x).all():
        raise UserError(f"tensor {name} holds values that {dtype} cannot; save it as float32 or bfloat16")
    if jax.process_index() == 0:
      _write_tensors(out / file, tensors)
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * itemsize
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
  """A folder to write into that appears as `folder`, with its manifest, when all is written; nothing is left of it else."""
  folder = Path(os.path.abspath(folder))  # "." has no name to be renamed to
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"{str(folder)!r} holds something already; name a new folder")
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
      shutil.rmtree(old)  # of an export that was killed
    out = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    out.mkdir()
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from error
  try:
    yield out
    names = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    (out / MANIFEST).write_text("".join(f"{_sha256(out / name)}  {name}\n" for name in names))
    out.replace(folder)
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
  finally:
    shutil.rmtree(out, ignore_errors=True)


def _write_files(out: Path, files: Mapping[str, str] | None) -> None:
  for name, text in (files or {}).items():
    (out / name).write_text(text, encoding="utf-8")


def _write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
  save_file(dict(tensors), file, metadata={"format": "pt"})
  file.chmod(0o644)  # the library's files are for their owner alone; a server runs as somebody else


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n")


def _sha256(file: Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
