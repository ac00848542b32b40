"""The model for sampling: unstacked parameters, prefill, one decode step, and the next logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.attention.streams import stream_masks
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.delta.layer import DeltaState
from gtpo_jax.models.experts.routing import RouteShape
from gtpo_jax.models.kinds import ATTENTION, DELTA
from gtpo_jax.models.number_formats import einsum
from gtpo_jax.models.params import Params, abstract_params, at_path
from gtpo_jax.models.transformer import MIXERS, Layer, Transformer
from gtpo_jax.runtime.mesh import bytes_per_device, partition_spec

# Vectors that are not cast to the compute dtype: the scales of norms, and what decays depend on.
STORED = ("scale", "a_log", "dt_bias")


class DecodeParams(NamedTuple):
  """Parameters for sampling: one tree per layer, gathered over fsdp, in the compute dtype.

  Parameters in `STORED` keep their dtype, and so do quantised matrices.
  """

  outer: Params  # embedding, head, final norm
  layers: list[Params]  # with an axis 0 of size 1 if layers are apart


def make_decode_params(model: Transformer, params: Params) -> DecodeParams:
  """Casts the parameters, gathers them over fsdp and unstacks the layers.

  It runs once per rollout rather than once per token, in a program that passes on what it does not
  change (`PassingProgram`).

  Args:
    model: the architecture, on the sampling mesh.
    params: its parameters, on `model.mesh` or on another mesh of the same devices.
  """

  def prepare(x: jax.Array, stored: jax.ShapeDtypeStruct, kept: jax.ShapeDtypeStruct) -> jax.Array:
    if model.config.apart and x.dtype == kept.dtype and _is_same(stored, kept):
      return x
    # If x is on another mesh, move its shards first: otherwise a device would hold all of x.
    x = jax.lax.with_sharding_constraint(x.astype(kept.dtype), stored.sharding)
    return jax.lax.with_sharding_constraint(x, kept.sharding)

  params = jax.tree.map(prepare, params, abstract_params(model), _gathered_params(model))
  stacks = {stack.name for stack in model.config.stacks}
  outer = {name: value for name, value in params.items() if name not in stacks}
  of_place = lambda path, i: jax.tree.map(lambda x: x[i], at_path(params, path))
  if model.config.apart:
    of_place = lambda path, _: at_path(params, path)
  return DecodeParams(outer, [of_place(*place) for place in model.config.places])


class ParamsBytes(NamedTuple):
  """The bytes on one device of the parameters for sampling."""

  copied: int  # beside the parameters that are trained
  shared: int  # of arrays that are both


def params_bytes(model: Transformer, trained: Transformer) -> ParamsBytes:
  """Returns the bytes of the parameters for sampling.

  Args:
    model: the architecture on the sampling mesh.
    trained: the architecture that is trained; with adapters that `model` may lack.
  """
  kept = flatten_dict(_gathered_params(model))
  stored = flatten_dict(abstract_params(trained))

  def is_shared(path: tuple[str, ...]) -> bool:
    adapter = (*path[:-1], "lora_a")
    is_merged = path[-1] == "kernel" and adapter in stored.keys() - kept.keys()
    same = path in stored and _is_same(stored[path], kept[path])
    return model.config.apart and same and not is_merged

  shared = bytes_per_device([x for path, x in kept.items() if is_shared(path)])
  return ParamsBytes(bytes_per_device(kept) - shared, shared)


def _is_same(stored: jax.ShapeDtypeStruct, kept: jax.ShapeDtypeStruct) -> bool:
  """Whether an array can be used as it is stored."""
  same_place = stored.sharding.is_equivalent_to(kept.sharding, len(kept.shape))
  return same_place and (stored.shape, stored.dtype) == (kept.shape, kept.dtype)


def _layers(model: Transformer, params: DecodeParams) -> Iterator[tuple[Layer, Params]]:
  """Yields each layer with its parameters."""
  for kind, weights in zip(model.config.layer_kinds, params.layers, strict=True):
    if model.config.apart:
      weights = jax.tree.map(lambda x: x[0], weights)
    yield Layer(model.config, model.mesh, kind), weights


def _gathered_params(model: Transformer) -> Params:
  """Returns the shapes of parameters in the compute dtype, with shardings that leave out fsdp."""

  def gathered(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    integer = jnp.issubdtype(x.dtype, jnp.integer)  # quantised matrices stay as they are
    stays = path[-1].key in STORED or integer  # used in float32, as in training
    dtype = x.dtype if stays else DTYPES[model.config.compute_dtype]
    # Matrices outside of experts are sharded over expert and fsdp together.
    axes = (None if axes and "fsdp" in axes else axes for axes in x.sharding.spec)
    sharding = NamedSharding(model.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

  return jax.tree.map_with_path(gathered, abstract_params(model))


class Prefilled(NamedTuple):
  """The result of a pass over sequences [n, p]."""

  hidden: jax.Array  # [n, 1, 1, d], the last position's state after the final norm
  layers: list[KV]  # the keys and values of every layer with attention
  delta: list[DeltaState]  # [n, 1, ...], the state of every gated delta net after the last position
  routes: jax.Array | None  # [n, p, layers with experts, k], as in `Rollouts`; None without experts


def prefill(model: Transformer, params: DecodeParams, prompts: Prompts) -> Prefilled:
  """Runs the prompts through the model, each once."""
  x, kept, routes = _run_layers(model, params, prompts)
  hidden = model.apply({"params": params.outer}, x[:, :, -1:], method="final_norm")
  routes = None if routes is None else routes[:, 0]
  return Prefilled(hidden, kept[ATTENTION], kept[DELTA], routes)


def sequence_states(model: Transformer, params: DecodeParams, sequences: Prompts) -> jax.Array:
  """Returns the hidden states after the final norm of all positions, [n, p, d]."""
  x, _, _ = _run_layers(model, params, sequences)
  return model.apply({"params": params.outer}, x, method="final_norm")[:, 0]


def _run_layers(
  model: Transformer, params: DecodeParams, prompts: Prompts
) -> tuple[jax.Array, dict[str, list[Any]], jax.Array | None]:
  """Returns the states [n, 1, p, d] after the last layer, the layers' memories, and routes.

  The memories are lists by mixer: keys and values, or states. The routes are [n, 1, p, layers with
  experts, k]; None without experts.
  """
  x = model.apply({"params": params.outer}, prompts.tokens, method="embed")[:, None]
  masks = stream_masks(prompts.mask, model.config)
  kept = {mixer: [] for mixer in MIXERS}
  ids = []
  for layer, weights in _layers(model, params):
    x, of_layer, chosen = layer.apply({"params": weights}, x, masks, method="prefill")
    kept[layer.kind.mixer].append(of_layer)
    ids.append(chosen)
  return x, kept, _routes(model, ids)


def _routes(model: Transformer, ids: list[jax.Array | None]) -> jax.Array | None:
  """Returns the experts [..., layers with experts, k] from those of each layer, None if dense."""
  chosen = [x for x in ids if x is not None]
  if not chosen:
    return None
  return jnp.stack(chosen, axis=-2).astype(RouteShape.of(model.config).dtype)


class Decoded(NamedTuple):
  """The result of a step of one token [n, g]."""

  hidden: jax.Array  # [n, g, 1, d], the state that predicts the next token, after the final norm
  extras: list[Any]  # the second result of `attend` for each layer with attention
  delta: list[DeltaState]  # [n, g, ...], the new states of the gated delta nets
  # [n, g, 1, layers with experts, k], the experts that computed the token; None without experts
  routes: jax.Array | None


def decode_step(
  model: Transformer,
  params: DecodeParams,
  tokens: jax.Array,
  attend: Callable[[int, jax.Array, KV], tuple[jax.Array, Any]],
  delta: Sequence[DeltaState] = (),
) -> Decoded:
  """Runs one token of each sequence through the model.

  Args:
    model, params: the policy.
    tokens: i32[n, g].
    attend: (number among the layers with attention, queries [n, g, h, 1, e], the new position's
      keys and values) -> (the attention output [n, g, h, 1, e], a result of any type). It rotates
      queries and keys, reads the cache and keeps the new position.
    delta: the states of the gated delta nets.
  """
  c = model.config
  x = model.apply({"params": params.outer}, tokens[:, :, None], method="embed")
  kept = {mixer: [] for mixer in MIXERS}
  ids = []
  for layer, weights in _layers(model, params):
    if c.quantize:  # otherwise the compiler converts all weights once, before the loop over tokens
      weights, x = jax.lax.optimization_barrier((weights, x))
    mixer = layer.kind.mixer
    i = len(kept[mixer])
    past = functools.partial(attend, i) if mixer == ATTENTION else delta[i]
    x, of_layer, chosen = layer.apply({"params": weights}, x, past, method="decode")
    kept[mixer].append(of_layer)
    ids.append(chosen)
  hidden = model.apply({"params": params.outer}, x, method="final_norm")
  return Decoded(hidden, kept[ATTENTION], kept[DELTA], _routes(model, ids))


def next_logits(model: Transformer, params: DecodeParams, hidden: jax.Array) -> jax.Array:
  """Returns logits f32[s, v] of the next token, from final-norm hidden states [s, d]."""
  if model.mesh.devices.flat[0].platform == "tpu":
    head = model.apply({"params": params.outer}, method="head_table")
    multiply = functools.partial(_logits_by_vocabulary, precision=model.config.matmul_precision)
    return jax.shard_map(
      multiply,
      mesh=model.mesh,
      in_specs=(partition_spec(("vocab",)), partition_spec(("batch",))),
      out_specs=partition_spec(("vocab", "batch")),
      check_vma=False,
    )(head, hidden).T
  return model.apply({"params": params.outer}, hidden, method="logits")


def _logits_by_vocabulary(head: jax.Array, hidden: jax.Array, precision: str) -> jax.Array:
  """Returns logits f32[v, s] of one device, from its head [v, d] and hidden states [s, d].

  With the vocabulary as the first axis, blocks of tokens are whole tiles of a TPU's memory, and
  sampling sums over them without a copy of the logits.
  """
  logits = einsum("vd,sd->vs", head, hidden, precision)
  return with_layout_constraint(logits, Layout(major_to_minor=(0, 1)))
