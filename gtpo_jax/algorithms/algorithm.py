"""A recipe with its settings, as pure functions of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.advantages import NORM_SCOPE
from gtpo_jax.algorithms.losses import AVERAGES, clipped_objective
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS, k3, mismatch_weight, token_ratio
from gtpo_jax.algorithms.recipes import RECIPES, Recipe
from gtpo_jax.algorithms.relative_entropy import COMPARE, effective_participants
from gtpo_jax.algorithms.selection import highest, informative, zero_reward
from gtpo_jax.algorithms.settings import Settings
from gtpo_jax.algorithms.shaping import (
  EntropyBonus,
  Shaped,
  Signals,
  completion_entropy,
  entropy_credit,
  entropy_shares,
  plain_reward,
)
from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """What a batch teaches: advantages, token weights and the loss. Frozen and hashable, so that it may be a static argument."""

  name: str
  settings: Settings

  @property
  def recipe(self) -> Recipe:
    """The row of the table."""
    return RECIPES[self.name]

  @property
  def credit(self) -> EntropyBonus | None:
    """How entropy becomes reward; None where it does not."""
    recipe = self.recipe
    s = self.settings
    if recipe.right is None:
      return None
    amount = lambda x: getattr(s, x) if isinstance(x, str) else x
    right = tuple(map(amount, recipe.right))
    wrong = tuple(map(amount, recipe.wrong))
    end = right[0] + right[0] / s.kappa if s.kappa else float("inf")
    return EntropyBonus(
      right, wrong, COMPARE[s.compare or "position", s.scope], s.h_floor, (s.floor or 0.0, end)
    )

  @property
  def ratio(self) -> Callable[..., jax.Array]:
    """The importance ratio, a function of (logp, logp_old, mask)."""
    return SEQUENCE_RATIOS[self.settings.ratio] if self.settings.ratio else token_ratio

  @property
  def per_token(self) -> bool:
    """Whether the loss is a sum over tokens of a function of each one's own log-prob; then it is the sum of any parts' `token_loss`."""
    return self.ratio is token_ratio

  def advantages(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    reward: jax.Array,
    penalty: jax.Array | None = None,
    guided: jax.Array | None = None,
  ) -> jax.Array:
    """Advantages of every token, under `stop_gradient`, in float32.

    Args:
      entropy: f32[n, g, t], nats, of the old policy's full distribution.
      mask: bool[n, g, t], sampled tokens.
      correct: bool[n, g], splits O+ and O-.
      reward: f32[n, g], what the baselines normalise.
      penalty: f32[n, g] <= 0, length shaping, added to the (shaped) reward.
      guided: bool[n, g], completions that a guide wrote; None for none.

    Returns:
      f32[n, g, t]; 0 outside `loss_mask`.
    """
    signals = jax.lax.stop_gradient(
      {
        "entropy": entropy,
        "mask": mask,
        "correct": correct,
        "reward": reward,
        "penalty": penalty,
        "guided": guided,
      }
    )
    shaped, x = self.shaped(**signals)
    axes = NORM_SCOPE[self.settings.norm_scope or "group"]
    advantages = self.recipe.advantage(
      shaped, x.correct, x.mask, axes, self.settings.sign_guard or False
    )
    return jax.lax.stop_gradient(jnp.where(self.loss_mask(**signals), advantages, 0.0))

  def shaped(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    reward: jax.Array,
    penalty: jax.Array | None = None,
    guided: jax.Array | None = None,
  ) -> tuple[Shaped, Signals]:
    """The shaped rewards and what they were made from, per unit of credit [n, g, u]. Takes what `advantages` takes."""
    mask = self._contrast(mask, correct, guided)
    entropy = entropy.astype(jnp.float32)
    if self.recipe.per_completion:
      if self.credit:
        entropy = completion_entropy(entropy, mask, self.settings.mean, self.settings.h_floor)
      mask = mask.any(-1, keepdims=True)
    penalty = jnp.zeros(correct.shape, jnp.float32) if penalty is None else penalty
    x = Signals(
      entropy, mask, *(x[..., None] for x in (correct, reward.astype(jnp.float32), penalty))
    )
    return entropy_credit(x, self.credit) if self.credit else plain_reward(x), x

  def loss_mask(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    guided: jax.Array | None = None,
    **_: Any,
  ) -> jax.Array:
    """The tokens that are learned from, bool[n, g, t]. Takes what `advantages` takes."""
    mask = self._contrast(mask, correct, guided)
    return (
      highest(entropy, mask, self.settings.forking_share) if self.settings.forking_share else mask
    )

  def _contrast(self, mask: jax.Array, correct: jax.Array, guided: jax.Array | None) -> jax.Array:
    """`mask` without the groups that carry no signal, where the recipe asks for contrast."""
    self._check_guided(guided)
    return (
      mask & informative(correct, mask.any(-1), guided)[:, None, None]
      if self.recipe.contrast
      else mask
    )

  def _check_guided(self, guided: jax.Array | None) -> None:
    if guided is not None and not self.settings.guide_completions:
      raise UserError(
        f"algorithm {self.name!r} has no guide; leave `guided` out, or use 'dapo_mixed'"
      )

  def token_weights(
    self, mask: jax.Array, correct: jax.Array | None = None, guided: jax.Array | None = None
  ) -> jax.Array:
    """How much each token's objective counts, f32[n, g, t], made from the whole update batch.

    Args:
      mask: bool[n, g, t], as `loss_mask` gives it.
      correct, guided: bool[n, g]; with a guide, groups that the policy failed throughout are averaged apart and weigh
        `lambda_zero` (2507.12931).
    """
    average = AVERAGES[self.settings.average]
    self._check_guided(guided)
    if guided is None:
      return average(mask)
    apart = zero_reward(correct, mask.any(-1), guided)[:, None, None]
    return average(mask & ~apart) + self.settings.lambda_zero * average(mask & apart)

  def loss(
    self,
    *,
    logp: jax.Array,
    logp_old: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    weights: jax.Array | None = None,
    guided: jax.Array | None = None,
    logp_sampler: jax.Array | None = None,
    logp_reference: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped loss f32[], differentiable in `logp` alone, and its metrics.

    Args:
      logp: f32[n, g, t], nats, of the policy that learns.
      logp_old: f32[n, g, t], of the policy that wrote the completion.
      advantages: f32[n, g, t].
      mask: bool[n, g, t], tokens averaged over: as `loss_mask` gives it.
      weights: `token_weights` of the whole batch where this is a micro-batch of it; made from `mask` if None (and then
        `dapo_forking` averages over those of its tokens whose advantage is not 0).
      guided: bool[n, g], completions that a guide wrote: their ratio is capped instead of clipped.
      logp_sampler: f32[n, g, t], where the sampler's own log-probs differ from `logp_old`; read with `tis_cap`.
      logp_reference: f32[n, g, t], of the frozen reference; needed with `kl_weight`.

    Raises:
      UserError: `kl_weight` is set and `logp_reference` is not given, or `tis_cap` and not `logp_sampler`; or `guided` is given and
        the recipe has no guide.
    """
    s = self.settings
    self._check_guided(guided)
    for weight, given, name in (
      ("kl_weight", logp_reference, "logp_reference"),
      ("tis_cap", logp_sampler, "logp_sampler"),
    ):
      if getattr(s, weight) and given is None:
        raise UserError(
          f"algorithm.{weight} = {getattr(s, weight)} needs {name}; give it, or set {weight} = 0"
        )
    logp_old, advantages, logp_sampler, logp_reference = jax.lax.stop_gradient(
      (logp_old, advantages, logp_sampler, logp_reference)
    )
    if weights is None:
      mask = mask & (advantages != 0) if s.forking_share else mask
      weights = self.token_weights(mask)
    ratio = self.ratio(logp, logp_old, mask)
    advantages = jnp.where(mask, advantages, 0.0)
    low = (ratio < 1 - s.eps_low) & (advantages < 0)
    high = (ratio > 1 + s.eps_high) & (advantages > 0)
    objective = clipped_objective(ratio, advantages, s.eps_low, s.eps_high, s.dual_clip)
    metrics = {}
    if guided is not None:
      guided = guided[..., None]
      objective = jnp.where(guided, jnp.minimum(ratio, s.guide_cap) * advantages, objective)
      metrics["clip/guide"] = masked_mean(ratio > s.guide_cap, mask & guided)
    own = mask if guided is None else mask & ~guided
    metrics |= {
      "clip/low": masked_mean(low, own),
      "clip/high": masked_mean(high, own),
      "ratio/mean": masked_mean(ratio, own),
    }
    if s.tis_cap:
      trust = mismatch_weight(logp_old, logp_sampler, mask, s.tis_cap)
      objective *= trust
      metrics["mismatch/weight"] = masked_mean(trust, own)
    loss = -jnp.where(mask, weights * objective, 0.0).sum()
    if s.kl_weight:
      divergence = k3(
        logp, logp_reference, own
      )  # an estimate on the policy's own tokens alone; on a guide's it explodes
      loss += s.kl_weight * jnp.where(own, weights * divergence, 0.0).sum()
      metrics["kl/reference"] = masked_mean(divergence, own)
    return loss, jax.lax.stop_gradient(metrics)

  def token_loss(self, logp: jax.Array, signals: Mapping[str, jax.Array | None]) -> jax.Array:
    """What tokens from anywhere in a batch have in its `loss`, f32[], where the algorithm is `per_token`.

    Args:
      logp: f32[b, c], nats.
      signals: what `loss` takes beside, [b, c] each: `weights` are of the whole batch, and `guided` is of a token's completion.
    """
    alone = jax.tree.map(
      lambda x: x[..., None], dict(signals)
    )  # each token is a completion [b, c, 1]
    return self.loss(logp=logp[..., None], **alone | {"guided": signals.get("guided")})[0]

  def credit_metrics(self, **signals: Any) -> dict[str, jax.Array]:
    """How the entropy spreads the credit. Takes what `advantages` takes; empty for recipes that do not read the entropy.

    `credit/participants_*` is the share of a set that carries its credit (its effective number of members over its size);
    `credit/conservation_residual` is by how much the shares of O+ or O- fail to sum to their number, a unit: 0 but for rounding.
    """
    if not self.credit:
      return {}
    _, x = self.shaped(**signals)
    share = entropy_shares(x, self.credit)
    axes = self.credit.axes
    right = x.mask & x.correct
    wrong = x.mask & ~x.correct
    residual = lambda share, side: jnp.abs(share.sum() - side.sum()) / jnp.maximum(side.sum(), 1)
    return {
      "credit/participants_correct": effective_participants(share.plus, right, axes),
      "credit/participants_incorrect": effective_participants(share.minus, wrong, axes),
      "credit/conservation_residual": jnp.maximum(
        residual(share.plus, right), residual(share.minus, wrong)
      ),
    }


def make(name: str, **overrides: Any) -> Algorithm:
  """An algorithm by name, with settings other than the published ones as keywords.

  Raises:
    UserError (a ValueError): an unknown name or setting, with the nearest valid one, or a value out of its bounds.
  """
  if name not in RECIPES:
    raise UserError(
      f"unknown algorithm {name!r}{nearest(str(name), RECIPES)}; valid are {', '.join(RECIPES)}"
    )
  settings = dict(RECIPES[name].settings)
  for key, value in overrides.items():
    if key not in settings:
      raise UserError(
        f"algorithm {name!r} has no setting {key!r}{nearest(key, settings)}; it reads {', '.join(settings)}"
      )
    if value is None:
      raise UserError(
        f"algorithm.{key} must be given a value, got None; leave it out for the published {settings[key]!r}"
      )
  made = Settings(**settings | overrides)
  if "gamma" in overrides and made.length_penalty != "group_relative":
    raise UserError(
      f"algorithm.gamma = {made.gamma} is read by length_penalty = 'group_relative' alone; set that, or leave gamma out"
    )
  return Algorithm(name, made)
