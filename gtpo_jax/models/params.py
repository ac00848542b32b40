"""Parameter trees: random initialisation, abstract shapes and shardings, from the declarations."""

from __future__ import annotations

import dataclasses
import functools
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

Params = dict[str, Any]  # nested dicts of arrays; layers are stacked on axis 0


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

  Raises:
    UserError: the size of another axis is not a multiple of its number of shards, or positions are
      split in a model with gated delta nets.
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
  return jax.jit(lambda k: nn.unbox(_init(model, k)), out_shardings=param_shardings(model))


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
