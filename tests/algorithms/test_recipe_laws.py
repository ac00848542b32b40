"""What must hold of every recipe, whatever the data."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_reference import random_batch, random_policies

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.relative_entropy import COMPARE, inverse_entropy, relative_entropy

NAMES = ("gtpo", "grpo_s", "dapo", "grpo")
COMPARISONS = [(c, s) for c in ("position", "sequence", "matrix") for s in ("group", "batch")]


def arrays(batch):
  return {name: jnp.asarray(value) for name, value in batch.items()}


def rows(batch, keep):
  return {name: value[keep] for name, value in batch.items()}


@functools.partial(jax.jit, static_argnums=0)
def loss_of(algorithm, batch, policies):
  """The loss and its gradient in logp."""
  advantages, mask = algorithm.advantages(**batch), algorithm.loss_mask(batch["mask"], batch["correct"])
  value = lambda logp: algorithm.loss(logp=logp, logp_old=policies[1], advantages=advantages, mask=mask)[0]
  return jax.value_and_grad(value)(policies[0])


@functools.partial(jax.jit, static_argnums=0)
def advantages_of(algorithm, batch):
  return algorithm.advantages(**batch)


@functools.partial(jax.jit, static_argnums=0)
def credit_of(algorithm, batch):
  """What the shaping made: sums of the two collections, their units, and the metrics."""
  shaped, signals = algorithm.shaped(**batch)
  right = signals.mask & batch["correct"][..., None]
  units = {"right": right, "wrong": signals.mask & ~right}
  return shaped.plus.sum(), shaped.minus.sum(), units, algorithm.credit_metrics(**batch)


def policies_of(batch, seed=0):
  return tuple(jnp.asarray(x) for x in random_policies(seed, np.asarray(batch["mask"]))[:2])


# --- conservation ---

@pytest.mark.parametrize(("compare", "scope"), COMPARISONS)
def test_gtpo_conserves_credit(compare, scope):
  for seed in range(3):
    algorithm, batch = make("gtpo", alpha1=0.7, alpha2=0.6, compare=compare, scope=scope), arrays(random_batch(seed))
    plus, minus, units, metrics = credit_of(algorithm, batch)
    right, wrong = int(units["right"].sum()), int(units["wrong"].sum())
    assert right > 3 and wrong > 3
    np.testing.assert_allclose([plus, minus], [1.3 * right, -1.3 * wrong], rtol=1e-5)
    assert float(metrics["credit/conservation_residual"]) < 1e-5
    axes = COMPARE[compare, scope]
    for side, x in ((units["right"], batch["entropy"]), (units["wrong"], inverse_entropy(batch["entropy"], 0.01))):
      share = np.asarray(relative_entropy(x, side, axes), np.float64)
      np.testing.assert_allclose(share.sum(axes), side.sum(axes), atol=1e-5)


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_grpo_s_conserves_credit(scope, mean):
  batch = random_batch(2)
  plus, minus, _, metrics = credit_of(make("grpo_s", beta1=0.7, beta2=0.6, scope=scope, mean=mean), arrays(batch))
  mixed = batch["correct"][batch["correct"].any(1) & ~batch["correct"].all(1)]
  np.testing.assert_allclose([plus, minus], [1.3 * mixed.sum(), -1.3 * (~mixed).sum()], rtol=1e-5)
  assert float(metrics["credit/conservation_residual"]) < 1e-5


# --- groups without contrast ---

WITH_CONTRAST = [("gtpo", {"compare": c, "scope": s, "norm_scope": z}) for c, s in COMPARISONS for z in ("batch", "group")]
WITH_CONTRAST += [("grpo_s", {"scope": s, "norm_scope": z}) for s in ("group", "batch") for z in ("batch", "group")]
WITH_CONTRAST += [("dapo", {})]


@pytest.mark.parametrize(("name", "options"), WITH_CONTRAST, ids=lambda x: x if isinstance(x, str) else "-".join(x.values()))
def test_groups_without_contrast_are_as_if_absent(name, options):
  algorithm = make(name, **options)
  batch = random_batch(3)
  keep = np.flatnonzero(batch["correct"].any(1) & ~batch["correct"].all(1))
  gone = np.setdiff1d(np.arange(len(batch["correct"])), keep)
  assert len(gone) == 2
  whole, part = arrays(batch), arrays(rows(batch, keep))
  advantages = np.asarray(algorithm.advantages(**whole))
  np.testing.assert_allclose(advantages[keep], algorithm.advantages(**part), rtol=1e-6, atol=1e-7)
  assert not advantages[gone].any()


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "dapo"])
def test_the_loss_does_not_see_groups_without_contrast(name):
  algorithm, batch = make(name), random_batch(3)
  keep, gone = np.arange(2, 6), np.arange(2)
  policies = policies_of(batch)
  whole, part = arrays(batch), arrays(rows(batch, keep))
  (*_, metrics), (*_, metrics_part) = credit_of(algorithm, whole), credit_of(algorithm, part)
  for metric in metrics.keys() - {"credit/conservation_residual"}:
    np.testing.assert_allclose(metrics[metric], metrics_part[metric], rtol=1e-6)
  value, grad = loss_of(algorithm, whole, policies)
  value_part, grad_part = loss_of(algorithm, part, tuple(x[keep] for x in policies))
  np.testing.assert_allclose(value, value_part, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(grad[keep], grad_part, rtol=1e-6, atol=1e-8)
  assert not np.asarray(grad)[gone].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verdict", [True, False])
def test_a_batch_without_any_contrast_teaches_nothing(name, verdict):
  batch = random_batch(4)
  batch = {**batch, "correct": np.full_like(batch["correct"], verdict), "reward": np.full_like(batch["reward"], 0.3),
           "penalty": np.zeros_like(batch["penalty"])}
  value, grad = loss_of(make(name), arrays(batch), policies_of(batch))
  assert float(value) == 0
  assert not grad.any()


# --- right against wrong ---

@pytest.mark.parametrize("norm_scope", ["batch", "group"])
@pytest.mark.parametrize(("name", "options"), [("gtpo", {"compare": c, "scope": s}) for c, s in COMPARISONS] + [("grpo_s", {})])
def test_right_is_above_0_and_wrong_below_on_average(name, options, norm_scope):
  recipe = make(name, norm_scope=norm_scope, **options)
  for seed in range(3):
    batch = random_batch(seed + 20)
    x = arrays(batch)
    advantages, kept = np.asarray(recipe.advantages(**x)), np.asarray(recipe.loss_mask(x["mask"], x["correct"]))
    groups = [slice(None)] if norm_scope == "batch" else [slice(i, i + 1) for i in range(len(kept)) if kept[i].any()]
    for group in groups:
      right = (kept & batch["correct"][..., None])[group]
      wrong = kept[group] & ~right
      assert advantages[group][right].mean() > 0.1
      assert advantages[group][wrong].mean() < -0.1


def test_both_weights_matter():
  x = arrays(random_batch(5))
  for name, base, bonus in (("gtpo", "alpha1", "alpha2"), ("grpo_s", "beta1", "beta2")):
    plain, more = make(name, **{base: 1.0, bonus: 0.0}).advantages(**x), make(name, **{base: 1.0, bonus: 0.5}).advantages(**x)
    assert np.abs(plain - more).max() > 0.1
    less_base = make(name, **{base: 0.5, bonus: 0.5}).advantages(**x)
    assert np.abs(less_base - more).max() > 0.1
    doubled = make(name, **{base: 2.0, bonus: 1.0}).advantages(**x)  # z-scores do not see a common factor
    np.testing.assert_allclose(doubled, more, rtol=1e-5, atol=1e-6)


def test_without_a_bonus_every_right_token_is_worth_the_same():
  batch = random_batch(6)
  advantages = np.asarray(make("gtpo", alpha2=0.0).advantages(**arrays(batch)))
  for side in (batch["correct"], ~batch["correct"]):
    values = advantages[batch["mask"] & side[..., None] & (advantages != 0)]
    assert np.ptp(values) < 1e-6 and abs(values[0]) > 0.1


def test_more_entropy_earns_a_right_token_more_and_costs_a_wrong_one_less():
  mask, correct = jnp.ones((1, 4, 1), bool), jnp.asarray([[True, True, False, False]])
  entropy = jnp.asarray([[[0.2], [1.5], [0.2], [1.5]]])
  advantages = advantages_of(make("gtpo"), {"entropy": entropy, "mask": mask, "correct": correct, "reward": jnp.zeros((1, 4))})
  sure, unsure, sure_wrong, unsure_wrong = advantages.ravel().tolist()
  assert unsure > sure > 0 > unsure_wrong > sure_wrong


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_sign_guard_holds_the_signs_and_leaves_the_rest(name):
  rng = np.random.default_rng(7)
  correct = np.ones((2, 16), bool)
  correct[:, 0] = False  # 15 of 16 right: without the guard many right ones get less than 0
  x = {"entropy": jnp.asarray(rng.gamma(0.5, 1.0, (2, 16, 8)), jnp.float32), "mask": jnp.ones((2, 16, 8), bool),
       "correct": jnp.asarray(correct), "reward": jnp.asarray(correct, jnp.float32)}
  weights = {"alpha2": 1.0} if name == "gtpo" else {"beta2": 1.0}
  free, guarded = (np.asarray(advantages_of(make(name, sign_guard=guard, **weights), x)) for guard in (False, True))
  flipped = (free < 0) & correct[..., None]
  assert flipped.mean() > 0.1
  np.testing.assert_array_equal(guarded, np.where(flipped, 0, free))


# --- what carries no gradient, and what padding must not do ---

@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_flows_through_the_new_log_probs_alone(name):
  algorithm, batch = make(name), arrays(random_batch(8))
  policies = policies_of(batch)
  mask = algorithm.loss_mask(batch["mask"], batch["correct"])

  def value(logp, logp_old, entropy, reward, penalty, factor):
    inputs = {**batch, "entropy": entropy, "reward": reward, "penalty": penalty}
    return algorithm.loss(logp=logp, logp_old=logp_old, advantages=factor * algorithm.advantages(**inputs), mask=mask)[0]

  learned, *others = jax.jit(jax.grad(value, argnums=range(6)))(*policies, batch["entropy"], batch["reward"], batch["penalty"], 1.0)
  assert np.abs(learned).max() > 1e-3
  assert not any(np.asarray(other).any() for other in others)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_in_the_padding_has_no_effect(name, garbage):
  algorithm, batch = make(name), random_batch(9)
  policies = tuple(np.asarray(x) for x in policies_of(batch))
  fill = lambda x: jnp.asarray(np.where(batch["mask"], x, garbage))
  clean = loss_of(algorithm, arrays(batch), tuple(map(jnp.asarray, policies)))
  broken = arrays(batch) | {"entropy": fill(batch["entropy"])}
  got = loss_of(algorithm, broken, tuple(map(fill, policies)))
  np.testing.assert_array_equal(got[0], clean[0])
  np.testing.assert_array_equal(got[1], clean[1])
  assert np.isfinite(clean[0]) and np.abs(clean[1]).max() > 1e-3
  assert jax.tree.map(float, credit_of(algorithm, broken)[3]) == jax.tree.map(float, credit_of(algorithm, arrays(batch))[3])


@pytest.mark.parametrize("name", NAMES)
def test_garbage_advantages_in_the_padding_have_no_effect(name):
  mask = random_batch(10)["mask"]
  logp, old, advantages = random_policies(10, mask)
  value = lambda logp, advantages: make(name).loss(logp=logp, logp_old=old, advantages=advantages, mask=jnp.asarray(mask))
  learn = jax.jit(jax.value_and_grad(value, has_aux=True))
  (clean, metrics), grad = learn(logp, advantages)
  assert float(clean) != 0 and np.abs(grad).max() > 1e-3
  for garbage in (np.nan, np.inf, -np.inf):
    (got, got_metrics), got_grad = learn(logp, np.where(mask, advantages, np.float32(garbage)))
    assert (float(got), jax.tree.map(float, got_metrics)) == (float(clean), jax.tree.map(float, metrics))
    np.testing.assert_array_equal(got_grad, grad)


def test_a_spread_of_rewards_below_1e_6_is_no_signal():
  mask, correct = jnp.ones((1, 2, 3), bool), jnp.asarray([[True, False]])
  value = lambda spread: advantages_of(make("grpo"), {"entropy": jnp.zeros(mask.shape), "mask": mask, "correct": correct,
                                                      "reward": jnp.asarray([[spread, -spread]])})
  assert not value(5e-7).any()
  np.testing.assert_allclose(value(5e-6), [[[1.0] * 3, [-1.0] * 3]], rtol=1e-5)


# --- compiled, and in parts ---

@pytest.mark.parametrize("name", NAMES)
def test_jitted_equals_not_jitted(name):
  algorithm, batch = make(name), arrays(random_batch(11))
  policies = policies_of(batch)
  step = lambda algorithm, batch, policies: (algorithm.advantages(**batch), *loss_of.__wrapped__(algorithm, batch, policies))
  plain, jitted = step(algorithm, batch, policies), jax.jit(step, static_argnums=0)(algorithm, batch, policies)
  for a, b in zip(plain, jitted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_equal_algorithms_are_one_static_argument():
  traces = []
  probe = jax.jit(lambda algorithm, x: traces.append(algorithm) or x, static_argnums=0)
  for algorithm in (make("gtpo"), make("gtpo"), make("gtpo", alpha2=0.2)):
    probe(algorithm, 1.0)
  assert len(traces) == 2


@pytest.mark.parametrize("name", NAMES)
def test_token_weights_sum_to_1_over_what_is_learned_from(name):
  algorithm, batch = make(name), arrays(random_batch(12))
  mask = algorithm.loss_mask(batch["mask"], batch["correct"])
  weights = np.asarray(algorithm.token_weights(mask), np.float64)
  np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)
  assert not weights[~np.asarray(mask)].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_the_parts_add_up_to_the_whole(name):
  algorithm, batch, parts = make(name), arrays(random_batch(13)), 3
  logp, logp_old = policies_of(batch)
  advantages, mask = algorithm.advantages(**batch), algorithm.loss_mask(batch["mask"], batch["correct"])
  weights = algorithm.token_weights(mask)

  def in_parts(logp):
    losses = [algorithm.loss(logp=logp[i::parts], logp_old=logp_old[i::parts], advantages=advantages[i::parts], mask=mask[i::parts],
                             weights=weights[i::parts])[0] for i in range(parts)]
    return sum(losses)

  whole = lambda logp: algorithm.loss(logp=logp, logp_old=logp_old, advantages=advantages, mask=mask)[0]
  (value, grad), (expected, expected_grad) = (jax.jit(jax.value_and_grad(f))(logp) for f in (in_parts, whole))
  np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-6, atol=1e-8)
  assert np.abs(expected_grad).max() > 1e-3
