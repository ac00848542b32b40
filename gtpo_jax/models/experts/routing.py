"""The router of a mixture of experts: which experts compute a token, and with which weights.

The sampler records its choices, and the trainer repeats them (*router replay*): both round in their
own ways, so that they would otherwise compute some tokens with other experts, and the log-probs of
these would differ. The weights of the chosen experts are the trainer's own.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.kinds import Mixture


class Routing(NamedTuple):
  """The choices of one layer's router for tokens [...]."""

  ids: jax.Array  # i32[..., k], the experts that compute the token
  weights: jax.Array  # f32[..., k], of their outputs
  statistics: RouterStatistics


@flax.struct.dataclass
class RouterStatistics:
  """Measurements of one router, or of all layers' routers."""

  entropy: jax.Array  # f32[...], nats, of the distribution over experts
  # f32[...], 1 where the router would have chosen other experts than the recorded ones; of several
  # layers, the mean
  differs: jax.Array
  # f32[...], the token's term of the load-balancing loss, see `RecordedRoutes.shares`
  balance: jax.Array
  any_differs: jax.Array  # f32[...], the largest `differs` of any layer

  @classmethod
  def of_layers(cls, layers: list[RouterStatistics]) -> RouterStatistics:
    """Returns the statistics of several layers, whose arrays have them as axis 0."""
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *layers)
    means = jax.tree.map(lambda x: x.mean(0), joined)
    return means.replace(any_differs=joined.any_differs.max(0))


@flax.struct.dataclass
class RecordedRoutes:
  """The recorded choices for the streams of a forward pass."""

  # for each stream, [n, g, s, layers with experts, k] as in `RouteShape`; within a layer, [n, g,
  # s, k]. None for a stream without any
  ids: tuple[jax.Array | None, ...]
  # f32[layers with experts, experts], the share of the batch's choices that each expert got, for
  # the load-balancing loss; within a layer, f32[experts]. None without that loss
  shares: jax.Array | None = None

  def of_layers(self, layers: np.ndarray) -> RecordedRoutes:
    """Returns the routes of some layers with experts, which are then axis 0."""
    take = lambda x: None if x is None else jnp.moveaxis(x[..., layers, :], -2, 0)
    shares = None if self.shares is None else self.shares[layers]
    return RecordedRoutes(tuple(map(take, self.ids)), shares)


def routes_of_inputs(
  prompt: jax.Array, routes: jax.Array, places: jax.Array | None = None
) -> jax.Array:
  """Returns the recorded choices for the inputs of completions, [n, g, t, layers, k].

  Args:
    prompt: [n, p, layers, k], of the prompts, whose last token is the first input.
    routes: [n, g, t, layers, k], of the completions' tokens.
    places: i32[n, g, t], from `Packing.places`.
  """
  first = jnp.broadcast_to(prompt[:, None, -1:], routes[:, :, :1].shape)
  inputs = jnp.concatenate([first, routes[:, :, :-1]], axis=2)
  if places is None:
    return inputs
  return jnp.where((places == 0)[..., None, None], first, inputs)


class RouteShape(NamedTuple):
  """The recorded choices of a token: of `layers` with experts, `per_token` of `experts` each."""

  layers: int
  per_token: int
  experts: int

  @classmethod
  def of(cls, config: ModelConfig) -> RouteShape | None:
    """Returns the shape of a model's routes; None without experts."""
    if (m := config.mixture) is None:
      return None
    return cls(len(config.expert_layers), m.per_token, m.experts)

  @property
  def dtype(self) -> np.dtype:
    """The format of the choices; its largest value stands for none."""
    return np.dtype(np.uint8 if self.experts < 2**8 else np.uint16)

  def like(self, *leading: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the choices of tokens [*leading]."""
    return jax.ShapeDtypeStruct((*leading, self.layers, self.per_token), self.dtype)

  def empty(self, *leading: int) -> np.ndarray:
    """Returns choices of tokens [*leading] of which none was recorded."""
    like = self.like(*leading)
    return np.full(like.shape, no_route(like.dtype), like.dtype)


def no_route(dtype: np.dtype) -> int:
  """Returns the value of a choice that was not recorded."""
  return int(np.iinfo(dtype).max)


def route(
  logits: jax.Array,
  mixture: Mixture,
  recorded: jax.Array | None = None,
  shares: jax.Array | None = None,
  replay: bool = True,
) -> Routing:
  """Chooses the experts of tokens [...].

  The weights are the probabilities of the chosen experts, divided by their sum if the mixture says
  so. The gradient flows through them, and through `balance`.

  Args:
    logits: f32[..., experts].
    mixture: says how many experts compute a token.
    recorded: [..., k], the choices of the sampler; None if nothing was recorded.
    shares: f32[experts], see `RecordedRoutes`.
    replay: whether recorded choices replace the router's own; otherwise they are only compared.
  """
  probs = jax.nn.softmax(logits.astype(jnp.float32), -1)
  _, own = jax.lax.top_k(jax.lax.stop_gradient(probs), mixture.per_token)
  ids = own
  differs = jnp.zeros(probs.shape[:-1], jnp.float32)
  if recorded is not None:
    is_recorded = recorded[..., :1] != no_route(recorded.dtype)
    recorded = jnp.where(is_recorded, recorded.astype(jnp.int32), own)
    in_both = (own[..., :, None] == recorded[..., None, :]).any(-1)
    differs = 1.0 - in_both.all(-1)
    ids = recorded if replay else own
  weights = jnp.take_along_axis(probs, ids, -1)
  if mixture.normalised:
    weights /= weights.sum(-1, keepdims=True)
  fixed = jax.lax.stop_gradient(probs)
  entropy = -(fixed * jnp.log(jnp.where(fixed > 0, fixed, 1.0))).sum(-1)
  # Without imbalance, all shares and all mean probabilities are 1 / experts, and the loss is 1.
  balance = jnp.zeros_like(entropy)
  if shares is not None:
    balance = mixture.experts * (probs * shares).sum(-1)
  return Routing(ids, weights, RouterStatistics(entropy, differs, balance, differs))


def expert_shares(ids: jax.Array, mask: jax.Array, experts: int) -> jax.Array:
  """Returns the share of the choices that each expert got, f32[layers, experts].

  Args:
    ids: [n, g, t, layers, k], recorded choices.
    mask: bool[n, g, t], the tokens that count; choices that were not recorded do not.
    experts: their number.
  """
  counts = mask[..., None, None] & (ids != no_route(ids.dtype))
  layers = jnp.arange(ids.shape[-2])[:, None]
  totals = jnp.zeros((ids.shape[-2], experts), jnp.float32)
  totals = totals.at[layers, ids.astype(jnp.int32)].add(counts.astype(jnp.float32), mode="drop")
  return totals / jnp.maximum(totals.sum(-1, keepdims=True), 1)
