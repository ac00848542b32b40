"""Laws that hold for every recipe on any data."""

import jax
import numpy as np
import pytest
from recipe_cases import (
  CONTRAST,
  NAMES,
  WITHOUT_BASELINE,
  ZERO_WITHOUT_CONTRAST,
  arrays,
  corrections,
  random_batch,
  random_policies,
  step,
  strong,
)
from slow_reference import SEQUENCE_LEVEL, kept_groups

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.loss import LOSS_AGGREGATIONS


def policies_of(batch, seed=0):
  return random_policies(seed, batch["mask"])


def run(algorithm, batch, policies):
  return jax.tree.map(np.asarray, step(algorithm, arrays(batch), arrays(policies)))


def rows(tree, keep):
  return jax.tree.map(lambda x: x[keep], tree)


def assert_same(got, expected, exactly=False):
  """Compares two results of `step`."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  leaves = dict(jax.tree_util.tree_leaves_with_path(expected))
  for path, value in jax.tree_util.tree_leaves_with_path(got):
    if exactly:
      np.testing.assert_array_equal(value, leaves[path], err_msg=str(path))
    elif "residual" not in str(path):  # the residual is only rounding error
      np.testing.assert_allclose(value, leaves[path], rtol=1e-5, atol=2e-6, err_msg=str(path))


# --- groups without contrast ---


@pytest.mark.parametrize("name", CONTRAST)
@pytest.mark.some(4)
def test_groups_without_contrast_have_no_effect(name):
  """The loss, its gradient and every metric are the same without them."""
  algorithm = strong(name, **corrections(name))
  batch = random_batch(4, name)
  keep = kept_groups(name, batch)
  policies = policies_of(batch)
  whole = run(algorithm, batch, policies)
  part = run(algorithm, rows(batch, keep), rows(policies, keep))
  removed = np.setdiff1d(np.arange(len(batch["correct"])), keep)
  per_token = ["advantages", "mask", "weights", "grad"]
  for key in per_token + ["selected"] * algorithm.recipe.selects:
    assert not whole[key][removed].any()
    whole[key] = whole[key][keep]
  assert_same(whole, part)
  assert np.abs(whole["grad"]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_which_recipes_learn_from_groups_without_contrast(name):
  """Such a group's penalties can differ even if its rewards do not."""
  batch = random_batch(5, name)
  advantages = run(strong(name, **corrections(name)), batch, policies_of(batch))["advantages"]
  assert advantages[:2].any() == (name not in CONTRAST + ZERO_WITHOUT_CONTRAST)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_BASELINE])
def test_a_batch_without_any_contrast_teaches_nothing(name):
  """The reference is the policy itself, so that only the advantages could teach."""
  batch = random_batch(4, name)
  policies = policies_of(batch)
  policies["log_probs_reference"] = policies["log_probs"]
  for verdict in (True, False):
    same = {
      "correct": np.full_like(batch["correct"], verdict),
      "reward": np.full_like(batch["reward"], 0.3),
      "penalty": np.zeros_like(batch["penalty"]),
    }
    if "parts" in batch:
      same["parts"] = np.full_like(batch["parts"], 0.3)
    if "turn_reward" in batch:
      same["turn_reward"] = np.zeros_like(batch["turn_reward"])
    got = run(strong(name, **corrections(name)), batch | same, policies)
    assert got["loss"] == 0 and not got["grad"].any() and not got["advantages"].any()


PER_TOKEN = ("entropy", "divergence", "score_norms", "value_gains")


# --- padding, order and the unit of entropy have no effect ---


@pytest.mark.parametrize("name", NAMES)
def test_padding_has_no_effect(name):
  algorithm = strong(name, **corrections(name))
  batch = random_batch(9, name)
  policies = policies_of(batch)
  clean = run(algorithm, batch, policies)
  assert np.abs(clean["grad"]).max() > 1e-3
  for garbage in (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0):
    fill = lambda x, garbage=garbage: np.where(batch["mask"], x, np.float32(garbage))
    filled = {key: fill(x) if key in PER_TOKEN else x for key, x in batch.items()}
    got = run(algorithm, filled, jax.tree.map(fill, policies))
    assert_same(got, clean, exactly=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_reward_of_an_uncounted_completion_has_no_effect(name):
  algorithm = strong(name, **corrections(name))
  batch = random_batch(9, name)
  absent = ~batch["mask"].any(-1)
  assert absent.sum() == 1
  clean = run(algorithm, batch, policies_of(batch))
  for garbage in (np.nan, 1e30):
    fill = lambda x, garbage=garbage: np.where(absent, np.float32(garbage), x)
    changed = {
      "reward": fill(batch["reward"]),
      "penalty": fill(batch["penalty"]),
      "correct": batch["correct"] ^ absent,
    }
    if "parts" in batch:
      changed["parts"] = np.where(absent[..., None], np.float32(garbage), batch["parts"])
    assert_same(run(algorithm, batch | changed, policies_of(batch)), clean, exactly=True)


# clip_cov draws its tokens at random; test_selection.py tests how many.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "clip_cov"])
def test_the_order_of_prompts_and_completions_has_no_effect(name):
  algorithm = strong(name, **corrections(name))
  batch = random_batch(11, name)
  policies = policies_of(batch)
  rng = np.random.default_rng(11)
  n, g, _ = batch["mask"].shape
  prompts = rng.permutation(n)[:, None]
  completions = rng.permuted(np.tile(np.arange(g), (n, 1)), axis=1)
  shuffle = lambda x: x[prompts, completions] if x.shape[:2] == (n, g) else x  # part_weights
  shuffled = lambda tree: jax.tree.map(shuffle, tree)
  got = run(algorithm, shuffled(batch), shuffled(policies))
  assert_same(got, shuffled(run(algorithm, batch, policies)))


SCALES = (0.5, 3.0, 1 / np.log(2))  # the last: nats to bits


# Their shares are those of H alone, so no floor makes a unit of entropy matter.
WITHOUT_FLOOR = ("gtpo_v1", "gtpo_v1_clipped", "grpo_s_v1", "dapo_forking")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "entropy_advantage"])
@pytest.mark.some(4, slow=9)
def test_the_unit_of_entropy_has_no_effect(name):
  """H is compared only with other H, and 1/H, as long as none is at the floor, with other 1/H."""
  batch = random_batch(12, name)  # some entropies are 0
  scales = (*SCALES, 1e-6)
  if name not in WITHOUT_FLOOR:
    batch["entropy"] = np.maximum(batch["entropy"], 0.05)
    scales = SCALES
  means = ("arithmetic", "geometric") if name in SEQUENCE_LEVEL else (None,)
  for mean in means:
    algorithm = strong(name, **({"mean": mean} if mean else {}))
    expected = algorithm.advantages(**arrays(batch))
    expected_mask = algorithm.loss_mask(**arrays(batch))
    for scale in scales:
      scaled = arrays(batch | {"entropy": np.float32(scale) * batch["entropy"]})
      np.testing.assert_allclose(algorithm.advantages(**scaled), expected, rtol=1e-5, atol=5e-6)
      np.testing.assert_array_equal(algorithm.loss_mask(**scaled), expected_mask)


# --- compiled, and in parts ---


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_token_weights_cover_the_loss_mask(name, aggregation):
  algorithm = make(name, loss_aggregation=aggregation)
  batch = arrays(random_batch(12, name))
  mask = algorithm.loss_mask(**batch)
  guided = batch.get("guided")
  weights = np.asarray(algorithm.token_weights(mask, batch["correct"], guided), np.float64)
  if aggregation != "constant":
    # The groups that the guide rescued weigh lambda_zero in total.
    total = 1 if guided is None else 1 + algorithm.settings.lambda_zero
    np.testing.assert_allclose(weights.sum(), total, rtol=1e-6)
  assert not weights[~np.asarray(mask)].any() and (weights[np.asarray(mask)] > 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(4, slow=9)
def test_the_losses_of_the_parts_add_up_to_the_whole(name):
  algorithm = strong(name, **corrections(name))
  batch = random_batch(13, name)
  policies = policies_of(batch)
  whole = run(algorithm, batch, policies)

  def part_loss(log_probs, part):
    return algorithm.loss(**part | {"log_probs": log_probs})[0]

  computed = ("advantages", "mask", "weights", "selected")
  everything = policies | {key: whole[key] for key in computed if key in whole}
  everything["guided"] = batch.get("guided")
  loss_and_grad = jax.jit(jax.value_and_grad(part_loss))
  loss = 0.0
  grad = np.zeros_like(whole["grad"])
  for i in range(len(batch["mask"])):  # one prompt at a time
    part = arrays(rows(everything, slice(i, i + 1)))
    value, grad[i : i + 1] = loss_and_grad(part["log_probs"], part)
    loss += float(value)
  np.testing.assert_allclose(loss, whole["loss"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(grad, whole["grad"], rtol=1e-6, atol=1e-8)
  assert np.abs(grad).max() > 1e-3
