"""Times one decode step of a Qwen2.5 architecture with random weights, against a lower bound.

    python benchmarks/decode.py [--json FILE] [--preset qwen2.5-0.5b] [--dtype float32] \\
      [--batch 8] [--prompt_len 64] [--tokens 48]

The lower bound (`floor`) is the larger of two times measured on this machine: the time to read
every weight once (a sum over arrays of the same size), and the time of a program that runs only the
step's matrix products.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax
import jax.numpy as jnp

from gtpo_jax.models import PRESETS, ModelConfig, Transformer, init_params
from gtpo_jax.models.config import DTYPES
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
  """Returns the median seconds of `repeats` calls, after a first call that compiles."""
  seconds = []
  for _ in range(repeats + 1):
    started = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - started)
  return float(np.median(seconds[1:]))


def matrix_shapes(c: ModelConfig) -> list[tuple[int, int]]:
  """Returns the shapes of one layer's matrices: q, k, v, o, gate, up, down."""
  heads = c.heads * c.head_dim
  kv = c.kv_heads * c.head_dim
  attention = [(c.width, heads), (c.width, kv), (c.width, kv), (heads, c.width)]
  return [*attention, (c.width, c.mlp), (c.width, c.mlp), (c.mlp, c.width)]


def lower_bounds(c: ModelConfig, batch: int) -> tuple[float, float]:
  """Returns the seconds of a step's matrix products, and of reading every weight once."""
  dtype = DTYPES[c.compute_dtype]
  groups = c.heads // c.kv_heads
  layer = lambda: [jnp.full(shape, 0.01, dtype) for shape in matrix_shapes(c)]
  layers = [layer() for _ in range(c.layers)]
  table = jnp.full((c.vocab_size, c.width), 0.01, dtype)

  def products(layers: list[list[jax.Array]], table: jax.Array, x: jax.Array) -> jax.Array:
    for q, k, v, o, gate, up, down in layers:
      x = ((x @ q) + jnp.tile((x @ k) + (x @ v), groups)) @ o
      x = ((x @ gate) + (x @ up)) @ down
    return jnp.einsum("bd,vd->bv", x, table, preferred_element_type=jnp.float32).max(-1)

  def read(layers: list[list[jax.Array]], table: jax.Array) -> jax.Array:
    return sum(x.sum() for x in jax.tree.leaves((layers, table)))

  x = jnp.ones((batch, c.width), dtype)
  products_s = median_seconds(functools.partial(jax.jit(products), layers, table, x))
  read_s = median_seconds(functools.partial(jax.jit(read), layers, table))
  return products_s, read_s


def decode_step_seconds(c: ModelConfig, batch: int, prompt_len: int, tokens: int) -> float:
  """Returns the engine's seconds per decode step, without prefill and the first token."""
  prepare_devices()
  model = Transformer(c, make_mesh())
  engine = Engine(
    model,
    stop=(),
    pad=0,
    max_prompt_tokens=prompt_len,
    max_tokens=tokens,
    engine_config=EngineConfig(slots=batch),
  )
  params = engine.layout(init_params(model, jax.random.key(0)))
  prompts = np.random.default_rng(0).integers(0, c.vocab_size, (batch, prompt_len)).tolist()

  def sample(length: int) -> None:
    keys = engine.completion_keys(jax.random.key(0), batch, 1)
    buffer = engine.buffer(prompts, keys, token_limits=np.full((batch, 1), length))
    for _ in engine.generate(params, buffer, sampling_params=SamplingParams()):
      pass
    assert buffer.mask.sum() == length * batch

  total_s = median_seconds(lambda: sample(tokens), 3)
  first_s = median_seconds(lambda: sample(1), 3)
  return (total_s - first_s) / (tokens - 1)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--preset", default="qwen2.5-0.5b", choices=PRESETS)
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
  for name, default in {"batch": 8, "prompt_len": 64, "tokens": 48}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--json")
  args = parser.parse_args()
  c = dataclasses.replace(PRESETS[args.preset], compute_dtype=args.dtype, param_dtype=args.dtype)

  products_s, read_s = lower_bounds(c, args.batch)
  step_s = decode_step_seconds(c, args.batch, args.prompt_len, args.tokens)
  floor_s = max(products_s, read_s)
  layer_size = sum(a * b for a, b in matrix_shapes(c))
  weights = layer_size * c.layers + c.vocab_size * c.width
  weights_gb = weights * DTYPES[args.dtype](0).itemsize / 1e9
  result = {
    "step_s": step_s,
    "floor_s": floor_s,
    "times_the_floor": step_s / floor_s,
    "products_s": products_s,
    "read_s": read_s,
    "weights_gb": weights_gb,
    "read_gb_s": weights_gb / read_s,
    "tokens_per_s": args.batch / step_s,
    "preset": args.preset,
    "dtype": args.dtype,
    "batch": args.batch,
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": jax.devices()[0].device_kind,
  }
  for name, value in result.items():
    print(f"{name:<16} {value:.4g}" if isinstance(value, float) else f"{name:<16} {value}")
  if args.json:
    Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  main()
