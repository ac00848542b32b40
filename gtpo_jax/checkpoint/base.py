"""The base model of a run with adapters, which its checkpoints do not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flax.traverse_util import flatten_dict

from gtpo_jax.checkpoint.digests import DIGEST_DIGITS, digest_tree, leaf_types
from gtpo_jax.models.lora import split_adapters
from gtpo_jax.models.params import Params, abstract_params
from gtpo_jax.models.transformer import Transformer


def params_target(model: Transformer) -> Callable[[Mapping[str, str]], Params]:
  """Returns a function from the saved leaves of an item to the abstract parameters to restore.

  These are the adapters, or all parameters if the item holds those of the base model too.
  """
  complete = abstract_params(model)
  adapters, base = split_adapters(complete)

  def choose(saved: Mapping[str, str]) -> Params:
    if adapters and saved.keys().isdisjoint(leaf_types(base)):
      return adapters
    return complete

  return choose


def digest_base(base: Params) -> str:
  """Returns a digest of a base model that is the same on every mesh.

  Embeddings, norms and biases identify the model. Matrices are left out: a run may quantise them,
  and platforms round differently.
  """
  kept = {path: x for path, x in flatten_dict(base).items() if not path[-1].startswith("kernel")}
  return digest_tree(kept)[:DIGEST_DIGITS]
