"""What the gradients of a probe say: noise, alignment, intervals, Holm's procedure, the verdict."""

import math

import numpy as np
import pytest

from gtpo_jax.cli.probing.statistics import (
  Moments,
  compare,
  holm,
  mean_interval,
  noise_interval,
  p_value,
  result_of_arm,
  verdict,
)


def test_intervals_and_p_values_by_hand():
  # mean 2, standard deviation 1, t of 2 degrees of freedom 4.302653
  mean, low, high = mean_interval([1.0, 2.0, 3.0])
  assert (mean, low, high) == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138))
  assert p_value([1.0, 2.0, 3.0]) == pytest.approx(0.0741799, rel=1e-5)
  assert p_value([0.0, 0.0]) == 1 and p_value([0.5, 0.5]) == 0


def test_holms_procedure_by_hand():
  assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
  assert holm({"a": 0.4, "b": 0.9}) == pytest.approx({"a": 0.8, "b": 0.9})


def test_noise_is_the_variance_over_the_squared_mean():
  rng = np.random.default_rng(0)
  vectors = np.array([3.0, 4.0, 0.0]) + rng.normal(size=(400, 3))
  moments = Moments()
  for vector in vectors:
    moments.add(vector)
  np.testing.assert_allclose(moments.mean, vectors.mean(0))
  deviations = ((vectors - vectors.mean(0)) ** 2).sum() / 399
  signal = (vectors.mean(0) ** 2).sum() - deviations / 400
  assert moments.signal == pytest.approx(signal)
  assert moments.noise() == pytest.approx(deviations / signal)
  estimate, low, high = noise_interval(vectors @ vectors.T)
  assert estimate == pytest.approx(moments.noise())
  assert low < 3 / 25 < high and high - low < 0.05


def test_the_references_own_estimator_has_alignment_one_and_cosine_one_without_noise():
  rng = np.random.default_rng(1)
  true = rng.normal(size=50)
  for noise, cosine in ((3.0, 0.3), (1e-4, 1.0)):
    draw = lambda count, noise=noise: true + noise * rng.normal(size=(count, 50))
    reference = Moments()
    for vector in draw(4000):
      reference.add(vector)
    found = result_of_arm(draw(60).astype(np.float32), reference, np.ones((60, 2)))
    estimate, low, high = found["alignment"]
    assert low < 1 < high and abs(estimate - 1) < 0.1
    assert found["cosine"][0] == pytest.approx(cosine, abs=0.05)
    other = result_of_arm(draw(60) @ np.diag(rng.choice([-1, 1], 50)), reference, np.ones((60, 2)))
    assert other["alignment"][2] < 1


def arm(*cosines, groups=0.5):
  return {"cosines": list(cosines), "groups": (groups, groups, groups)}


def test_the_verdict_names_a_winner_only_with_its_interval():
  arms = {"grpo": arm(0.30, 0.32, 0.28, 0.31), "gtpo": arm(0.31, 0.31, 0.29, 0.30)}
  compare(arms, " shuffled")
  assert arms["gtpo"]["p_holm"] == pytest.approx(1)
  assert verdict(arms, 4).endswith("start with grpo")
  assert verdict(arms, 4).startswith("no arm differs from grpo (4 batches")

  arms["worse"] = arm(0.20, 0.23, 0.18, 0.22)
  arms["worse shuffled"] = arm(0.21, 0.22, 0.18, 0.22)
  compare(arms, " shuffled")
  text = verdict(arms, 4)
  assert "worse is worse than grpo: its cosine differs by -0.095 [-0.104, -0.086]" in text
  assert text.endswith("4 batches: start with grpo")
  assert arms["worse"]["over_control"][0] == pytest.approx(0.0)

  arms["better"] = arm(0.40, 0.43, 0.38, 0.42)
  compare(arms, " shuffled")
  assert verdict(arms, 4).endswith("start with better")
  without = {name: {**x, "groups": (0.0, 0.0, 0.0)} for name, x in arms.items()}
  assert verdict(without, 4).startswith("no group carried credit")
  assert not math.isnan(arms["better"]["p_holm"])
