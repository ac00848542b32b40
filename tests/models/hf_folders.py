"""Hugging Face folders of random torch models, saved by transformers, and tools to edit them."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.models.families import FAMILIES
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import SamplingParams

TINY = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "tie_word_embeddings": True,
}


@functools.cache
def random_model(**changes):
  """Our model with random parameters, of about the size of `TINY`."""
  sizes = {"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
  model = Transformer(ModelConfig(**sizes | {"mlp": 48} | changes), single_device_mesh())
  return model, init_params(model, jax.random.key(0))


def torch_model(model_type="qwen2", **changes):
  """A model of transformers whose norms and biases are random too, so that every tensor matters."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  kind = getattr(transformers, FAMILIES[model_type].architecture)
  model = kind(kind.config_class(**TINY | changes, attn_implementation="eager")).eval()
  with torch.no_grad():
    for weights in model.parameters():
      weights.add_(0.15 * torch.randn(weights.shape))
  return model


@functools.cache
def _saved_by_torch(options, dtype, shard):
  """A folder that transformers saved, and its torch model."""
  import torch

  model = torch_model(**json.loads(options)).to(getattr(torch, dtype))
  folder = Path(tempfile.mkdtemp(prefix="gtpo_hf_")) / "hf"
  model.save_pretrained(folder, max_shard_size=shard)
  return folder, model


def hf_folder(dtype="float32", shard="5GB", **changes):
  """A cached folder and its torch model; `changes` are `model_type` and settings of its config."""
  pytest.importorskip("torch")
  return _saved_by_torch(json.dumps(changes, sort_keys=True), dtype, shard)


def per_expert(tensors):
  """Tensors by their names in memory, as those of a folder: one for each matrix of each expert."""
  named = {}
  for name, x in tensors.items():
    stem, _, matrices = name.partition(".experts.")
    if not matrices:
      named[name] = x
      continue
    for i, expert in enumerate(x):
      parts = {"down_proj": expert}
      if matrices == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), np.split(expert, 2), strict=True))
      named |= {f"{stem}.experts.{i}.{part}.weight": value for part, value in parts.items()}
  return named


def padded_batch(vocab=64, length=17):
  """Tokens and mask of eight rows; some are padded on the left and some on the right."""
  tokens = np.random.default_rng(0).integers(0, vocab, (8, length))
  mask = np.ones((8, length), bool)
  mask[1, :5] = False
  mask[2, -4:] = False
  mask[5, : length - 1] = False
  mask[6, 1:] = False
  return tokens, mask


def torch_logits(model, tokens, mask=None):
  """The torch model's logits, with positions counted from the first real token."""
  import torch

  mask = np.ones(tokens.shape, bool) if mask is None else mask
  with torch.no_grad():
    return (
      model(
        torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        position_ids=torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0)),
      )
      .logits.float()
      .numpy()
    )


def our_logits(model, params, tokens, mask=None):
  mask = np.ones(tokens.shape, bool) if mask is None else mask
  return np.asarray(
    jax.jit(lambda p, t, m: model.apply({"params": p}, t, m))(
      params, jnp.asarray(tokens), jnp.asarray(mask)
    )
  )


def torch_greedy(model, prompts, count, stop=None):
  """The new tokens [n, count] of `generate` on left-padded prompts, 0 after the end."""
  import torch

  width = max(map(len, prompts))
  tokens = np.zeros((len(prompts), width), np.int64)
  mask = np.zeros((len(prompts), width), np.int64)
  for i, prompt in enumerate(prompts):
    tokens[i, width - len(prompt) :] = prompt
    mask[i, width - len(prompt) :] = 1
  out = model.generate(
    torch.from_numpy(tokens),
    attention_mask=torch.from_numpy(mask),
    max_new_tokens=count,
    do_sample=False,
    pad_token_id=0,
    eos_token_id=stop,
  ).numpy()[:, width:]
  return np.pad(out, ((0, 0), (0, count - out.shape[1])))


def our_greedy(model, params, prompts, count, stop=(), **settings):
  # Prompts are padded beyond the longest one, because padding must not matter.
  longest = max(map(len, prompts)) + 3
  engine = Engine(ProgramSettings(model, stop, 0, longest, count, **settings))
  rollouts = engine.sample(
    engine.layout(params),
    prompts,
    jax.random.key(0),
    group=1,
    sampling_params=SamplingParams(temperature=0.0),
  )
  return np.asarray(rollouts.tokens[:, 0])


def raw_tensors(folder):
  """{name: (dtype, shape, bytes)} of a folder's safetensors, read without the library."""
  found = {}
  for file in sorted(folder.glob("*.safetensors")):
    header, data = split_file(file)
    for name, entry in header.items():
      if name != "__metadata__":
        start, end = entry["data_offsets"]
        assert name not in found
        found[name] = entry["dtype"], tuple(entry["shape"]), data[start:end]
  return found


def split_file(file):
  """A safetensors file as (header, data)."""
  content = file.read_bytes()
  size = int.from_bytes(content[:8], "little")
  return json.loads(content[8 : 8 + size]), content[8 + size :]


def join_file(file, header, data):
  """The inverse of `split_file`. The header may also be text that `json` would not write."""
  text = (header if isinstance(header, str) else json.dumps(header)).encode()
  file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_json(file, **changes):
  """Sets keys of a JSON object; None removes a key."""
  values = json.loads(file.read_text()) | changes
  file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
