"""The models that clients train: adapters or all weights, their moments and their gradient."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from gtpo_jax.runtime.compiler_options import update_options
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, shard_batch
from gtpo_jax.runtime.paths import storage_path
from gtpo_jax.serving.requests import bad
from gtpo_jax.tinker.datum_batches import Rows, divide, loss_begins
from gtpo_jax.tinker.losses import Loss, sequence_loss, token_losses
from gtpo_jax.tinker.saved_weights import ABOUT, ARRAYS, About, Saved, Spec, arrays_of, tree_of
from gtpo_jax.tinker.wire import Datum
from gtpo_jax.training.log_probs import Reading, head_settings, loss_and_score, score
from gtpo_jax.training.state import (
  BUILDER_CACHE_SIZE,
  Optimizer,
  abstract_state,
  adamw,
  loss_scale,
  scaled,
  unscale,
)

MAX_SEED = 2**32
FIRST_SNAPSHOT_S = 0.1  # that saving a state is assumed to take


class ServedBase(NamedTuple):
  """The model that all others begin with."""

  name: str  # what clients call it
  worker: RolloutWorker  # its tokenizer and its engine
  params: Params  # its weights, on the training mesh
  source: str  # the folder or hub id that it came from

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
      fill = _fill(self.model(spec) if trained else model, model)
      params = combine(fill(trained or {}), params)
    elif trained is not None:
      params = trained
      if spec.rank:
        params = _merge(self.model(spec))(combine(trained, self.params))
      if not all_finite(params):
        raise bad("these weights are not finite once they are merged with the base's; save others")
    return jax.block_until_ready(self.worker.engine.layout(params))

  def read(self, spec: Spec, saved: Saved) -> Params:
    """Returns the trained weights in a folder."""
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


@functools.lru_cache(maxsize=16)
def _fill(given: Transformer, model: Transformer) -> Any:
  """Returns a program that pads adapters of `given` with zeros to the shapes of `model`.

  Adapters that `given` does not have become zeros.
  """
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


class BatchScores(NamedTuple):
  """The loss of a batch, f32[], and the log-probs and entropies of targets, f32[n, g, t] nats."""

  loss: jax.Array
  log_probs: jax.Array
  entropy: jax.Array


@flax.struct.dataclass
class StepSettings:
  """The settings of a step, f32[] each, as in `OptimizerConfig`; `clip_norm` is 0 for none."""

  learning_rate: Any
  b1: Any
  b2: Any
  eps: Any
  weight_decay: Any
  clip_norm: Any


class TrainingPrograms(NamedTuple):
  """The compiled programs of an architecture."""

  # shapes, dtypes and shardings of the trained parameters, and of the optimizer state
  abstract: tuple[Params, Any]
  init: Any  # trained parameters -> optimizer state
  zeros: Any  # () -> a gradient of 0
  # (trained, frozen, gradient so far, rows, per_token) -> (gradient, `BatchScores`)
  accumulate: Any
  forward: Any  # (trained, frozen, rows, per_token) -> `BatchScores`
  # (trained, optimizer state, gradient, `StepSettings`) -> (trained, optimizer state, norm of the
  # gradient f32[], whether it was finite bool[]); a step that is not finite changes nothing
  apply: Any


@jax.jit
def all_finite(*trees: Any) -> jax.Array:
  """Returns whether all numbers of trees of arrays are finite, bool[]."""
  return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(trees)]))


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_programs(model: Transformer) -> TrainingPrograms:
  """Returns the programs of an architecture; they compile on their first use."""
  settings = head_settings(model, 1.0, 0)
  scale = loss_scale(model.config)

  def reading_of(rows: Rows) -> Reading:
    return Reading(rows.prompts, rows.tokens, targets=rows.targets)

  def scores(
    trained: Params, frozen: Params, rows: Rows, per_token: bool
  ) -> tuple[jax.Array, BatchScores]:
    inputs = (model, combine(trained, frozen), reading_of(rows), settings)
    if per_token:
      loss = scaled(token_losses, scale)
      total, log_probs, entropy, *_ = loss_and_score(*inputs, loss, rows.inputs)
    else:
      log_probs, entropy = score(*inputs)
      total = scale * sequence_loss(log_probs, rows.inputs)
    return total, BatchScores(total / scale, log_probs, entropy)

  def accumulate(
    trained: Params, frozen: Params, total: Params, rows: Rows, per_token: bool
  ) -> tuple[Params, BatchScores]:
    grads, found = jax.grad(scores, has_aux=True)(trained, frozen, rows, per_token)
    grads = unscale(grads, scale)
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads), found

  def forward(trained: Params, frozen: Params, rows: Rows, per_token: bool) -> BatchScores:
    log_probs, entropy = score(model, combine(trained, frozen), reading_of(rows), settings)
    of_tokens = token_losses(log_probs, entropy, rows.inputs)
    loss = of_tokens if per_token else sequence_loss(log_probs, rows.inputs)
    return BatchScores(loss, log_probs, entropy)

  def apply(
    trained: Params, opt_state: Any, grads: Params, step: StepSettings
  ) -> tuple[Params, Any, jax.Array, jax.Array]:
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    clip_norm = jnp.where(step.clip_norm > 0, step.clip_norm, jnp.inf)
    optimizer = adamw(step.learning_rate, step.b1, step.b2, step.eps, step.weight_decay, clip_norm)
    grads = jax.tree.map(lambda x, like: x.astype(like.dtype), grads, trained)
    updates, new_state = optimizer.update(grads, opt_state, trained)
    new = optax.apply_updates(trained, updates)
    keep = lambda new, old: jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    return keep(new, trained), keep(new_state, opt_state), norm, finite

  chain = adamw(0.0, 0.9, 0.95, 1e-12, 0.0, 1.0)
  state = abstract_state(model, Optimizer(chain.init, chain.update))
  abstract = (partition(model, state.params)[0], state.opt_state)
  # Everything has one sharding, so that a state that was read runs the same programs, to the bit.
  of_trained, of_state = jax.tree.map(lambda x: x.sharding, abstract)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), abstract[0])
  options = update_options(model.mesh.devices.flat)
  jit = functools.partial(jax.jit, compiler_options=options)
  return TrainingPrograms(
    abstract,
    jax.jit(chain.init, out_shardings=of_state),
    jax.jit(zeros, out_shardings=of_trained),
    jit(accumulate, static_argnames="per_token", out_shardings=(of_trained, None)),
    jit(forward, static_argnames="per_token"),
    jit(apply, out_shardings=(of_trained, of_state, None, None)),
  )


class TrainedModel:
  """A model in training. It belongs to one thread.

  Attributes:
    spec: what the client has asked for.
    since_snapshot_s: seconds of computing since its state was saved.
    snapshot_s: seconds that this took.
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
    self.since_snapshot_s = 0.0
    self.snapshot_s = FIRST_SNAPSHOT_S
    self._base = base
    self._model = base.model(spec)
    self._programs = make_programs(self._model)
    self._frozen = base.params if spec.rank else {}
    self._pad = base.worker.chat.pad
    self._grads: Params | None = None
    if saved is not None:
      self.load(saved, moments)
      return
    params = add_lora(self._model, base.params, jax.random.key(spec.seed))
    self._trained = partition(self._model, params)[0]
    self._opt_state = self._programs.init(self._trained)

  def load(self, saved: Saved, moments: bool) -> None:
    """Replaces the weights, and with `moments` the optimizer's state too.

    Raises:
      ApiError: they are damaged, or belong to another architecture; nothing has changed.
    """
    spec = saved.about.spec
    if (spec.rank, spec.targets) != (self.spec.rank, self.spec.targets):
      raise bad(f"{saved.path} has other adapters than this model: rank {spec.rank}")
    params = self._base.read(spec, saved)
    opt_state, grads = None, None
    if moments:
      arrays = saved.arrays()
      has = lambda tree: any(name.startswith(f"{tree}/") for name in arrays)
      if not has("optimizer"):
        raise bad(f"{saved.path} has no optimizer state; load it without")
      trained, state = make_programs(stacked(self._model)).abstract
      opt_state = unstack_layers(self._model, tree_of(arrays, "optimizer", state))
      if has("gradient"):
        like = jax.tree.map(lambda x: x.update(dtype=np.float32), trained)
        grads = unstack_layers(self._model, tree_of(arrays, "gradient", like))
    self._trained, self._grads = params, grads
    self._opt_state = opt_state or self._programs.init(params)

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

  def save(self, folder: Path, about: Mapping[str, Any], moments: bool, export: bool) -> None:
    """Writes the weights, and what is noted `about` them, to a new folder.

    With `moments` the optimizer's state and the gradient so far are written too. With `export`
    other programs can read the weights.
    """
    trees: dict[str, Any] = {}
    if self.spec.rank or not export:  # else the weights are in the files of Hugging Face
      trees["params"] = self._trained
    if moments:
      trees["optimizer"] = self._opt_state
      if self._grads is not None:
        trees["gradient"] = self._grads
    trees = {name: stack_layers(self._model, tree) for name, tree in trees.items()}
    note = About(**about, spec=self.spec, created=time.time()).model_dump_json(indent=2)
    files = {ABOUT: note + "\n", ARRAYS: arrays_of(**trees)}
    params = combine(self._trained, self._frozen)
    worker = self._base.worker
    source, chat = worker.model_folder, worker.chat
    if not export:
      with atomic_folder(storage_path(folder)) as out:
        write_files(out, files)
    elif self.spec.rank:
      save_adapter(self._model, params, folder, self._base.source, files, source)
    else:
      whole = (self._model, params, chat.tokenizer, folder)
      save(*whole, stop=chat.stop, source=source, files=files)
