"""A small model with adapters, for the tests of LoRA."""

import dataclasses
import functools

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import hf_folder

from gtpo_jax.models import Transformer, abstract_params, load
from gtpo_jax.models.config import LORA_TARGETS, Lora
from gtpo_jax.models.lora import add_lora

RANK = 3
ALPHA = 7.5
SOME = ("q", "down")


def with_lora(model, mesh=None, targets=LORA_TARGETS, **changes):
  """The same architecture with adapters."""
  config = dataclasses.replace(model.config, lora=Lora(RANK, ALPHA, targets), **changes)
  return Transformer(config, mesh or model.mesh)


@functools.cache
def base():
  """The model without adapters and its parameters, loaded from a folder that transformers saved."""
  return load(hf_folder()[0], "float32")


@functools.cache
def adapted(targets=LORA_TARGETS):
  """The model and its parameters, with adapters in which both A and B are random."""
  model = with_lora(base()[0], targets=targets)
  flat = flatten_dict(add_lora(model, base()[1], jax.random.key(1)))
  keys = dict(zip(flat, jax.random.split(jax.random.key(2), len(flat)), strict=True))
  random = {
    path: 0.2 * jax.random.normal(keys[path], x.shape)
    for path, x in flat.items()
    if path[-1] == "lora_b"
  }
  return model, unflatten_dict(flat | random)


def is_adapter(path):
  return path[-1] in ("lora_a", "lora_b")


def on_mesh_of(params, model):
  """The parameters, moved to the shardings of the model."""
  return jax.tree.map(
    lambda x, like: jax.device_put(jax.device_get(x), like.sharding), params, abstract_params(model)
  )
