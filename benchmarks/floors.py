"""The model of step.py and sampling.py, and the least time of the products that a step needs.

These are the products with the model's weights: forward, and backward with respect to inputs and
weights (6 FLOP per weight and token). Nothing is recomputed, all tokens of an update are multiplied
with a weight at once, prompts are computed once per group, and attention is not counted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.params import Params

HEAD_DIM = 64
# A measured program computes a product up to this many times with different arrays, of this many
# bytes in all. Like the layers of a model, they do not fit in the caches of a CPU together.
MOST_AT_ONCE = 16
MOST_BYTES = 2**27
REPEATS = 5


def workload_model(args: argparse.Namespace) -> ModelConfig:
  """Returns the shape that the arguments of a script describe, with float32 parameters."""
  if args.model:
    shape = read_config(Path(args.model), "float32")
    return dataclasses.replace(shape, compute_dtype=args.compute_dtype, remat=args.remat)
  return ModelConfig(
    args.vocab,
    args.width,
    args.layers,
    heads=args.width // HEAD_DIM,
    kv_heads=max(args.width // (2 * HEAD_DIM), 1),
    head_dim=HEAD_DIM,
    mlp=4 * args.width,
    compute_dtype=args.compute_dtype,
    remat=args.remat,
  )


def workload_params(args: argparse.Namespace, model: Transformer) -> Params:
  """Returns the weights of the folder that the arguments name, or random ones."""
  if args.model:
    return read_params(model, Path(args.model))
  return init_params(model, jax.random.key(0))


class Product(NamedTuple):
  """A matrix product [rows, inner] x [inner, columns], and how often a phase computes it."""

  rows: int
  inner: int
  columns: int
  count: int

  @property
  def flops(self) -> int:
    """FLOP of all computations."""
    return 2 * math.prod(self)


def layer_matrices(c: ModelConfig) -> list[tuple[int, int]]:
  """Returns the (inputs, outputs) of one layer's matrices: q, k, v, o, gate, up, down."""
  heads = c.heads * c.head_dim
  kv = c.kv_heads * c.head_dim
  attention = [(c.width, heads), (c.width, kv), (c.width, kv), (heads, c.width)]
  return [*attention, (c.width, c.mlp), (c.width, c.mlp), (c.mlp, c.width)]


def update_products(
  c: ModelConfig, prompt_tokens: int, completion_tokens: int, chunk: int
) -> list[Product]:
  """Returns the products of one update.

  Args:
    c: the architecture.
    prompt_tokens: the tokens of all prompts, with their padding.
    completion_tokens: those of all completions. Only these have logits.
    chunk: the most tokens whose logits are computed at once.
  """
  tokens = prompt_tokens + completion_tokens
  products = []
  for inputs, outputs in layer_matrices(c):
    products += _with_gradients(tokens, inputs, outputs, c.layers)
  chunks = -(-completion_tokens // chunk)
  return products + _with_gradients(-(-completion_tokens // chunks), c.width, c.vocab_size, chunks)


def sampling_products(
  c: ModelConfig, prompt_tokens: int, completions: int, slots: int, steps: int
) -> list[Product]:
  """Returns the products of sampling `completions` of `steps` tokens each, `slots` at once.

  The last token of a completion is not read.
  """
  rows = min(slots, completions)
  batches = -(-completions // slots)
  read = batches * (steps - 1)
  layers = [
    Product(*shape, count * c.layers)
    for matrix in layer_matrices(c)
    for *shape, count in ((prompt_tokens, *matrix, 1), (rows, *matrix, read))
  ]
  return [*layers, Product(rows, c.width, c.vocab_size, batches * steps)]


def total_flops(products: Iterable[Product]) -> int:
  """Returns the FLOP of all products."""
  return sum(product.flops for product in products)


def measure_seconds(products: Iterable[Product], compute_dtype: str) -> float:
  """Returns the seconds of all products on the first device, from the time of each shape alone."""
  counts: collections.Counter[tuple[int, ...]] = collections.Counter()
  for *shape, count in products:
    counts[tuple(shape)] += count
  dtype = DTYPES[compute_dtype]
  return sum(count * _seconds(*shape, count, dtype) for shape, count in counts.items() if count)


def _with_gradients(tokens: int, inputs: int, outputs: int, count: int) -> list[Product]:
  """Returns the products of `count` matrices: forward, and the gradients of inputs and weights."""
  return [
    Product(tokens, inputs, outputs, count),
    Product(tokens, outputs, inputs, count),
    Product(inputs, tokens, outputs, count),
  ]


def _seconds(rows: int, inner: int, columns: int, count: int, dtype: jax.typing.DTypeLike) -> float:
  """Returns the median time of a product, with the layout of its second operand that is faster.

  Results are float32, as XLA's library for CPUs computes them.
  """
  size = (rows * inner + inner * columns) * jnp.dtype(dtype).itemsize
  at_once = max(min(count, MOST_AT_ONCE, MOST_BYTES // size), 1)
  left = [jnp.full((rows, inner), 0.01, dtype) for _ in range(at_once)]

  def median(shape: tuple[int, int], axis: int) -> float:
    multiply = functools.partial(
      jax.lax.dot_general,
      dimension_numbers=(((1,), (axis,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

    # The results are written over `out`. A process that asks for new memory waits for its pages.
    @functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
    def multiply_all(
      left: list[jax.Array], right: list[jax.Array], out: list[jax.Array]
    ) -> list[jax.Array]:
      return list(map(multiply, left, right))

    right = [jnp.full(shape, 0.01, dtype) for _ in range(at_once)]
    out = [jnp.zeros((rows, columns), jnp.float32) for _ in range(at_once)]
    seconds = []
    for _ in range(REPEATS + 1):
      started = time.perf_counter()
      out = jax.block_until_ready(multiply_all(left, right, out))
      seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:])) / at_once

  return min(median((inner, columns), 0), median((columns, inner), 1))
