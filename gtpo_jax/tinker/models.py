"""The models that clients train: adapters or all weights, their moments and their gradient."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from gtpo_jax.models.config import Lora
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.hf.folder import atomic_folder
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.hf.save import save, save_adapter, write_files
from gtpo_jax.models.lora import add_lora, combine, merge_lora, partition
from gtpo_jax.models.params import Params, abstract_params, stack_layers, stacked, unstack_layers
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, shard_batch
from gtpo_jax.runtime.paths import storage_path
from gtpo_jax.serving.api_errors import bad
from gtpo_jax.tinker.datum_batches import divide, loss_begins
from gtpo_jax.tinker.losses import Loss
from gtpo_jax.tinker.saved_weights import ABOUT, ARRAYS, About, Saved, Spec, arrays_of, tree_of
from gtpo_jax.tinker.training_programs import StepSettings, all_finite, make_programs
from gtpo_jax.tinker.wire import Datum

MAX_SEED = 2**32


class ServedBase(NamedTuple):
  """The model that all others begin with.

  Attributes:
    name: what clients call it.
    worker: its tokenizer and its engine.
    params: its weights, on the training mesh.
    source: the folder or hub id that it came from.
  """

  name: str
  worker: RolloutWorker
  params: Params
  source: str

  @property
  def vocab(self) -> int:
    """Token ids are below this."""
    return self.worker.model.config.vocab_size

  @property
  def longest(self) -> int:
    """The most tokens of a sequence."""
    return self.worker.model.config.max_length

  def is_called(self, name: Any) -> bool:
    """Whether a client means this model: by its name, its folder, or the folder's name."""
    if name in (self.name, self.source, os.path.basename(self.source)):
      return True
    try:
      return os.path.samefile(name, self.worker.model_folder)
    except (OSError, ValueError, TypeError):
      return False

  def tokenizer_of(self, name: str) -> str:
    """Returns where a client that calls the model by a name finds its tokenizer."""
    return name if "/" in name else os.path.abspath(self.worker.model_folder)

  def model(self, spec: Spec) -> Transformer:
    """Returns the architecture with a client's adapters."""
    lora = Lora(spec.rank, targets=spec.targets) if spec.rank else Lora()
    plain = self.worker.model
    return Transformer(dataclasses.replace(plain.config, lora=lora), plain.mesh)

  def layout(self, spec: Spec, trained: Params | None = None) -> DecodeParams:
    """Returns a policy for the engine: with trained weights, or the base itself.

    Raises:
      ApiError: the trained weights are too large to be added to the base's, or have a rank that
        this server does not sample with.
    """
    model = self.worker.model
    params = self.params
    if most := model.config.lora.rank:
      if trained and not 0 < spec.rank <= most:
        raise bad(
          f"this server samples with adapters of ranks 1 to {most} beside one base, and these "
          f"weights have rank {spec.rank}; start it with --merge_adapters=always"
        )
      adapters = _fill(self.model(spec), model)(trained) if trained else _empty(model)()
      params = combine(adapters, params)
    elif trained is not None:
      params = trained
      if spec.rank:
        params = _merge(self.model(spec))(combine(trained, self.params))
      if not all_finite(params):
        raise bad("these weights are not finite once they are merged with the base's; save others")
    return jax.block_until_ready(self.worker.engine.layout(params))

  def read(self, spec: Spec, saved: Saved) -> Params:
    """Returns the trained weights in a folder.

    Raises:
      ApiError: they are damaged, not finite, or of another base model.
    """
    model = self.model(spec)
    arrays = saved.arrays()
    try:
      if any(name.startswith("params/") for name in arrays):
        found = unstack_layers(model, tree_of(arrays, "params", _trained(stacked(model))))
      else:
        found = read_params(model, saved.folder)
    except (KeyError, ValueError, UserError):
      raise bad(f"{saved.path} does not fit this server's base model; load others") from None
    if not all_finite(found):
      raise bad(f"{saved.path} has weights that are not finite; load others")
    return found


def _trained(model: Transformer) -> Params:
  return partition(model, abstract_params(model))[0]


@functools.lru_cache(maxsize=1)
def _empty(model: Transformer) -> Any:
  """Returns a program that makes adapters of `model` that are 0."""
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _trained(model))
  return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, _trained(model)))


@functools.lru_cache(maxsize=16)
def _fill(given: Transformer, model: Transformer) -> Any:
  """Returns a program that fills adapters of `given` with zeros, to the rank of `model`."""
  scale = given.config.lora.scale / model.config.lora.scale
  wanted = flatten_dict(_trained(model))

  def fill(adapters: Params) -> Params:
    flat = flatten_dict(adapters)
    filled = {}
    for path, like in wanted.items():
      x = flat.get(path, jnp.zeros((0,) * len(like.shape), like.dtype))
      x = jnp.pad(x, [(0, new - old) for new, old in zip(like.shape, x.shape, strict=True)])
      filled[path] = x * scale if path[-1] == "lora_b" else x
    return unflatten_dict(filled)

  return jax.jit(fill, out_shardings=jax.tree.map(lambda x: x.sharding, _trained(model)))


@functools.lru_cache(maxsize=16)
def _merge(model: Transformer) -> Any:
  return jax.jit(functools.partial(merge_lora, model))


class TrainedModel:
  """A model in training. It belongs to one thread.

  Attributes:
    spec: what the client has asked for.
  """

  def __init__(
    self, base: ServedBase, spec: Spec, saved: Saved | None = None, moments: bool = True
  ):
    """Args:
    base: what it begins with.
    spec: what it is.
    saved: weights to begin with instead; None for fresh ones.
    moments: whether to read the optimizer's state too, and a gradient so far.
    """
    self.spec = spec
    self._base = base
    self._model = base.model(spec)
    self._programs = make_programs(self._model)
    self._frozen = base.params if spec.rank else {}
    self._pad = base.worker.chat.pad
    self._grads: Params | None = None
    if saved is None:
      params = add_lora(self._model, base.params, jax.random.key(spec.seed))
      self._trained = partition(self._model, params)[0]
      self._opt_state = self._programs.init(self._trained)
      return
    self._read(saved, moments)

  def _read(self, saved: Saved, moments: bool) -> None:
    """Reads all that is wanted, before anything changes."""
    params = self._base.read(self.spec, saved)
    opt_state, grads = self._read_moments(saved) if moments else (None, None)
    self._trained = params
    self._opt_state = opt_state or self._programs.init(params)
    self._grads = grads

  def _read_moments(self, saved: Saved) -> tuple[Any, Params | None]:
    arrays = saved.arrays()
    if not any(name.startswith("optimizer/") for name in arrays):
      raise bad(f"{saved.path} has no optimizer state; load it without")
    trained, state = make_programs(stacked(self._model)).abstract
    opt_state = unstack_layers(self._model, tree_of(arrays, "optimizer", state))
    if not any(name.startswith("gradient/") for name in arrays):
      return opt_state, None
    in_float32 = jax.tree.map(lambda x: x.update(dtype=np.float32), trained)
    return opt_state, unstack_layers(self._model, tree_of(arrays, "gradient", in_float32))

  def run(
    self, data: Sequence[Datum], loss: Loss, forward_only: bool
  ) -> tuple[dict[str, list[np.ndarray]], float]:
    """Computes a loss, and unless `forward_only` adds its gradient to that so far.

    Without a gradient, log-probs of all positions are computed, because a client may use any.

    Returns:
      The log-probs and entropies of each datum, f32[s] each, 0 before its loss begins; the loss.
    """
    whole = forward_only or loss.name == "dro"  # its penalty has no weights
    begins = [0 if whole else loss_begins(datum) for datum in data]
    names = ("logprobs", "entropy")
    outputs = {name: [np.zeros(len(x.tokens), np.float32) for x in data] for name in names}
    mesh = self._model.mesh
    platform = mesh.devices.flat[0].platform
    total = 0.0
    grads = self._grads
    for rows, places in divide(data, begins, loss, batch_shards(mesh), self._pad, platform):
      rows = shard_batch(rows, mesh)
      if forward_only:
        scores = self._programs.forward(self._trained, self._frozen, rows, per_token=loss.per_token)
      else:
        grads = self._programs.zeros() if grads is None else grads
        grads, scores = self._programs.accumulate(
          self._trained, self._frozen, grads, rows, per_token=loss.per_token
        )
      value, log_probs, entropy = jax.device_get(scores)
      total += float(value)
      for index, i, j in places:
        begin = begins[index]
        length = len(data[index].tokens) - begin
        outputs["logprobs"][index][begin:] = log_probs[i, j, :length]
        outputs["entropy"][index][begin:] = entropy[i, j, :length]
    self._grads = grads  # only once all batches have been computed
    return outputs, total

  def step(self, settings: StepSettings) -> dict[str, float]:
    """Applies the gradient so far, unless it is not finite; returns metrics.

    Raises:
      ApiError: the weights would not be finite; all stays as it was, and so does the gradient.
    """
    grads = self._programs.zeros() if self._grads is None else self._grads
    trained, opt_state, norm, finite = jax.block_until_ready(
      self._programs.apply(self._trained, self._opt_state, grads, settings)
    )
    if not all_finite(trained, opt_state):
      rate = float(settings.learning_rate)
      raise bad(
        "this step would make weights that are not finite, and has changed nothing; step again "
        f"with less than the learning rate of {rate:g}",
        "adam_params",
      )
    self._trained, self._opt_state, self._grads = trained, opt_state, None
    return {"grad_norm:mean": float(norm), "skipped:sum": float(not finite)}

  def load(self, spec: Spec, saved: Saved, moments: bool) -> None:
    """Replaces the weights, and with `moments` the optimizer's state too.

    Raises:
      ApiError: they belong to another architecture.
    """
    if (spec.rank, spec.targets) != (self.spec.rank, self.spec.targets):
      raise bad(f"{saved.path} has other adapters than this model: rank {spec.rank}")
    self._read(saved, moments)

  def save(self, folder: Path, about: Mapping[str, Any], moments: bool, export: bool) -> None:
    """Writes the weights to a new folder.

    Args:
      folder: the folder.
      about: what is noted beside them.
      moments: whether to write the optimizer's state and the gradient so far too.
      export: whether other programs are to read the weights.
    """
    whole = not self.spec.rank and export  # the weights are in the files of Hugging Face
    trees: dict[str, Any] = {} if whole else {"params": self._trained}
    if moments:
      trees["optimizer"] = self._opt_state
      if self._grads is not None:
        trees["gradient"] = self._grads
    trees = {name: stack_layers(self._model, tree) for name, tree in trees.items()}
    note = About(**about, spec=self.spec, created=time.time()).model_dump_json(indent=2)
    files = {ABOUT: note + "\n", ARRAYS: arrays_of(**trees)}
    params = combine(self._trained, self._frozen)
    worker = self._base.worker
    if not export:
      with atomic_folder(storage_path(folder)) as out:
        write_files(out, files)
    elif self.spec.rank:
      save_adapter(self._model, params, folder, self._base.source, files, worker.model_folder)
    else:
      save(
        self._model,
        params,
        worker.chat.tokenizer,
        folder,
        stop=worker.chat.stop,
        source=worker.model_folder,
        files=files,
      )
