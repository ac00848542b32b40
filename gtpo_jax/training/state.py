"""The training state and its optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.declaration import KINDS, Declaration, Kind, is_decayed
from gtpo_jax.models.lora import partition
from gtpo_jax.models.params import Params, abstract_params, declared_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_0, BELOW_1, Checked, at_least, one_of, setting
from gtpo_jax.runtime.mesh import named_sharding

OPTIMIZERS = ("adamw", "muon")
# Of Muon (2502.16982): its momentum, and the root mean square of an update's entries at a learning
# rate of 1, which makes learning rates of AdamW fit.
MUON_MOMENTUM = 0.95
MUON_RMS = 0.2
SCHEDULES = ("constant", "cosine", "linear")
# maxsize of the lru_cache on make_optimizer, make_update, make_imitation and make_scorer. Runs with
# equal settings in one process share these functions, and thereby the compiled programs: a notebook
# that trains twice compiles once.
BUILDER_CACHE_SIZE = 8

MOMENTUM_DTYPES = ("", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
  """AdamW or Muon with a learning-rate schedule and global-norm clipping.

  Attributes:
    name: "adamw"; or "muon", which orthogonalises the updates of the layers' matrices and leaves
      embeddings, head, norms and biases to AdamW.
    learning_rate: the peak learning rate.
    schedule: the learning rate after the warm-up: "constant", or "cosine" or "linear" decay to 0 at
      the last step.
    warmup_steps: number of steps over which the learning rate rises linearly from 0.
    b1, b2, eps, weight_decay: the parameters of AdamW; weight decay applies to matrices, not to
      norms or biases.
    clip_norm: the maximum global gradient norm.
    momentum_dtype: dtype of the first moment, which is Muon's only one: "float32" or "bfloat16"; ""
      for the dtype of the parameters. The second moment always has the dtype of the parameters:
      with b2 = 0.999 it changes by about a thousandth per update, which bfloat16 (relative spacing
      1/256) would round away.
    offload: whether both moments are kept in host memory and copied to the device for each gradient
      update.
  """

  prefix: ClassVar[str] = "optimizer."

  name: str = setting("adamw", bound=one_of(OPTIMIZERS))
  learning_rate: float = setting(1e-6, bound=ABOVE_0)
  schedule: str = setting("constant", bound=one_of(SCHEDULES))
  warmup_steps: int = setting(0, bound=at_least(0))
  b1: float = setting(0.9, bound=BELOW_1)
  b2: float = setting(0.999, bound=BELOW_1)
  eps: float = setting(1e-8, bound=ABOVE_0)
  weight_decay: float = setting(0.01, bound=AT_LEAST_0)
  clip_norm: float = setting(1.0, bound=ABOVE_0)
  momentum_dtype: str = setting("", bound=one_of(MOMENTUM_DTYPES))
  offload: bool = False


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax transformation, and whether its moments are offloaded between gradient updates.

  Attributes:
    init: trained parameters -> optimizer state.
    update: (gradients, optimizer state, trained parameters) -> (updates, next optimizer state); all
      of these are in device memory.
    offload: whether the moments are kept in host memory between gradient updates.
    entropy_coef: if the weight of the entropy bonus is adapted during training, its initial value;
      otherwise None. The adapted weight is part of the training state.
  """

  init: Callable[[Params], Any]
  update: Callable[..., tuple[Params, Any]]
  offload: bool = False
  entropy_coef: float | None = None

  def load_moments(self, opt_state: Any) -> Any:
    """Returns the state with offloaded moments copied to the device. Call it under jit."""
    return self._move_moments(opt_state, jax.memory.Space.Device)

  def offload_moments(self, opt_state: Any) -> Any:
    """Returns the state with the moments moved to host memory if `offload`. Call it under jit."""
    return self._move_moments(opt_state, jax.memory.Space.Host)

  def _move_moments(self, opt_state: Any, space: jax.memory.Space) -> Any:
    if not self.offload:
      return opt_state
    move = lambda x: jax.device_put(x, space)
    return map_moments(self, move, opt_state)

  def moments_after(self, opt_state: Any, params: Params) -> Any:
    """Returns the same moments, as values that are computed after the new parameters.

    Both the new parameters and the new moments read the old moments. XLA for CPUs copies these,
    because it does not order the two; if the new moments come last, it writes all in place.
    """

    def after(moment: jax.Array, param: jax.Array) -> jax.Array:
      zero = 0 * param.reshape(-1)[0]  # the compiler keeps it, because it might be NaN
      return moment + zero.astype(moment.dtype)

    return map_moments(self, after, opt_state, params)


def map_moments(
  optimizer: Optimizer, f: Callable[..., Any], opt_state: Any, *rest: Params, **options: Any
) -> Any:
  """Calls `f` on every moment, with the leaves of `rest` at its parameter.

  A parameter has no moment in the state of an optimizer that does not update it.
  """
  masked = lambda x: isinstance(x, optax.MaskedNode)
  call = lambda moment, *others: moment if masked(moment) else f(moment, *others)
  return optax.tree_utils.tree_map_params(
    optimizer, call, opt_state, *rest, is_leaf=masked, **options
  )


@flax.struct.dataclass
class TrainState:
  """The training state."""

  step: jax.Array  # i32[], completed steps
  params: Params
  opt_state: Any
  entropy_coef: jax.Array | None = None  # f32[], the weight of the entropy bonus, if adapted


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Returns the schedule: a function from the step to the learning rate, for a run of `steps`."""
  decay_steps = max(steps - config.warmup_steps, 1)
  after_warmup = {
    "constant": lambda: optax.constant_schedule(config.learning_rate),
    "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, decay_steps),
    "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, decay_steps),
  }[config.schedule]()
  if not config.warmup_steps:
    return after_warmup
  warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
  return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_optimizer(
  config: OptimizerConfig,
  steps: int,
  updates: int = 1,
  entropy_coef: float | None = None,
  model: Transformer | None = None,
) -> Optimizer:
  """Returns the optimizer: global-norm clipping followed by AdamW or Muon.

  Each step has `updates` gradient updates; the learning rate changes per step, not per update.
  `entropy_coef` is as in `Optimizer`. Muon needs the model, whose declarations say which axes of a
  parameter are a matrix.
  """
  schedule = make_schedule(config, steps)
  rate = lambda count: schedule(count // updates)
  chain = _adamw(rate, config.b1, config.b2, config.eps, config.weight_decay, config.momentum_dtype)
  if config.name == "muon":
    chain = _muon(config, rate, model, chain)
  chain = optax.chain(_clip(config.clip_norm), chain)
  return Optimizer(chain.init, chain.update, config.offload, entropy_coef)


def adamw(
  learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any, clip_norm: Any
) -> optax.GradientTransformation:
  """Returns global-norm clipping followed by AdamW.

  The arguments are as in `OptimizerConfig`: numbers, or arrays f32[] of a program that takes them;
  the learning rate may be a schedule.
  """
  return optax.chain(_clip(clip_norm), _adamw(learning_rate, b1, b2, eps, weight_decay))


def _clip(clip_norm: Any) -> optax.GradientTransformation:
  return optax.stateless(lambda grads, _: clip_by_global_norm(grads, clip_norm))


def _adamw(
  learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any, momentum_dtype: str = ""
) -> optax.GradientTransformation:
  decayed = _map_names(is_decayed)
  dtype = momentum_dtype or None
  return optax.adamw(
    learning_rate, b1, b2, eps, mu_dtype=dtype, weight_decay=weight_decay, mask=decayed
  )


def _muon(
  config: OptimizerConfig,
  learning_rate: optax.Schedule,
  model: Transformer,
  rest: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns Muon for the layers' matrices, and `rest` for all other parameters.

  Each matrix of a layer, or of an expert, is orthogonalised alone.
  """
  declared = flatten_dict(declared_params(model))
  matrices = optax.contrib.muon(
    learning_rate,
    beta=MUON_MOMENTUM,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mu_dtype=config.momentum_dtype or None,
    muon_weight_dimension_numbers=_map_names(lambda names: _matrix_axes(declared[names])),
    consistent_rms=MUON_RMS,
  )
  is_matrix = _map_names(lambda names: KINDS[names[-1]] is Kind.MATRIX)
  return optax.partition({True: matrices, False: rest}, is_matrix)


def _matrix_axes(matrix: Declaration) -> optax.contrib.MuonDimensionNumbers:
  """Returns the axes of inputs and of outputs; those of layers and experts number matrices."""
  first = matrix.numbered + (matrix.names[0] == "layer")
  axes = tuple(range(matrix.value.ndim))
  last = first + matrix.inputs
  return optax.contrib.MuonDimensionNumbers(axes[first:last], axes[last:])


def _map_names(f: Callable[[tuple[str, ...]], Any]) -> Callable[[Params], Any]:
  """Returns a function from a tree of parameters to the tree of `f(path)`."""
  return lambda params: jax.tree.map_with_path(
    lambda path, _: f(tuple(key.key for key in path)), params
  )


def clip_by_global_norm(grads: Params, max_norm: float) -> Params:
  """Returns the gradients, scaled to a global norm of at most `max_norm`.

  It equals `optax.clip_by_global_norm` up to rounding. That selects between each array and its
  quotient by the norm, which XLA keeps in memory beside it; a factor is part of the next loop.
  """
  norm = optax.global_norm(grads)
  factor = jnp.where(norm > max_norm, max_norm / norm, 1)
  return jax.tree.map(lambda x: x * factor.astype(x.dtype), grads)


def init_state(params: Params, optimizer: Optimizer, model: Transformer) -> TrainState:
  """Returns the state at step 0. The argument `params` is donated.

  Moments are sharded like the parameters; with `offload` they are in host memory. If the model has
  adapters, only the adapters have moments.
  """
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))

  def create(params: Params) -> TrainState:
    trained, _ = partition(model, params)
    coef = None if optimizer.entropy_coef is None else jnp.float32(optimizer.entropy_coef)
    return TrainState(jnp.int32(0), params, optimizer.init(trained), coef)

  return jax.jit(create, donate_argnums=0, out_shardings=shardings)(params)


def abstract_state(model: Transformer, optimizer: Optimizer) -> TrainState:
  """Returns the shapes, dtypes and shardings of a state, without allocating it.

  They are used to restore checkpoints and to compile ahead of time.
  """
  params = abstract_params(model)
  replicated = named_sharding(model.mesh)
  abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  def abstract_moment(moment: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> Any:
    sharding = param.sharding
    if optimizer.offload:
      sharding = sharding.with_memory_kind("pinned_host")
    return abstract(moment, sharding)

  trained, _ = partition(model, params)
  opt_state = map_moments(
    optimizer,
    abstract_moment,
    jax.eval_shape(optimizer.init, trained),
    trained,
    transform_non_params=lambda x: abstract(x, replicated),
  )
  scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=replicated)
  coef = None if optimizer.entropy_coef is None else scalar(jnp.float32)
  return TrainState(scalar(jnp.int32), params, opt_state, coef)


FLOAT16_SCALE = 2.0**13


def loss_scale(config: ModelConfig) -> float:
  """Returns the factor of the loss: 1 unless activations are float16 (1710.03740).

  The smallest normal number of float16 is 6e-5. The loss is a mean over tokens, so the gradients of
  activations are far smaller. The loss is multiplied by the factor, and the gradients of the
  parameters are divided by it. If a gradient overflows, the update is skipped, as any update that
  is not finite.
  """
  return FLOAT16_SCALE if config.compute_dtype == "float16" else 1.0


def scaled(loss: Callable[..., jax.Array], scale: float) -> Callable[..., jax.Array]:
  """Returns a function that multiplies the result of `loss` by `scale`."""
  if scale == 1:
    return loss
  return lambda *arguments: scale * loss(*arguments)


def unscale(gradient: Any, scale: float) -> Any:
  """Returns the gradient of the loss from the scaled loss's."""
  if scale == 1:
    return gradient
  return jax.tree.map(lambda x: (x / scale).astype(x.dtype), gradient)
