"""Hypothesis searches for a batch on which some recipe gives NaN or infinity."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from recipe_cases import (
  NAMES,
  arrays,
  corrections,
  has_guide,
  option_id,
  random_batch,
  random_needs,
  random_policies,
  step,
  strong,
)

from gtpo_jax.algorithms import RECIPES, make
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import LARGEST, SMALLEST

N = 7
G = 5
T = 4
ENTROPIES = np.asarray([0.0, 1e-30, 1e-6, 0.5, 3.0, 12.0], np.float32)
LOG_RATIOS = np.asarray([0.0, 1e-4, 0.3, -0.3, 1e4, -1e4, 25.0], np.float32)
OLD_LOG_PROBS = np.asarray([0.0, -1e-6, -2.0, -40.0, -1e4], np.float32)
PENALTIES = np.asarray([0.0, -0.5, -1.0], np.float32)
PADDING = np.asarray([0.0, 1e30, -1e30, np.nan, np.inf], np.float32)
VERDICTS = np.asarray(
  [
    [1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0],
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 1],
    [1, 1, 1, 0, 0],
    [0, 1, 1, 1, 1],
  ],
  bool,
)

OPTIONS = [
  ("gtpo", {"compare": "matrix", "scope": "batch", "norm_scope": "group", "sign_guard": True}),
  ("gtpo_v2", {"compare": "sequence", "norm_scope": "group", "loss_aggregation": "group"}),
  ("gtpo_v1_clipped", {"compare": "matrix", "scope": "batch", "kappa": 0.0}),
  ("grpo_s", {"mean": "geometric", "ratio": "geometric", "scope": "batch", "norm_scope": "batch"}),
  ("grpo_s_v2", {"mean": "geometric", "loss_aggregation": "token"}),
  ("gspo", {"ratio": "arithmetic", "loss_aggregation": "group"}),
  ("dapo_mixed", {"loss_aggregation": "completion", "lambda_zero": 0.0}),
  ("dapo_forking", {"forking_share": 1.0, "loss_aggregation": "constant"}),
]


def choices(values, shape):
  """Arrays of `shape` with entries from `values`."""
  indices = hnp.arrays(np.int8, shape, elements=st.integers(0, len(values) - 1))
  return indices.map(lambda i: values[i])


@st.composite
def batches(draw, guided):
  """A batch and its policies. Completions of length 0 do not count; a group may have no others."""
  lengths = draw(hnp.arrays(np.int8, (N, G), elements=st.sampled_from([0, 1, 1, 2, 3, 4])))
  mask = np.arange(T) < lengths[..., None]
  correct = np.stack([VERDICTS[draw(st.integers(0, len(VERDICTS) - 1))] for _ in range(N)])
  padding = draw(st.sampled_from(PADDING))
  wrong, right = draw(st.sampled_from([(0, 1), (-1, 1), (1, 1), (-1e4, 1e4)]))
  fill = lambda x: np.where(mask, x, padding).astype(np.float32)
  penalty = draw(choices(PENALTIES, (N, G)))
  batch = {
    "entropy": fill(draw(choices(ENTROPIES, (N, G, T)))),
    "mask": mask,
    "correct": correct,
    "reward": np.where(correct, np.float32(right), np.float32(wrong)),
    "penalty": penalty,
  }
  if guided:
    batch["guided"] = np.broadcast_to(np.arange(G) >= G - 2, (N, G))
  old = draw(choices(OLD_LOG_PROBS, (N, G, T)))
  return batch, {
    "log_probs": fill(old + draw(choices(LOG_RATIOS, (N, G, T)))),
    "log_probs_old": fill(old),
    "log_probs_sampler": fill(old - draw(choices(LOG_RATIOS, (N, G, T)))),
    "log_probs_reference": fill(0 * old - 1),
  }


@pytest.mark.parametrize(
  ("name", "options"), [(name, {}) for name in NAMES] + OPTIONS, ids=option_id
)
@pytest.mark.some(9, slow=18)
def test_nothing_is_nan_or_infinite(name, options):
  algorithm = strong(name, **corrections(name) | options)

  @settings(max_examples=15, deadline=None, derandomize=True, database=None)
  @given(batches(guided=has_guide(name)))
  def check(case):
    batch, policies = case
    batch = batch | random_needs(np.random.default_rng(0), name, batch)
    got = jax.tree.map(np.asarray, step(algorithm, arrays(batch), arrays(policies)))
    guided = batch.get("guided", np.zeros((N, G), bool))[..., None]
    metrics = got.pop("metrics")
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
      assert np.isfinite(leaf).all(), path
    for key, value in metrics.items():  # means over no tokens have no value
      averaged = got["mask"] & (guided if key == "clip/guide" else ~guided)
      assert np.isfinite(value) or not averaged.any(), key
    assert not (got["mask"] & ~batch["mask"]).any()
    for per_token in ("advantages", "weights", "grad"):
      assert not got[per_token][~got["mask"]].any()
    for key, value in {**metrics, **got["credit"]}.items():
      if key.endswith("residual"):
        assert value < 1e-4
      if key.startswith(("clip/", "credit/p")):  # a share
        assert 0 <= value <= 1.00001 or np.isnan(value)

  check()


@pytest.mark.manual
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_largest_settings_have_an_effect_that_is_finite(name):
  batch = random_batch(1, name)
  policies = random_policies(1, batch["mask"])
  for key, default in RECIPES[name].settings.items():
    if not isinstance(default, float) or key.startswith("entropy_"):  # terms of the head
      continue
    for value in (SMALLEST, LARGEST):
      try:
        algorithm = make(name, **corrections(name) | {key: value})
      except UserError:
        continue
      got = step(algorithm, arrays(batch), arrays(policies))
      for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        assert np.isfinite(leaf).all(), (key, value, path)
      assert got["advantages"].any(), (key, value)
