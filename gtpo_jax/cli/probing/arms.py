"""The arms of a probe: recipes with settings, and the derivative of each one's loss on a batch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gtpo_jax.algorithms import Algorithm, Distillation, make
from gtpo_jax.arrays import Rollouts, Signals
from gtpo_jax.config import AlgorithmSection, Config
from gtpo_jax.config.sections import TeacherSection
from gtpo_jax.loop.prepare import check_training
from gtpo_jax.runtime.errors import UserError

# Settings of the rewards, which all arms take from the config's own section `algorithm`.
OF_REWARDS = ("length_penalty", "overlong_buffer", "gamma", "overlong_filter")
SHUFFLED = " shuffled"  # ends the name of a control
# The estimate of the true gradient: rewards minus the mean of the other completions, not divided by
# a standard deviation, summed over all tokens with one constant weight.
REFERENCE = make("rloo", loss_aggregation="constant")


class Arm(NamedTuple):
  """A way to assign credit."""

  algorithm: Algorithm  # its advantages and its loss
  shuffled: bool = False  # whether its entropies are permuted first, which makes it a control

  def derivative(
    self, config: Config, signals: Signals, rollouts: Rollouts, seed: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the derivatives of the loss by log-probs and by entropies, f32[n, g, t] each.

    They are taken where the policy is the one that sampled, before any update.

    Args:
      config: the config of the probe, whose reward parts `signals` has.
      signals: of the batch, on the host.
      rollouts: of the same batch.
      seed: of the permutation of a control.
    """
    signals = own_rewards(config, self.algorithm, signals)
    if self.shuffled:
      permute = shuffled_means if self.algorithm.recipe.shaping.per_completion else shuffled_tokens
      signals = signals.replace(entropy=permute(signals, np.random.default_rng(seed)))
    reference = rollouts.reference if self.algorithm.recipe.reference.kl_weight else None
    of_loss = _derivatives(self.algorithm, signals, rollouts.log_probs, reference)
    return tuple(np.asarray(x) for x in of_loss)


def parse_arms(arms: str | Sequence[str], config: Config, controls: bool) -> dict[str, Arm]:
  """Returns arms by name, such as "grpo" and "gtpo(alpha2=1)".

  Args:
    arms: the names, in one string with commas between them or as a list; the first is the arm that
      the others are compared with.
    config: the user's config, which has the teacher and the settings of the rewards.
    controls: whether every arm that reads entropies is followed by a control with shuffled ones.
  """
  names = re.split(r",(?![^(]*\))", arms) if isinstance(arms, str) else list(arms)
  found: dict[str, Arm] = {}
  for name in map(str.strip, names):
    if name in found:
      raise UserError(f"the arm {name!r} is named twice")
    found[name] = Arm(_algorithm(name, config))
    if controls and _reads_entropy(found[name].algorithm):
      found[name + SHUFFLED] = found[name]._replace(shuffled=True)
  if len(found) < 2:
    raise UserError(f"a probe compares at least two arms, such as grpo,gtpo; got {arms!r}")
  return found


def _algorithm(arm: str, config: Config) -> Algorithm:
  """Returns the algorithm of an arm, checked as that of a run would be."""
  match = re.fullmatch(r"(\w+)(?:\((.*)\))?", arm)
  if not match:
    raise UserError(f"an arm is a recipe with settings, such as gtpo(alpha2=1), got {arm!r}")
  settings = {}
  for part in filter(None, (match[2] or "").split(",")):
    key, equals, value = map(str.strip, part.partition("="))
    if not equals:
      raise UserError(f"the arm {arm!r} needs settings as NAME=VALUE, got {part!r}")
    try:
      settings[key] = ast.literal_eval(value)
    except (SyntaxError, ValueError):
      settings[key] = value
    if key in OF_REWARDS:
      raise UserError(f"arms share their rewards: set --config.algorithm.{key}, not {arm!r}")
  try:
    recipe = make(match[1], **settings).recipe
    if not recipe.distillation:
      config = dataclasses.replace(config, teacher=TeacherSection(), distill=Distillation())
    section = AlgorithmSection(name=match[1], **settings, **_of_rewards(config))
    config = dataclasses.replace(config, algorithm=section)
    check_training(config)
  except UserError as error:
    raise UserError(f"the arm {arm!r}: {error}") from error
  recipe = config.resolved_algorithm.recipe
  if recipe.matches_distributions:
    raise UserError(f"the arm {arm!r} cannot be probed: set --config.distill.divergence=sampled")
  if missing := set(recipe.needs) - {"parts", "part_weights", "score_norms", "value_gains"}:
    raise UserError(f"the arm {arm!r} cannot be probed: it needs {', '.join(sorted(missing))}")
  if recipe.guide.guide_completions:
    raise UserError(f"the arm {arm!r} cannot be probed: its guide samples, and the policy for all")
  return config.resolved_algorithm


def _of_rewards(config: Config) -> dict[str, Any]:
  return {name: getattr(config.algorithm, name) for name in OF_REWARDS}


def sampling_config(config: Config, arms: Mapping[str, Arm]) -> Config:
  """Returns the config that samples and scores for all arms, with every part of the rewards.

  Samples and verdicts do not depend on the arms, which decide only what is computed beside them.
  """
  recipes = [arm.algorithm.recipe for arm in arms.values()]
  section = AlgorithmSection(
    name="gdpo",  # keeps the parts of the reward
    kl_weight=max(recipe.reference.kl_weight for recipe in recipes),
    **({"turn_credit": "state"} if any(recipe.turns for recipe in recipes) else {}),
    **_of_rewards(config),
  )
  has_teacher = any(recipe.distillation for recipe in recipes)
  return dataclasses.replace(
    config,
    algorithm=section,
    teacher=config.teacher if has_teacher else TeacherSection(),
    distill=config.distill if has_teacher else Distillation(),
    model=dataclasses.replace(config.model, router_balance=0.0),
    data=dataclasses.replace(config.data, difficulty="uniform"),  # draws from the verdicts so far
    batch=dataclasses.replace(config.batch, pack=False, minibatches=1, epochs=1),
    sampling=dataclasses.replace(config.sampling, staleness=0),
  )


def own_rewards(config: Config, algorithm: Algorithm, signals: Signals) -> Signals:
  """Returns the signals with the rewards of a run with this algorithm, as `RewardManager` adds up.

  Args:
    config: names the parts of the reward.
    algorithm: says what right and wrong are worth, and which parts its shaping replaces.
    signals: with `parts`; their penalty is the one for length.
  """
  wrong, right = algorithm.recipe.rewards
  terms = {}
  for k, (name, weight) in enumerate(config.reward.weighted):
    part = np.where(signals.correct, right, wrong) if name == "correct" else signals.parts[..., k]
    terms[name] = weight * np.asarray(part, np.float64)
  reward = sum(terms.values(), np.zeros(signals.correct.shape)).astype(np.float32)
  penalty = signals.penalty
  if algorithm.recipe.shaping.from_verdict:
    terms.pop("correct", None)
    penalty = penalty + sum(terms.values(), np.zeros(penalty.shape)).astype(np.float32)
  return signals.replace(reward=reward, penalty=penalty)


@functools.partial(jax.jit, static_argnums=0)
def _derivatives(
  algorithm: Algorithm, signals: Signals, log_probs: jax.Array, reference: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  advantages = algorithm.advantages(signals)
  fixed = signals.after_credit().replace(
    advantages=advantages,
    mask=algorithm.loss_mask(signals),
    log_probs_old=log_probs,
    log_probs_sampler=log_probs,
    log_probs_reference=reference,
  )
  if algorithm.recipe.selects:
    key = jax.random.key(0)
    fixed = fixed.replace(selected=algorithm.select(fixed, log_probs=log_probs, key=key))
  loss = lambda x, entropy: algorithm.loss(fixed, log_probs=x, entropy=entropy)[0]
  return jax.grad(loss, (0, 1))(log_probs, signals.entropy)


def _reads_entropy(algorithm: Algorithm) -> bool:
  """Whether the credit changes with the entropies, on a small batch."""
  rng = np.random.default_rng(0)
  shape = (2, 4, 8)
  numbers = rng.gamma(1.0, 1.0, shape).astype(np.float32)
  correct = np.tile([True, False], (2, 2))
  signals = Signals(
    mask=np.ones(shape, bool),
    entropy=numbers,
    correct=correct,
    reward=correct.astype(np.float32),
    divergence=numbers,
    turn_reward=np.zeros(shape, np.float32),
    turn_state=np.zeros(shape, np.int32),
    parts=correct[..., None].astype(np.float32),
    part_weights=np.ones((2, 1), np.float32),
    score_norms=np.ones(shape, np.float32),
  )
  credit = lambda x: np.asarray(algorithm.advantages(x) * algorithm.loss_mask(x))
  other = signals.replace(entropy=rng.permuted(numbers, axis=2) * correct[..., None])
  return not np.array_equal(credit(signals), credit(other))


def shuffled_tokens(signals: Signals, rng: np.random.Generator) -> np.ndarray:
  """Permutes the entropies of all tokens of a group whose completions share a verdict."""
  entropy = np.array(signals.entropy)
  for group, verdict in itertools.product(range(len(entropy)), (False, True)):
    side = (signals.correct[group] == verdict)[:, None]
    tokens = np.flatnonzero(signals.mask[group] & side)
    flat = entropy[group].reshape(-1)
    flat[tokens] = flat[rng.permutation(tokens)]
  return entropy


def shuffled_means(signals: Signals, rng: np.random.Generator) -> np.ndarray:
  """Permutes the mean entropies of the completions of a group that share a verdict."""
  mask = signals.mask
  mean = np.where(mask, signals.entropy, 0.0).sum(2) / mask.sum(2).clip(1)
  for group, verdict in itertools.product(range(len(mean)), (False, True)):
    members = np.flatnonzero((signals.correct[group] == verdict) & mask[group].any(1))
    mean[group, members] = mean[group, rng.permutation(members)]
  return np.where(mask, mean[..., None], 0.0).astype(np.float32)
