"""What the learner carries from step to step, and the optimizer that moves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from gtpo_jax.models.lora import partition
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import named_sharding

SCHEDULES = ("constant", "cosine", "linear")
MOMENTUM_DTYPES = ("", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with a schedule and global-norm clipping.

  Attributes:
    learning_rate: the peak.
    schedule: after the warm-up: "constant", or "cosine" / "linear" down to 0 at the last step.
    warmup_steps: steps over which the rate rises linearly from 0.
    b1, b2, eps, weight_decay: of AdamW; decay is for matrices only, not for norms and biases.
    clip_norm: the largest global gradient norm.
    momentum_dtype: format that the first moment is kept in, "float32" or "bfloat16"; "" for that of the parameters. The second has
      theirs: at b2 = 0.999 it moves by a thousandth an update, which bfloat16 (steps of 1/256) would round away.
    offload: both moments rest in the host's memory and visit the device for each gradient update.
  """

  learning_rate: float = 1e-6
  schedule: str = "constant"
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  momentum_dtype: str = ""
  offload: bool = False

  def __post_init__(self):
    for name, low, high in (("b1", 0, 1), ("b2", 0, 1)):
      if not low <= getattr(self, name) < high:
        raise UserError(f"optimizer.{name} must be in [{low}, {high}), got {getattr(self, name)}")
    for name in ("learning_rate", "eps", "clip_norm"):
      if not 0 < getattr(self, name) < float("inf"):
        raise UserError(f"optimizer.{name} must be above 0 and finite, got {getattr(self, name)}")
    for name in ("warmup_steps", "weight_decay"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise UserError(
          f"optimizer.{name} must be at least 0 and finite, got {getattr(self, name)}"
        )
    if self.schedule not in SCHEDULES:
      raise UserError(
        f"optimizer.schedule must be one of {', '.join(SCHEDULES)}; got {self.schedule!r}"
      )
    if self.momentum_dtype not in MOMENTUM_DTYPES:
      raise UserError(
        f"optimizer.momentum_dtype must be float32, bfloat16, or empty for the parameters' own; got {self.momentum_dtype!r}"
      )


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax transformation, and where its moments rest between gradient updates."""

  init: Callable[[Params], Any]
  update: Callable[
    ..., tuple[Params, Any]
  ]  # (gradients, state, what is trained) -> (changes, next state), on the device
  offload: bool = False

  def fetched(self, state: Any) -> Any:
    """Its state on the device. To be jitted."""
    return self._placed(state, jax.memory.Space.Device)

  def rested(self, state: Any) -> Any:
    """Its state with the moments where they rest. To be jitted."""
    return self._placed(state, jax.memory.Space.Host)

  def _placed(self, state: Any, space: jax.memory.Space) -> Any:
    return (
      optax.tree_utils.tree_map_params(self, lambda x: jax.device_put(x, space), state)
      if self.offload
      else state
    )


@flax.struct.dataclass
class TrainState:
  """Everything that the next update depends on."""

  step: jax.Array  # i32[], rollouts learned from
  params: Params
  opt_state: Any


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """The rate at each step of a run of `steps`."""
  after = max(steps - config.warmup_steps, 1)
  main = {
    "constant": lambda: optax.constant_schedule(config.learning_rate),
    "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, after),
    "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, after),
  }[config.schedule]()
  if not config.warmup_steps:
    return main
  return optax.join_schedules(
    [optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps), main],
    [config.warmup_steps],
  )


def make_optimizer(config: OptimizerConfig, steps: int, updates: int = 1) -> Optimizer:
  """Global-norm clip, then AdamW on the schedule, whose steps are of `updates` gradient updates each."""
  rate = learning_rate(config, steps)
  chain = optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      lambda count: rate(count // updates),
      config.b1,
      config.b2,
      config.eps,
      mu_dtype=config.momentum_dtype or None,
      weight_decay=config.weight_decay,
      mask=_decayed,
    ),
  )
  return Optimizer(chain.init, chain.update, config.offload)


def _decayed(params: Params) -> Any:
  """True for matrices; norms and biases are not decayed."""
  return jax.tree.map_with_path(
    lambda path, _: path[-1].key in ("kernel", "embedding", "head", "lora_a", "lora_b"), params
  )


def init_state(params: Params, optimizer: Optimizer, model: Qwen2) -> TrainState:
  """A state at step 0 around `params`, which it consumes: the optimizer's moments are laid out as the parameters are.

  With adapters they alone have moments; with `offload` the moments lie in the memory of each device's host.
  """
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  begin = lambda params: TrainState(
    jnp.int32(0), params, optimizer.init(partition(model, params)[0])
  )
  return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)


def abstract_state(model: Qwen2, optimizer: Optimizer) -> TrainState:
  """Shapes, dtypes and shardings of a state, with nothing allocated: for checkpoints and ahead-of-time compiles."""
  params = abstract_params(model)
  whole = named_sharding(model.mesh)
  placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  resting = lambda sharding: (
    sharding.with_memory_kind("pinned_host") if optimizer.offload else sharding
  )
  trained, _ = partition(model, params)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda moment, param: placed(moment, resting(param.sharding)),
    jax.eval_shape(optimizer.init, trained),
    trained,
    transform_non_params=lambda x: placed(x, whole),
  )
  return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, opt_state)
