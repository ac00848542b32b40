"""The losses of the protocol: sums over tokens, without any average.

The objectives of `gtpo_jax.algorithms` are used where the protocol has the same. With r = pi / q
the ratio of the model's and the sampler's probability of a token, and A its advantage:

One program computes all of them but gspo, so that another loss compiles nothing:

  cross_entropy         -w log pi
  importance_sampling   -r A
  ppo                   -min(r A, clip(r, low, high) A)
  cispo                 -sg(clip(r, low, high)) A log pi
  dro                   -(A log pi - beta / 2 (log pi - log q)^2)
  gspo                  as ppo, with the geometric mean of the sequence's ratios as r
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms.objectives import ObjectiveInputs, clip_ratio, weighted_log_probs
from gtpo_jax.algorithms.ratios import RATIOS
from gtpo_jax.arrays import masked_sum
from gtpo_jax.runtime.errors import did_you_mean
from gtpo_jax.serving.requests import bad, shown

LOW = "clip_low_threshold"
HIGH = "clip_high_threshold"
BETA = "beta"
RATIO_MASK = "sequence_ratio_mask"
LARGEST = float(np.finfo(np.float32).max)
# The settings of each loss, with their defaults.
SETTINGS: dict[str, dict[str, float]] = {
  "cross_entropy": {},
  "importance_sampling": {},
  "ppo": {LOW: 0.8, HIGH: 1.2},
  "cispo": {LOW: 0.0, HIGH: 4.0},
  "dro": {BETA: 0.05},
  "gspo": {LOW: 0.8, HIGH: 1.2},
}
PER_TOKEN = tuple(SETTINGS)[:-1]  # the losses whose terms depend on one token each
# LossInputs of the data besides the targets.
SUPERVISED = ("weights",)
SAMPLED = ("logprobs", "advantages")
REFUSED = {
  "stable_reinforce": (
    "stable_reinforce is not supported, because its formula is not public; use "
    "loss_fn=importance_sampling"
  ),
  "custom": (
    "losses are not run on this server; pass a function to forward_backward_custom, which runs it "
    "in the client"
  ),
}


@flax.struct.dataclass
class LossInputs:
  """What a loss reads besides log-probs: f32[n, g, t] each, and 0 on padding."""

  present: jax.Array  # 1 on tokens that there are
  weights: jax.Array  # of cross_entropy
  log_probs: jax.Array  # nats, of the sampler
  advantages: jax.Array  # what tokens are paid
  ratio_mask: jax.Array  # not 0 on the tokens whose ratios make the sequence's
  kind: jax.Array  # the index of the loss in `PER_TOKEN`
  low: jax.Array  # the lower bound of the ratio, of ppo, cispo and gspo
  high: jax.Array  # the upper bound
  beta: jax.Array  # of dro


@dataclasses.dataclass(frozen=True)
class Loss:
  """A loss and its settings; see `LossInputs`."""

  name: str
  low: float = 0.0
  high: float = 0.0
  beta: float = 0.0

  @property
  def per_token(self) -> bool:
    """Whether each token's term depends only on that token."""
    return self.name in PER_TOKEN

  @property
  def needs(self) -> tuple[str, ...]:
    """The inputs of the data that it needs, besides the targets."""
    return SUPERVISED if self.name == "cross_entropy" else SAMPLED

  @property
  def reads(self) -> tuple[str, ...]:
    """The inputs of the data that it reads, if they are there."""
    return (*self.needs, RATIO_MASK) if self.name == "gspo" else self.needs


def token_losses(log_probs: jax.Array, entropy: jax.Array, x: LossInputs) -> jax.Array:
  """Returns the sum f32[] of the losses of tokens, each of its kind.

  Args:
    log_probs: f32[...], nats, of the model.
    entropy: not read.
    x: of the same tokens.
  """
  mask = x.present != 0
  ratio = RATIOS["token"].function(log_probs, x.log_probs, mask)
  off = jnp.where(mask, log_probs - x.log_probs, 0.0)
  inputs = ObjectiveInputs(ratio, log_probs, x.log_probs, x.advantages, mask)
  objectives = {
    "cross_entropy": x.weights * log_probs,
    "importance_sampling": ratio * x.advantages,
    "ppo": clip_ratio(ratio, x.advantages, x.low, x.high),
    "cispo": weighted_log_probs(inputs, jnp.clip(inputs.ratio, x.low, x.high)),
    "dro": x.advantages * log_probs - x.beta / 2 * off**2,
  }
  kinds = [x.kind == i for i in range(len(PER_TOKEN))]
  return -masked_sum(jnp.select(kinds, [objectives[name] for name in PER_TOKEN]), mask)


def sequence_loss(log_probs: jax.Array, x: LossInputs) -> jax.Array:
  """Returns the sum f32[] of gspo's losses of tokens with log-probs f32[n, g, t], in nats."""
  ratio = RATIOS["geometric"].function(log_probs, x.log_probs, x.ratio_mask != 0)
  return -masked_sum(clip_ratio(ratio, x.advantages, x.low, x.high), x.present != 0)


def make_loss(name: str, config: Mapping[str, float | str]) -> Loss:
  """Returns the loss with the settings of a request."""
  if name in REFUSED:
    raise bad(REFUSED[name], "loss_fn")
  if name not in SETTINGS:
    hint = did_you_mean(name, SETTINGS)
    raise bad(f"unknown loss_fn {shown(name)}{hint}; there are {', '.join(SETTINGS)}", "loss_fn")
  settings = dict(SETTINGS[name])
  for key, value in config.items():
    if key not in settings:
      known = ", ".join(settings) or "none"
      raise bad(f"{name} has no setting {shown(key)}{did_you_mean(key, settings)}; it has {known}")
    if isinstance(value, str) or not 0 <= value <= LARGEST:
      raise bad(f"{key} must be a number from 0 to {LARGEST:g}, got {shown(value)}", key)
    settings[key] = float(value)
  low, high = settings.get(LOW, 0.0), settings.get(HIGH, 0.0)
  if low > high:
    raise bad(f"{LOW} must be at most {HIGH}, got {low:g} and {high:g}")
  return Loss(name, low, high, settings.get(BETA, 0.0))
