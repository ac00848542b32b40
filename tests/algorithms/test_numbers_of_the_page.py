"""Asserts the numbers that docs/algorithms.md states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import OBJECTIVES, make, relative_entropy
from gtpo_jax.algorithms.advantages import zscore
from gtpo_jax.algorithms.ratios import geometric_sequence_ratio, sequence_ratio, token_ratio
from gtpo_jax.algorithms.relative_entropy import (
  completion_entropy,
  effective_participants,
  inverse_entropy,
)

pytestmark = pytest.mark.slow


def batch_of(right, lengths=32, group=16, steps=32, seed=0):
  """Returns groups with `right[i]` correct completions and entropies skewed as in language models.

  The entropies are 2 u^3 nats with u uniform.
  """
  H = 2 * np.random.default_rng(seed).random((len(right), group, steps)) ** 3
  mask = np.broadcast_to(np.arange(steps) < np.asarray(lengths)[..., None], H.shape)
  correct = np.arange(group) < np.asarray(right)[:, None]
  return {
    "entropy": H.astype(np.float32),
    "mask": mask,
    "correct": correct,
    "reward": correct.astype(np.float32),
  }


def test_on_the_first_update_no_clip_acts():
  gtpo = batch_of([5, 10])
  shape = gtpo["entropy"].shape
  log_probs_old = -np.random.default_rng(2).exponential(1.0, shape).astype(np.float32)
  log_probs = log_probs_old + 0.3 * np.random.default_rng(3).standard_normal(shape).astype(
    np.float32
  )
  acts = {}
  for objective in OBJECTIVES:
    algorithm = make("grpo" if objective == "gmpo" else "gtpo", objective=objective)
    inputs = {
      "log_probs_old": log_probs_old,
      "advantages": algorithm.advantages(**gtpo),
      "mask": algorithm.loss_mask(**gtpo),
    }
    selected = None
    if algorithm.recipe.selects:
      key = jax.random.key(0)
      selected = algorithm.select(log_probs=log_probs, entropy=gtpo["entropy"], key=key, **inputs)
    _, on_policy = algorithm.loss(log_probs=log_probs_old, selected=selected, **inputs)
    for bound in ("clip/low", "clip/high", "clip/cap", "clip/soft"):
      assert on_policy.get(bound, 0) == 0
    _, metrics = algorithm.loss(log_probs=log_probs, selected=selected, **inputs)
    acts[objective] = sum(float(x) for name, x in metrics.items() if name.startswith("clip/"))
  # These ratios are between 0.3 and 3 and do not reach the wide bounds of cispo and sapo.
  assert {objective for objective, share in acts.items() if share == 0} == {"cispo", "sapo"}


def test_shares_sum_to_the_size_of_their_comparison_set():
  """Correct completions of 4, 2 and 1 tokens and an incorrect one of 4, all with H = 1."""
  right = np.array([True, True, True, False])
  alive = np.arange(4) < np.array([4, 2, 1, 4])[:, None]  # bool[g, t]
  plus = alive & right[:, None]
  H = np.ones((4, 4), np.float32)
  shares = relative_entropy(jnp.asarray(H)[None], jnp.asarray(plus)[None], (1,))
  assert float(shares.sum()) == 7 == plus.sum()
  per_entropy = np.where(plus, H / np.where(plus, H, 0).sum(0), 0)
  assert np.isclose((right.sum() * per_entropy).sum(), 12)  # d_t counts those that have ended
  assert np.isclose((alive.sum(0) * per_entropy).sum(), 11)  # d_t counts incorrect ones


def test_zeros_of_the_other_side_stay_in():
  batch = batch_of([5, 10], lengths=np.random.default_rng(1).integers(8, 33, (2, 16)))
  plus = batch["mask"] & batch["correct"][..., None]
  minus = batch["mask"] & ~plus
  ours, separate = [], []
  for alpha2 in (0.01, 0.1, 10.0):
    algorithm = make("gtpo", alpha2=alpha2)
    A = np.asarray(algorithm.advantages(**batch))
    ours.append([A[plus].mean(), A[minus].mean(), A[plus].std()])
    shaped, _ = algorithm.shaped(**batch)
    each_side = zscore(shaped.plus, plus, (0, 1, 2)) + zscore(shaped.minus, minus, (0, 1, 2))
    separate.append(np.asarray(each_side))
    assert abs(separate[-1][plus].mean()) < 1e-5 and abs(separate[-1][minus].mean()) < 1e-5
  expected = [[1.011, -0.989, 0.021], [1.002, -0.972, 0.195], [0.593, -0.463, 1.152]]
  assert np.allclose(ours, expected, atol=1e-3)
  # The advantages do not change when alpha2 is a thousand times larger.
  assert np.allclose(separate[0], separate[2], atol=5e-3)


def test_h_floor_bounds_the_penalty():
  everyone = jnp.ones((1, 16, 1), bool)
  spread = jnp.asarray(np.geomspace(1e-4, 2, 16), jnp.float32)[None, :, None]
  one_sure = jnp.full((1, 16, 1), 0.5).at[0, 0, 0].set(1e-6)
  for h_floor, carried_by, largest in ((1e-8, 3.1, 0.99997), (1e-2, 9.8, 0.76923)):
    share = relative_entropy(inverse_entropy(spread, h_floor), everyone, (1,))
    assert round(16 * float(effective_participants(share, everyone, (1,))), 1) == carried_by
    share = relative_entropy(inverse_entropy(one_sure, h_floor), everyone, (1,))
    assert np.isclose(share.max() / 16, largest, atol=1e-5)


def test_signs_flip_when_almost_all_are_correct():
  def flips(name, right, **settings):
    batch = batch_of([right] * 2)
    A = np.asarray(make(name, **settings).advantages(**batch))
    return round((A[batch["correct"]] < 0).mean(), 2), round((A[~batch["correct"]] > 0).mean(), 2)

  assert flips("gtpo", 14) == (0, 0)
  assert flips("gtpo", 15) == (0.4, 0)
  assert flips("gtpo", 15, sign_guard=True) == (0, 0)
  assert flips("gtpo_v2", 8) == (0, 0.62)


def test_arithmetic_and_geometric_means_differ():
  two = jnp.asarray([[[0.01] * 9 + [2.0], [0.15] * 10]])
  mean = lambda kind: completion_entropy(two, two > 0, kind, 1e-2).squeeze().tolist()
  assert np.allclose(mean("arithmetic"), [0.209, 0.150], atol=1e-4)
  assert np.allclose(mean("geometric"), [0.0170, 0.150], atol=1e-4)


def test_the_gradient_of_a_sequence_level_ratio():
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    old = -2 * rng.random((1, 1, 6))
    new = old + 0.6 * rng.standard_normal((1, 1, 6))
    mask = np.arange(6)[None, None] < 5
    steps = 1e-6 * np.eye(6)[:, None]
    slope = {}
    for ratio in (sequence_ratio, geometric_sequence_ratio):
      value = lambda x, ratio=ratio: ratio(x, old, np.broadcast_to(mask, x.shape))[:, 0, 0]
      slope[ratio] = np.asarray(jax.grad(lambda x, value=value: value(x)[0])(jnp.asarray(new)))
      differences = (value(new + steps) - value(new - steps)) / 2e-6
      assert np.allclose(slope[ratio], differences, rtol=0, atol=1e-9)
    ratios = (token_ratio, sequence_ratio, geometric_sequence_ratio)
    w, arithmetic, geometric = (np.asarray(ratio(new, old, mask)) for ratio in ratios)
  assert np.allclose(slope[sequence_ratio], mask * w / 5, rtol=0, atol=1e-15)
  assert np.allclose(slope[geometric_sequence_ratio], mask * geometric / 5, rtol=0, atol=1e-15)
  assert np.isclose(abs(slope[sequence_ratio] - mask * arithmetic / 5).max(), 0.207, atol=1e-3)
  largest = [slope[sequence_ratio].max(), arithmetic.max(), geometric.max()]
  assert np.allclose(largest, [0.437, 1.153, 0.960], atol=1e-3)


def test_batch_normalisation_has_no_baseline_per_prompt():
  batch = batch_of([2, 8, 14])
  share_of_prompts = {}
  for norm_scope in ("batch", "group"):
    A = np.asarray(make("gtpo", norm_scope=norm_scope).advantages(**batch))
    share_of_prompts[norm_scope] = round(float((A.mean((1, 2)) ** 2).mean() / (A**2).mean()), 2)
  assert share_of_prompts == {"batch": 0.35, "group": 0.0}
