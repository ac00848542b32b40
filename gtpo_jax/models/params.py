"""Parameter trees: random initialisation, abstract shapes and shardings, from the declarations."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from gtpo_jax.models.config import Lora, ModelConfig
from gtpo_jax.models.declaration import KINDS, Declaration, Kind
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.mesh import axis_size, indivisible_error, partition_spec, single_device_mesh

Params = dict[str, Any]  # nested dicts of arrays; layers are stacked on axis 0


def init_params(model: Qwen2, key: jax.Array) -> Params:
  """Returns random parameters, created directly in their shardings."""
  shardings = param_shardings(model)
  return jax.jit(lambda k: nn.unbox(_init(model, k)), out_shardings=shardings)(key)


def declared_params(model: Qwen2) -> Params:
  """Returns the `Declaration` of every parameter, whose value is the abstract shape."""
  return jax.eval_shape(lambda k: _init(model, k), jax.random.key(0))


def abstract_params(model: Qwen2) -> Params:
  """Returns shapes, dtypes and shardings of the parameters without allocating them.

  Raises:
    UserError: as in `param_shardings`.
  """
  abstract = lambda declaration: jax.ShapeDtypeStruct(
    declaration.value.shape, declaration.value.dtype, sharding=_sharding(declaration, model)
  )
  return jax.tree.map(abstract, declared_params(model), is_leaf=_is_declaration)


def param_shardings(model: Qwen2) -> Params:
  """Returns a `NamedSharding` for every parameter, from the names of its axes.

  Key/value heads are replicated if the tensor axis does not divide their number.

  Raises:
    UserError: the size of another axis is not a multiple of its number of shards.
  """
  return jax.tree.map(lambda x: x.sharding, abstract_params(model))


@functools.cache
def matmul_params(config: ModelConfig) -> int:
  """Returns the number of parameters in matrix products, without adapters.

  It counts all matrices and the output head, tied or not, but not the embedding lookup. This is the
  N in the estimate of 6 N FLOP per trained token.
  """
  plain = Qwen2(dataclasses.replace(config, lora=Lora(), attention=""), single_device_mesh())
  declared = flatten_dict(declared_params(plain))
  matrices = [x.value.size for path, x in declared.items() if KINDS[path[-1]] is Kind.MATRIX]
  return sum(matrices) + config.vocab_size * config.width


def _sharding(declaration: Declaration, model: Qwen2) -> NamedSharding:
  names = list(declaration.names)
  for i, (name, size) in enumerate(zip(names, declaration.value.shape, strict=True)):
    if size % axis_size(model.mesh, name):
      if name != "kv_heads":
        raise indivisible_error(name, size, model.mesh)
      names[i] = None
  return NamedSharding(model.mesh, partition_spec(names))


def _is_declaration(x: Any) -> bool:
  return isinstance(x, Declaration)


def _init(model: Qwen2, key: jax.Array) -> Params:
  tokens = jnp.zeros((axis_size(model.mesh, "batch"), 2), jnp.int32)
  return model.init(key, tokens)["params"]
