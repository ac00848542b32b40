"""The base model of a run with adapters, which its checkpoints do not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from flax.traverse_util import flatten_dict

from gtpo_jax.checkpoint.digests import DIGEST_DIGITS, digest_tree, leaf_types
from gtpo_jax.models.lora import combine, split_adapters
from gtpo_jax.models.params import Params, abstract_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError

# The key in a checkpoint's metadata of a digest of the base that its adapters were trained on.
BASE_DIGEST = "base"


def params_target(model: Transformer) -> Callable[[Mapping[str, str]], Params]:
  """Returns a function from the saved leaves of an item to the abstract parameters to restore.

  These are the adapters, or all parameters if the item holds the base model's too.
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


class SharedBase:
  """Leaves the base model out of the checkpoints in a folder, and adds it when they are read.

  Its digest is computed once, because it never changes.

  Args:
    folder: the folder of checkpoints, for messages.
  """

  def __init__(self, folder: epath.Path):
    self._folder = folder
    self._digest = ""

  def leave_out(
    self, params: Params, metadata: Mapping[str, Any]
  ) -> tuple[Params, Mapping[str, Any]]:
    """Returns what a checkpoint holds of the parameters, and its metadata."""
    adapters, base = split_adapters(params)
    if not adapters:
      return params, metadata
    self._digest = self._digest or digest_base(base)
    return adapters, {**metadata, BASE_DIGEST: self._digest}

  def add(
    self,
    model: Transformer,
    params: Params,
    metadata: Mapping[str, Any],
    read_base: Callable[[], Params] | None,
  ) -> Params:
    """Adds the base model to adapters that were saved without it.

    Raises:
      UserError: it is not the base model that the adapters were trained on.
    """
    if not model.config.lora.rank or split_adapters(params)[1]:
      return params
    if read_base is None:
      raise ValueError("these checkpoints hold only adapters; pass base= to restore")
    base = read_base()
    self._digest = digest_base(base)
    if self._digest != metadata[BASE_DIGEST]:
      raise UserError(
        f"the adapters in {str(self._folder)!r} were trained on another base model: its "
        f"digest was {metadata[BASE_DIGEST]}, now it is {self._digest}; restore the folder "
        "that model.path names, and model.param_dtype"
      )
    return combine(params, base)
