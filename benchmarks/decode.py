"""A decode step of a real Qwen2.5 shape with random weights, against the floor of this machine.

    python benchmarks/decode.py [--json FILE] [--preset qwen2.5-0.5b] [--dtype float32] [--batch 8] [--prompt_len 64] [--tokens 48]

The floor is the larger of two times, measured here: reading every weight once (a sum over arrays of that many bytes), and the step's
matrix products alone, one after another in one program.
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

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax
import jax.numpy as jnp

from gtpo_jax.models import PRESETS, Qwen2, init_params
from gtpo_jax.models.presets import DTYPES
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import EngineConfig


def seconds(call: Callable[[], object], times: int = 5) -> float:
  """The median time of a call after its first."""
  took = []
  for _ in range(times + 1):
    began = time.perf_counter()
    jax.block_until_ready(call())
    took.append(time.perf_counter() - began)
  return float(np.median(took[1:]))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--preset", default="qwen2.5-0.5b", choices=PRESETS)
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
  for name, default in {"batch": 8, "prompt_len": 64, "tokens": 48}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--json")
  args = parser.parse_args()
  c = dataclasses.replace(PRESETS[args.preset], compute_dtype=args.dtype, param_dtype=args.dtype)
  dtype = DTYPES[args.dtype]

  heads = c.heads * c.head_dim
  kv = c.kv_heads * c.head_dim
  shapes = [
    (c.width, heads),
    (c.width, kv),
    (c.width, kv),
    (heads, c.width),
    (c.width, c.mlp),
    (c.width, c.mlp),
    (c.mlp, c.width),
  ]
  size = (sum(a * b for a, b in shapes) * c.layers + c.vocab_size * c.width) * dtype(0).itemsize
  matrices = [[jnp.full(shape, 0.01, dtype) for shape in shapes] for _ in range(c.layers)]
  table = jnp.full((c.vocab_size, c.width), 0.01, dtype)

  def products(matrices: list[list[jax.Array]], table: jax.Array, x: jax.Array) -> jax.Array:
    for q, k, v, o, gate, up, down in matrices:
      x = ((x @ q) + jnp.tile((x @ k) + (x @ v), heads // kv)) @ o
      x = ((x @ gate) + (x @ up)) @ down
    return jnp.einsum("bd,vd->bv", x, table, preferred_element_type=jnp.float32).max(-1)

  product = jax.jit(products)
  x = jnp.ones((args.batch, c.width), dtype)
  product_s = seconds(functools.partial(product, matrices, table, x))
  read = jax.jit(lambda matrices, table: sum(x.sum() for x in jax.tree.leaves((matrices, table))))
  read_s = seconds(functools.partial(read, matrices, table))
  matrices = table = None  # make room

  model = Qwen2(c, make_mesh())
  engine = Engine(
    model,
    stop=(),
    pad=0,
    max_prompt_tokens=args.prompt_len,
    max_tokens=args.tokens,
    engine_config=EngineConfig(slots=args.batch),
  )
  params = engine.layout(init_params(model, jax.random.key(0)))
  prompts = (
    np.random.default_rng(0).integers(0, c.vocab_size, (args.batch, args.prompt_len)).tolist()
  )

  def sample(tokens: int) -> None:
    token_limits = np.full((args.batch, 1), tokens)
    *_, (buffer, _) = engine.generate(
      params,
      prompts,
      jax.random.key(0),
      group=1,
      sampling_params=SamplingParams(),
      token_limits=token_limits,
    )
    assert buffer.mask.sum() == tokens * args.batch

  whole_s = seconds(lambda: sample(args.tokens), 3)
  first_s = seconds(lambda: sample(1), 3)
  step_s = (whole_s - first_s) / (args.tokens - 1)
  floor_s = max(product_s, read_s)
  result = {
    "step_s": step_s,
    "floor_s": floor_s,
    "times_the_floor": step_s / floor_s,
    "products_s": product_s,
    "read_s": read_s,
    "weights_gb": size / 1e9,
    "read_gb_s": size / 1e9 / read_s,
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
