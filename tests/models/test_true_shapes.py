"""Published shapes with random weights: parity with torch, and memory to load and save."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models import PRESETS, Transformer, abstract_params, load, save
from gtpo_jax.models.hf.config_json import to_hf_config
from gtpo_jax.models.hf.weights import hf_shapes
from gtpo_jax.runtime.mesh import single_device_mesh


@pytest.mark.manual
@pytest.mark.parametrize("preset", ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b"])
def test_a_published_shape_equals_torch(preset, tmp_path):
  """Qwen2.5-0.5B: 24 layers, 896 wide, 14 query and 2 KV heads, vocabulary 151,936."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  c = PRESETS[preset]
  torch.manual_seed(0)
  (tmp_path / "config.json").write_text(json.dumps(to_hf_config(c, "float32")))
  reference = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(tmp_path)
  ).eval()
  reference.save_pretrained(tmp_path / "hf", max_shard_size="800MB")
  tokens = np.random.default_rng(0).integers(0, c.vocab_size, (2, 96))
  with torch.no_grad():
    expected = reference(torch.from_numpy(tokens)).logits.numpy()
  del reference

  def logits(dtype):
    model, params = load(tmp_path / "hf", dtype)
    return np.asarray(
      jax.jit(lambda p: model.apply({"params": p}, jnp.asarray(tokens, jnp.int32)))(params)
    )

  ours = logits("float32")
  gap = np.abs(ours - expected).max()
  agree = (ours.argmax(-1) == expected.argmax(-1)).mean()
  half = logits("bfloat16")
  half_gap = np.abs(half - expected).mean()
  half_agree = (half.argmax(-1) == expected.argmax(-1)).mean()
  print(f"f32: max |difference| {gap:.2e}, argmax equal on {agree:.2%}")
  print(
    f"bf16: mean |difference| {half_gap:.2e} of logits with std {expected.std():.2f}, "
    f"argmax equal on {half_agree:.2%}"
  )
  assert gap <= 2e-4 and agree >= 0.999


# Numbers of layers in a preset, and how many tokens are read: for Gemma 3 of 270M, more than its
# window. At position 600, float32 rounds the cosines of both programs by 1e-5, hence 100 elsewhere.
# Transformers has no Gemma 3 or OLMo 3 without a window.
ONE_OF_EACH_KIND = [
  ("gemma-3-270m", (0, 5), 600),
  ("gemma-3-4b", (0,), 100),
  ("gemma-3-4b", (0, 5), 100),
  ("smollm3-3b", (0,), 100),
  ("smollm3-3b", (3,), 100),
  ("olmo-2-1b", (0,), 100),
  ("olmo-3-7b", (0,), 100),
  ("olmo-3-7b", (0, 3), 100),
  ("qwen3.5-0.8b", (2, 3), 100),
]


@pytest.mark.manual
@pytest.mark.parametrize(("preset", "layers", "length"), ONE_OF_EACH_KIND)
def test_one_layer_of_a_published_shape_equals_torch(preset, layers, length, tmp_path):
  """All sizes are the published ones, but for the vocabulary."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  c = PRESETS[preset]
  kinds = tuple(c.layer_kinds[i] for i in layers)
  c = dataclasses.replace(c, layers=len(kinds), kinds=kinds, vocab_size=2048)
  torch.manual_seed(0)
  (tmp_path / "config.json").write_text(json.dumps(to_hf_config(c, "float32")))
  reference = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(tmp_path)
  ).eval()
  with torch.no_grad():
    for x in reference.parameters():  # norms differ from 1, and logits are not small
      x.mul_(2).add_(0.02 * torch.randn_like(x))
  reference.save_pretrained(tmp_path / "hf")
  tokens = np.random.default_rng(0).integers(0, c.vocab_size, (1, length))
  with torch.no_grad():
    expected = reference(torch.from_numpy(tokens)).logits.numpy()
  del reference
  model, params = load(tmp_path / "hf", "float32")
  assert (model.config.width, model.config.heads) == (PRESETS[preset].width, PRESETS[preset].heads)
  assert model.config.layer_kinds == c.layer_kinds
  ours = jax.jit(lambda p: model.apply({"params": p}, jnp.asarray(tokens, jnp.int32)))(params)
  gap, scale = np.abs(np.asarray(ours) - expected).max(), np.abs(expected).max()
  print(f"max |difference| {gap / scale:.1e} of the scale of the logits, {scale:.1f}")
  assert gap <= 1e-5 * scale


LOAD = """
import json, re, sys, time
from pathlib import Path
from gtpo_jax.runtime.startup import prepare_devices, prepare_jax
prepare_jax()
prepare_devices()
import jax
from gtpo_jax.models import load
from gtpo_jax.runtime.mesh import make_mesh

def high_water():
  return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

mesh, before = make_mesh(data=1, fsdp=4, tensor=2), high_water()
began = time.perf_counter()
model, params = load(sys.argv[1], "bfloat16", mesh)
jax.block_until_ready(params)
seconds = time.perf_counter() - began
arrays = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
print(json.dumps({"arrays": arrays, "before": before, "peak": high_water(), "seconds": seconds}))
"""


@pytest.mark.manual
def test_loading_three_gigabytes_needs_little_more_than_the_arrays(tmp_path):
  """The 1.5B shapes in bf16, in several files, are loaded onto eight virtual devices."""
  config = dataclasses.replace(
    PRESETS["qwen2.5-1.5b"], param_dtype="bfloat16", compute_dtype="bfloat16"
  )
  model = Transformer(config, single_device_mesh())
  rng = np.random.default_rng(0)
  block = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
  fill = lambda like: jnp.asarray(np.resize(block, like.shape), jnp.bfloat16)
  params = jax.tree.map(fill, abstract_params(model))
  save(model, params, None, tmp_path / "hf", shard_bytes=10**9)
  del params
  assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
  done = subprocess.run(
    [sys.executable, "-c", LOAD, str(tmp_path / "hf")], capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  above = result["peak"] - result["arrays"]
  gib = result["arrays"] / 2**30
  speed = result["arrays"] / 1e9 / result["seconds"]
  print(
    f"{gib:.2f} GiB in {result['seconds']:.1f} s ({speed:.2f} GB/s); host peak "
    f"{above / 2**30:.2f} GiB above the arrays, {result['before'] / 2**30:.2f} of it before loading"
  )
  assert result["arrays"] >= 2 * sum(int(np.prod(shape)) for shape in hf_shapes(model).values())
  assert above <= 1.5 * 2**30


SAVE = """
import dataclasses, gc, json, re, sys, time
from pathlib import Path
from gtpo_jax.runtime.startup import prepare_jax
prepare_jax()
import jax, jax.numpy as jnp, numpy as np
from gtpo_jax.models import PRESETS, Transformer, abstract_params, save
from gtpo_jax.models.lora import add_lora
from gtpo_jax.models.config import Lora
from gtpo_jax.runtime.mesh import single_device_mesh

def status(key):
  return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

out, dtype, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = dataclasses.replace(
  PRESETS["qwen2.5-0.5b"], param_dtype="bfloat16", compute_dtype="bfloat16", lora=Lora(rank)
)
model, rng = Transformer(config, single_device_mesh()), np.random.default_rng(0)
block = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
fill = lambda like: jnp.asarray(np.resize(block, like.shape).astype(like.dtype))
params = jax.block_until_ready(jax.tree.map(fill, abstract_params(model)))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
before, began = status("VmRSS"), time.perf_counter()
save(model, params, None, out, dtype=dtype)
print(json.dumps({"above": status("VmHWM") - before, "seconds": time.perf_counter() - began}))
"""


@pytest.mark.parametrize(("dtype", "rank"), [("bfloat16", 16), ("float32", 0), ("bfloat16", 0)])
@pytest.mark.some(0, slow=1)
def test_saving_needs_one_tensor_and_one_layer_besides_the_arrays(dtype, rank, tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", SAVE, str(tmp_path / "out"), dtype, str(rank)],
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
  print(
    f"{dtype}, rank {rank}: {size / 2**30:.2f} GiB in {result['seconds']:.1f} s, "
    f"host peak {result['above'] / 2**30:.2f} GiB above the arrays"
  )
  largest = 151936 * 896 * (2 if dtype == "bfloat16" else 4)
  assert (
    size >= 4.9e8 * (2 if dtype == "bfloat16" else 4) and result["above"] <= largest + 0.3 * 2**30
  )
