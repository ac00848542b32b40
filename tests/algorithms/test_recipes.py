"""The recipes as `make` gives them: what it refuses, cases worked by hand, and the slow float64 loops."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_reference import (
  group_zscore_advantages,
  grpo_s_advantages,
  gtpo_advantages,
  informative,
  loss,
  numeric_gradient,
  random_batch,
  random_policies,
)

from gtpo_jax.algorithms import RECIPES, make
from gtpo_jax.errors import UserError


def arrays(batch):
  return {name: jnp.asarray(value) for name, value in batch.items()}


# --- make ---

@pytest.mark.parametrize(("name", "setting", "value", "bound"), [
    ("gtpo", "alpha1", -0.5, "at least 0 and finite"),
    ("gtpo", "alpha1", float("inf"), "at least 0 and finite"),
    ("gtpo", "alpha2", float("nan"), "at least 0 and finite"),
    ("gtpo", "alpha2", "0.1", "at least 0 and finite"),
    ("grpo_s", "beta1", -1, "at least 0 and finite"),
    ("grpo_s", "beta2", -1e-9, "at least 0 and finite"),
    ("gtpo", "compare", "column", "one of matrix, position, sequence"),
    ("gtpo", "compare", ["position"], "one of matrix, position, sequence"),
    ("gtpo", "scope", "global", "one of batch, group"),
    ("grpo_s", "norm_scope", "sequence", "one of batch, group"),
    ("grpo_s", "mean", "harmonic", "one of arithmetic, geometric"),
    ("grpo_s", "ratio", "token", "one of arithmetic, geometric"),
    ("gtpo", "h_floor", 0.0, "above 0"),
    ("grpo_s", "h_floor", -0.01, "above 0"),
    ("gtpo", "h_floor", float("nan"), "above 0"),
    ("gtpo", "eps_low", 0.0, "in (0, 1)"),
    ("grpo", "eps_low", 1.0, "in (0, 1)"),
    ("dapo", "eps_low", float("nan"), "in (0, 1)"),
    ("dapo", "eps_high", 0.0, "above 0 and finite"),
    ("dapo", "eps_high", float("inf"), "above 0 and finite"),
    ("dapo", "overlong_buffer", -1, "at least 0"),
])
def test_a_bad_value_is_refused_with_the_value_and_the_bound(name, setting, value, bound):
  with pytest.raises(UserError) as error:
    make(name, **{setting: value})
  message = str(error.value)
  assert f"algorithm.{setting} must be {bound}" in message
  assert repr(value) in message
  assert "\n" not in message


@pytest.mark.parametrize(("name", "setting", "value"), [
    ("gtpo", "sign_guard", "no"),       # a text is true, whatever it says
    ("gtpo", "sign_guard", 2),
    ("dapo", "overlong_buffer", 1.5),   # tokens
    ("gtpo", "h_floor", float("inf")),  # every 1/H would be 0
    ("gtpo", "alpha2", None),           # the recipe reads it
    ("grpo", "eps_low", None),
])
def test_a_value_of_the_wrong_kind_is_refused(name, setting, value):
  with pytest.raises(UserError, match=f"algorithm.{setting} must be") as error:
    make(name, **{setting: value})
  assert repr(value) in str(error.value)


def test_a_clip_range_the_wrong_way_round_is_refused():
  with pytest.raises(UserError, match=r"eps_low must be in \(0, eps_high\], got 0.3 > 0.28"):
    make("gtpo", eps_low=0.3)
  assert make("gtpo", eps_low=0.28).settings.eps_low == 0.28


@pytest.mark.parametrize(("name", "nearest"), [("gtop", "gtpo"), ("dappo", "dapo"), ("grpo-s", "grpo_s")])
def test_an_unknown_algorithm_names_the_nearest(name, nearest):
  with pytest.raises(UserError, match="unknown algorithm") as error:
    make(name)
  assert f"did you mean {nearest!r}?" in str(error.value)
  assert all(valid in str(error.value) for valid in RECIPES)


def test_an_unknown_setting_names_the_nearest():
  with pytest.raises(UserError, match="no setting 'alpha_2', did you mean 'alpha2'"):
    make("gtpo", alpha_2=0.1)
  with pytest.raises(UserError, match="no setting 'alpha2'"):  # another recipe's
    make("grpo", alpha2=0.1)


@pytest.mark.parametrize(("name", "published"), [
    ("gtpo", {"alpha1": 1.0, "alpha2": 0.1, "compare": "position", "scope": "group", "norm_scope": "batch", "h_floor": 0.01,
              "sign_guard": False, "eps_low": 0.2, "eps_high": 0.28}),
    ("grpo_s", {"mean": "arithmetic", "ratio": "arithmetic", "scope": "group", "norm_scope": "group", "h_floor": 0.01,
                "sign_guard": False, "eps_low": 0.2, "eps_high": 0.28, "alpha1": None}),
    ("dapo", {"eps_low": 0.2, "eps_high": 0.28, "alpha1": None, "compare": None}),
    ("grpo", {"eps_low": 0.2, "eps_high": 0.2, "overlong_buffer": None}),
])
def test_published_settings(name, published):
  settings = make(name).settings
  assert {key: getattr(settings, key) for key in published} == published


def test_an_override_changes_its_setting_alone():
  assert make("gtpo", alpha2=0.4) == make("gtpo", **{**RECIPES["gtpo"].settings, "alpha2": 0.4})
  assert make("gtpo", alpha2=0.4).settings.alpha1 == make("gtpo").settings.alpha1


# --- by hand: completions of lengths 2, 1, 2, 1; the first two right ---

MASK = jnp.asarray([[[True, True], [True, False], [True, True], [True, False]]])
CORRECT = jnp.asarray([[True, True, False, False]])
REWARD = jnp.asarray([[1.0, 1.0, 0.0, 0.0]])
OLD = jnp.full((1, 4, 2), -1.0)
NEW = OLD + jnp.log(jnp.asarray([[[1.5, 1.0], [0.5, 1.0], [0.5, 1.1], [1.5, 1.0]]]))  # ratios


def test_gtpo_by_hand():
  algorithm = make("gtpo", alpha2=0.3)
  entropy = jnp.asarray([[[1.0, 2.0], [3.0, 7.0], [0.5, 0.25], [0.25, 7.0]]])
  advantages = jax.jit(algorithm.advantages)(entropy=entropy, mask=MASK, correct=CORRECT, reward=REWARD)
  # Shares of the right: step 1: 1/2, 3/2; step 2: 1. R+ = 1.15, 1.3, 1.45, 0, 0, 0: mean 0.65, variance 2.58 / 6.
  # Shares of the wrong by 1/H: step 1: 2/3, 4/3; step 2: 1. R- = 0, 0, 0, -1.2, -1.3, -1.4: mean -0.65, variance 2.555 / 6.
  p, m = (2.58 / 6) ** 0.5, (2.555 / 6) ** 0.5
  np.testing.assert_allclose(advantages, [[[0.5 / p, 0.65 / p], [0.8 / p, 0], [-0.55 / m, -0.65 / m], [-0.75 / m, 0]]], rtol=1e-5)
  # Ratios 1.5 -> 1.28, 1, 0.5 on the right; 0.5 -> 0.8, 1.1, 1.5 on the wrong; the mean over six tokens.
  value, _ = jax.jit(algorithm.loss)(logp=NEW, logp_old=OLD, advantages=advantages, mask=MASK)
  by_hand = -((1.28 * 0.5 + 0.65 + 0.5 * 0.8) / p - (0.8 * 0.55 + 1.1 * 0.65 + 1.5 * 0.75) / m) / 6
  np.testing.assert_allclose(value, by_hand, rtol=1e-5)


def test_grpo_s_by_hand():
  algorithm = make("grpo_s", beta2=0.3, beta1=1.0)
  entropy = jnp.asarray([[[1.0, 2.0], [0.5, 7.0], [0.25, 0.75], [0.25, 7.0]]])
  advantages = jax.jit(algorithm.advantages)(entropy=entropy, mask=MASK, correct=CORRECT, reward=REWARD)
  # H^ = 1.5, 0.5: shares 3/2, 1/2. H^ = 0.5, 0.25: 1/H = 2, 4: shares 2/3, 4/3. R+ = 1.45, 1.15, 0, 0; R- = 0, 0, -1.2, -1.4.
  p, m = (1.735 / 4) ** 0.5, (1.71 / 4) ** 0.5
  np.testing.assert_allclose(advantages, [[[0.8 / p, 0.8 / p], [0.5 / p, 0], [-0.55 / m, -0.55 / m], [-0.75 / m, 0]]], rtol=1e-5)
  # w^ = 1.25, 0.5 on the right, both held by nothing; 0.8 and 1.5 on the wrong; the mean over four completions.
  value, _ = jax.jit(algorithm.loss)(logp=NEW, logp_old=OLD, advantages=advantages, mask=MASK)
  np.testing.assert_allclose(value, -((1.25 * 0.8 + 0.5 * 0.5) / p - (0.8 * 0.55 + 1.5 * 0.75) / m) / 4, rtol=1e-5)


def test_dapo_by_hand():
  algorithm = make("dapo")
  assert algorithm.recipe.rewards == (-1.0, 1.0)
  reward, penalty = jnp.where(CORRECT, 1.0, -1.0), jnp.asarray([[-0.5, 0.0, 0.0, 0.0]])
  advantages = jax.jit(algorithm.advantages)(entropy=jnp.zeros(MASK.shape), mask=MASK, correct=CORRECT, reward=reward, penalty=penalty)
  # 0.5, 1, -1, -1: mean -0.125, variance 3.1875 / 4.
  s = (3.1875 / 4) ** 0.5
  np.testing.assert_allclose(advantages, [[[0.625 / s] * 2, [1.125 / s, 0], [-0.875 / s] * 2, [-0.875 / s, 0]]], rtol=1e-5)
  value, _ = jax.jit(algorithm.loss)(logp=NEW, logp_old=OLD, advantages=advantages, mask=MASK)
  by_hand = -(0.625 * (1.28 + 1.0) + 1.125 * 0.5 - 0.875 * (0.8 + 1.1 + 1.5)) / s / 6
  np.testing.assert_allclose(value, by_hand, rtol=1e-5)


def test_grpo_by_hand():
  algorithm = make("grpo")
  assert algorithm.recipe.rewards == (0.0, 1.0)
  advantages = jax.jit(algorithm.advantages)(entropy=jnp.zeros(MASK.shape), mask=MASK, correct=CORRECT, reward=REWARD)
  np.testing.assert_allclose(advantages, [[[1, 1], [1, 0], [-1, -1], [-1, 0]]], rtol=1e-6)
  # Means of the completions: (1.2 + 1) / 2, 0.5, -(0.8 + 1.1) / 2, -1.5.
  value, _ = jax.jit(algorithm.loss)(logp=NEW, logp_old=OLD, advantages=advantages, mask=MASK)
  np.testing.assert_allclose(value, -(1.1 + 0.5 - 0.95 - 1.5) / 4, rtol=1e-5)


# --- against the slow loops ---

@pytest.mark.parametrize("sign_guard", [False, True])
@pytest.mark.parametrize("norm_scope", ["batch", "group"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("compare", ["position", "sequence", "matrix"])
def test_gtpo_against_the_slow_loop(compare, scope, norm_scope, sign_guard):
  batch = random_batch(11)
  settings = {"alpha1": 0.8, "alpha2": 0.4, "compare": compare, "scope": scope, "norm_scope": norm_scope, "h_floor": 0.05,
              "sign_guard": sign_guard}
  got = make("gtpo", **settings).advantages(**arrays(batch))
  np.testing.assert_allclose(got, gtpo_advantages(batch, **settings), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("norm_scope", ["batch", "group"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("sign_guard", [False, True])
def test_grpo_s_against_the_slow_loop(sign_guard, scope, norm_scope, mean):
  batch = random_batch(12)
  settings = {"beta1": 0.8, "beta2": 0.4, "scope": scope, "norm_scope": norm_scope, "h_floor": 0.05, "mean": mean,
              "sign_guard": sign_guard}
  got = make("grpo_s", **settings).advantages(**arrays(batch))
  np.testing.assert_allclose(got, grpo_s_advantages(batch, **settings), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "contrast"), [("dapo", True), ("grpo", False)])
def test_the_baselines_against_the_slow_loop(name, contrast):
  batch = random_batch(13)
  got = make(name).advantages(**arrays(batch))
  np.testing.assert_allclose(got, group_zscore_advantages(batch, contrast=contrast), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("defaults", ["gtpo", "grpo_s"])
def test_the_published_settings_against_the_slow_loop(defaults):
  batch, slow = random_batch(14), {"gtpo": gtpo_advantages, "grpo_s": grpo_s_advantages}[defaults]
  settings = {key: value for key, value in RECIPES[defaults].settings.items() if key not in ("eps_low", "eps_high", "ratio")}
  np.testing.assert_allclose(make(defaults).advantages(**arrays(batch)), slow(batch, **settings), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "overrides", "ratio", "average"), [
    ("gtpo", {}, "token", "token"),
    ("grpo_s", {}, "arithmetic", "completion"),
    ("grpo_s", {"ratio": "geometric"}, "geometric", "completion"),
    ("dapo", {"eps_low": 0.1, "eps_high": 0.4}, "token", "token"),
    ("grpo", {}, "token", "completion"),
])
def test_loss_and_gradient_against_the_slow_loop(name, overrides, ratio, average):
  algorithm, batch = make(name, **overrides), random_batch(15)
  x = arrays(batch)
  mask, advantages = algorithm.loss_mask(x["mask"], x["correct"]), algorithm.advantages(**x)
  logp, old, _ = random_policies(16, batch["mask"], spread=0.3)
  kept = np.asarray(mask)
  slow = lambda logp: loss(logp, old, np.asarray(advantages), kept, ratio=ratio, average=average,
                           eps_low=algorithm.settings.eps_low, eps_high=algorithm.settings.eps_high)
  value = lambda logp: algorithm.loss(logp=logp, logp_old=jnp.asarray(old), advantages=advantages, mask=mask)[0]
  got, grad = jax.jit(jax.value_and_grad(value))(jnp.asarray(logp))
  np.testing.assert_allclose(got, slow(logp), rtol=1e-5, atol=1e-6)
  expected = numeric_gradient(slow, logp, list(zip(*np.nonzero(kept), strict=True)))
  np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
  assert np.abs(expected).max() > 0.01


def test_loss_mask_clears_the_groups_without_contrast():
  batch = random_batch(17)
  x = arrays(batch)
  for name in ("gtpo", "grpo_s", "dapo"):
    kept = np.asarray(make(name).loss_mask(x["mask"], x["correct"]))
    expected = batch["mask"].copy()
    expected[[i for i in range(len(expected)) if i not in informative(batch["correct"])]] = False
    np.testing.assert_array_equal(kept, expected)
  np.testing.assert_array_equal(make("grpo").loss_mask(x["mask"], x["correct"]), batch["mask"])
