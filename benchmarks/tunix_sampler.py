"""Runs Tunix's sampler on the workload of benchmarks/sampling.py, in its own process.

    PYTHON_WITH_GOOGLE_TUNIX tunix_sampler.py ARGUMENTS_AS_JSON LONGEST

Reads one seed per line, samples with it, and prints "done". Tunix has no length limit per
completion, so it generates until the longest is done, as it would with unknown lengths.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import sentencepiece
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2 import model as qwen2

ARGS = json.loads(sys.argv[1])
LONGEST = int(sys.argv[2])


class Bytes(sentencepiece.SentencePieceProcessor):
  """A tokenizer of bytes. A random model practically never samples its end token."""

  def pad_id(self):
    return 0

  def bos_id(self):
    return 0

  def eos_id(self):
    return 1

  def GetPieceSize(self):
    return ARGS["vocab"]

  def EncodeAsIds(self, text, **_):
    return [byte + 2 for byte in text.encode()]

  def DecodeIds(self, ids):
    return bytes((int(i) - 2) % 256 for i in ids if int(i) > 1).decode("latin1")

  Encode = encode = lambda self, text, **_: self.EncodeAsIds(text)
  Decode = decode = lambda self, ids, **_: self.DecodeIds(ids)


config = qwen2.ModelConfig(
  num_layers=ARGS["layers"],
  vocab_size=ARGS["vocab"],
  embed_dim=ARGS["width"],
  hidden_dim=4 * ARGS["width"],
  num_heads=ARGS["width"] // 64,
  head_dim=64,
  num_kv_heads=max(ARGS["width"] // 128, 1),
  rope_theta=1_000_000,
  norm_eps=1e-6,
  use_tied_embedding=True,
)
with Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")):
  model = qwen2.Qwen2(config, rngs=nnx.Rngs(0))
# Tunix initialises the MLPs with zeros, so every matrix gets random values here.
leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
keys = jax.random.split(jax.random.key(1), len(leaves))
random_leaves = [
  jax.random.normal(key, x.shape, x.dtype) * 0.02 if x.ndim > 1 else x
  for key, x in zip(keys, leaves, strict=True)
]
nnx.update(model, jax.tree.unflatten(tree, random_leaves))
cache = CacheConfig(
  cache_size=ARGS["prompt_len"] + LONGEST,
  num_layers=ARGS["layers"],
  num_kv_heads=config.num_kv_heads,
  head_dim=64,
)
sampler = Sampler(model, Bytes(), cache)
rng = np.random.default_rng(0)
prompts = [
  "".join(rng.choice(list("abcdefghij 0123456789"), ARGS["prompt_len"] - 1))
  for _ in range(ARGS["completions"])
]
for line in sys.stdin:
  out = sampler(
    prompts,
    max_generation_steps=LONGEST,
    max_prompt_length=ARGS["prompt_len"],
    temperature=1.0,
    top_p=1.0,
    seed=int(line),
    return_logprobs=True,
  )
  assert len(out.text) == len(prompts)
  print("done", flush=True)
