"""Parameter trees: random initialisation, abstract shapes and shardings, from the declarations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from gtpo_jax.models.config import Lora, ModelConfig
from gtpo_jax.models.declaration import KINDS, Declaration, Kind
from gtpo_jax.models.number_formats import quantize
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, indivisible_error, partition_spec, single_device_mesh

# Nested dicts of arrays; layers are stacked on axis 0, which has size 1 where layers are apart.
Params = dict[str, Any]


def init_params(model: Transformer, key: jax.Array) -> Params:
  """Returns random parameters, created directly in their shardings."""
  return _initialisation(model)(key)


def declared_params(model: Transformer) -> Params:
  """Returns the `Declaration` of every parameter, whose value is the abstract shape."""
  leaves, structure = _declarations(model)
  return jax.tree.unflatten(structure, leaves)


def abstract_params(model: Transformer) -> Params:
  """Returns shapes, dtypes and shardings of the parameters without allocating them."""
  context = model.mesh.shape["context"]
  if model.config.delta and context > 1:
    raise UserError(
      f"mesh.context = {context} divides the positions of a sequence, which gated delta nets read "
      "one after another; set it to 1, and use mesh.fsdp or mesh.tensor"
    )

  def abstract(declaration: Declaration) -> jax.ShapeDtypeStruct:
    names = list(declaration.names)
    for i, (name, size) in enumerate(zip(names, declaration.value.shape, strict=True)):
      if size % axis_size(model.mesh, name):
        if name != "kv_heads":
          raise indivisible_error(name, size, model.mesh)
        names[i] = None
    sharding = NamedSharding(model.mesh, partition_spec(names))
    return jax.ShapeDtypeStruct(declaration.value.shape, declaration.value.dtype, sharding=sharding)

  return jax.tree.map(abstract, declared_params(model), is_leaf=_is_declaration)


def param_shardings(model: Transformer) -> Params:
  """Returns a `NamedSharding` for every parameter, from the names of its axes.

  Key/value heads are replicated if the tensor axis does not divide their number.
  """
  return jax.tree.map(lambda x: x.sharding, abstract_params(model))


def quantize_params(model: Transformer, params: Params) -> Params:
  """Quantises the matrices of parameters in `param_dtype`, under `jax.jit`.

  Args:
    model: the quantised architecture.
    params: the parameters of the same architecture without quantisation.
  """
  declared = flatten_dict(declared_params(model))
  quantised = {}
  for path, x in flatten_dict(params).items():
    scale = scale_path(path)
    if scale in declared:
      x, quantised[scale] = quantize(x, declared[path].last_input, model.config.quantize)
    quantised[path] = x
  return unflatten_dict(quantised)


def stacked(model: Transformer) -> Transformer:
  """Returns the same architecture with stacked layers, the form of checkpoints."""
  return Transformer(dataclasses.replace(model.config, apart=False), model.mesh)


def stack_layers(model: Transformer | None, tree: Any) -> Any:
  """Returns parameters of `stacked(model)` from those of `model`; no copy if it is stacked.

  Args:
    model: the architecture; None for one with stacked layers.
    tree: parameters, some of them, or an optimizer's state, which has trees of such a form.
  """
  if model is None or not model.config.apart:
    return tree
  places = list(zip(model.config.places, stacked(model).config.places, strict=True))

  def join(params: Params) -> Params:
    parts: dict[tuple[str, ...], list[jax.Array]] = {}
    flat = flatten_dict(params)
    for path, x in flat.items():
      if path[:1] not in {own.path for own, _ in places}:
        parts[path] = [x]
    for (own, place), (path, x) in itertools.product(places, flat.items()):
      if path[:1] == own.path:
        parts.setdefault((*place.path, *path[1:]), []).append(x)
    joined = {path: jnp.concatenate(xs) if xs[1:] else xs[0] for path, xs in parts.items()}
    return unflatten_dict(_with_matrices_as(model.config.param_dtype, joined))

  return _map_params(join, tree)


def unstack_layers(model: Transformer, tree: Any) -> Any:
  """Returns parameters of `model` from those of `stacked(model)`; see `stack_layers`."""
  if not model.config.apart:
    return tree
  stacks = {stack.name for stack in stacked(model).config.stacks}
  places = list(zip(model.config.places, stacked(model).config.places, strict=True))

  def split(params: Params) -> Params:
    flat = flatten_dict(params)
    parts = {path: x for path, x in flat.items() if path[0] not in stacks}
    for (own, place), (path, x) in itertools.product(places, flat.items()):
      depth = len(place.path)
      if path[:depth] == place.path:
        parts[(*own.path, *path[depth:])] = x[place.index : place.index + 1]
    return unflatten_dict(_with_matrices_as(model.config.matrix_dtype, parts))

  return _map_params(split, tree)


def _map_params(change: Callable[[Params], Params], tree: Any) -> Any:
  """Applies a function to each tree of parameters within `tree`."""
  return jax.tree.map(
    lambda x: change(x) if isinstance(x, dict) else x, tree, is_leaf=lambda x: isinstance(x, dict)
  )


def _with_matrices_as(
  dtype: str, flat: dict[tuple[str, ...], jax.Array]
) -> dict[tuple[str, ...], jax.Array]:
  """Returns parameters by path, with base matrices and their scales in a format."""

  def as_stored(path: tuple[str, ...], x: jax.Array) -> jax.Array:
    is_matrix = path[-1] in ("kernel", "kernel_scale") and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if is_matrix else x

  return {path: as_stored(path, x) for path, x in flat.items()}


def at_path(params: Params, path: tuple[str, ...]) -> Any:
  """Returns the parameter, or the tree of them, at `path`."""
  return functools.reduce(lambda tree, key: tree[key], path, params)


def scale_path(path: tuple[str, ...]) -> tuple[str, ...] | None:
  """Returns the path of the scales that a quantised matrix would have; None for other arrays."""
  return (*path[:-1], "kernel_scale") if path[-1] == "kernel" else None


@functools.cache
def matmul_params(config: ModelConfig) -> int:
  """Returns the number of parameters in matrix products, without adapters.

  It counts all matrices and the output head, tied or not, but not the embedding lookup.
  """
  plain = dataclasses.replace(config, lora=Lora(), quantize="", attention="")
  declared = flatten_dict(declared_params(Transformer(plain, single_device_mesh())))
  matrices = [x.value.size for path, x in declared.items() if KINDS[path[-1]] is Kind.MATRIX]
  return sum(matrices) + config.vocab_size * config.width


def active_params(config: ModelConfig) -> int:
  """Returns the number of parameters in the matrix products of one token, without adapters.

  This is the N in the estimate of 6 N FLOP per trained token.
  """
  unused = 0
  if config.mixture:
    unused = config.expert_params * (1 - config.mixture.per_token / config.mixture.experts)
  return matmul_params(config) - round(unused)


@functools.lru_cache(maxsize=32)
def _initialisation(model: Transformer) -> Callable[[jax.Array], Params]:
  init = lambda k: unstack_layers(model, nn.unbox(_init(stacked(model), k)))
  return jax.jit(init, out_shardings=param_shardings(model))


@functools.lru_cache(maxsize=32)
def _declarations(model: Transformer) -> tuple[tuple[Declaration, ...], jax.tree_util.PyTreeDef]:
  """Traces the initialisation once per model; a run asks for its parameters many times."""
  declared = jax.eval_shape(lambda k: _init(model, k), jax.random.key(0))
  leaves, structure = jax.tree.flatten(declared, is_leaf=_is_declaration)
  return tuple(leaves), structure


def _is_declaration(x: Any) -> bool:
  return isinstance(x, Declaration)


def _init(model: Transformer, key: jax.Array) -> Params:
  tokens = jnp.zeros((axis_size(model.mesh, "batch"), 2), jnp.int32)
  return model.init(key, tokens)["params"]
