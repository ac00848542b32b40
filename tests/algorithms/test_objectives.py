"""Each objective by hand: its value, its slope in the new log-prob, and its clip metrics."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.objectives import Aspo, Clip, ObjectiveInputs

PLAIN = Clip(eps_low=0.2, eps_high=0.28, dual_clip=0.0)
DUAL = Clip(eps_low=0.2, eps_high=0.28, dual_clip=3.0)


def evaluate(function, ratio, advantage, old=-1.0, selected=False):
  """Returns the objective of one token, its derivative in log pi, and the metrics that count it."""
  of_token = lambda x: jnp.asarray(x).reshape(1, 1, 1)

  def value(log_prob):
    inputs = ObjectiveInputs(
      jnp.exp(log_prob - old).reshape(1, 1, 1),
      log_prob.reshape(1, 1, 1),
      of_token(old),
      of_token(advantage),
      of_token(True),
      of_token(selected),
    )
    objective, flags = function(inputs)
    return objective.sum(), flags

  (objective, flags), slope = jax.value_and_grad(value, has_aux=True)(old + jnp.log(ratio))
  return float(objective), float(slope), {key for key, flag in flags.items() if flag.any()}


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope", "clipped"),
  [
    (1.0, 2.0, 2.0, 2.0, set()),  # inside
    (1.5, 2.0, 2.56, 0.0, {"clip/high"}),  # above, A > 0: clipped at 1.28
    (1.5, -2.0, -3.0, -2.0, set()),  # above, A < 0: not clipped
    (0.5, 2.0, 1.0, 2.0, set()),  # below, A > 0: not clipped
    (0.5, -2.0, -1.6, 0.0, {"clip/low"}),  # below, A < 0: clipped at 0.8
    (1.25, 2.0, 2.5, 2.0, set()),  # below 1 + eps_high
    (0.75, -2.0, -1.6, 0.0, {"clip/low"}),  # below 1 - eps_low
    (3.0, 0.0, 0.0, 0.0, set()),
  ],
)
def test_clip(ratio, advantage, objective, slope, clipped):
  """The slope is given in the ratio; in log pi it is r times as large."""
  got, grad, counted = evaluate(PLAIN, ratio, advantage)
  np.testing.assert_allclose([got, grad], [objective, ratio * slope], rtol=1e-5)
  assert counted == clipped


@pytest.mark.parametrize(
  ("ratio", "advantage", "slope", "counted"),
  [
    (1.0, 2.0, 2.0, set()),
    (0.5, 2.0, 4.0, set()),  # A > 0: 2 / 0.5
    (0.25, 2.0, 6.0, {"clip/cap"}),  # 1 / 0.25, at most 3
    (1.1, 2.2, 2.0, set()),
    (1.5, 2.0, 0.0, {"clip/high"}),
    (0.9, -2.0, -1.8, set()),  # A < 0: as PPO
    (0.5, -2.0, 0.0, {"clip/low"}),
    (2.0, -2.0, -4.0, set()),
    (5.0, -2.0, -6.0, {"clip/cap"}),  # a dual clip that keeps the gradient
  ],
)
def test_aspo(ratio, advantage, slope, counted):
  """The slope is given in log pi; the objective is the slope times log pi, without a gradient."""
  got, grad, flags = evaluate(Aspo(), ratio, advantage)
  np.testing.assert_allclose([got, grad], [slope * (math.log(ratio) - 1), slope], rtol=1e-5)
  assert flags == counted


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope"),
  [
    (5.0, -2.0, -6.0, 0.0),  # bounded by 3 A
    (2.5, -2.0, -5.0, -2.0),  # above the bound
    (0.5, -2.0, -1.6, 0.0),
    (5.0, 2.0, 2.56, 0.0),  # no change for A > 0
    (0.5, 2.0, 1.0, 2.0),
    (5.0, 0.0, 0.0, 0.0),
  ],
)
def test_dual_clip(ratio, advantage, objective, slope):
  got, grad, _ = evaluate(DUAL, ratio, advantage)
  np.testing.assert_allclose([got, grad], [objective, ratio * slope], rtol=1e-5)


@pytest.mark.parametrize(
  ("ratio", "advantage", "weight", "counted"),
  [
    (1.0, 2.0, 1.0, set()),
    (4.0, 2.0, 4.0, set()),
    (8.0, 2.0, 5.0, {"clip/high"}),  # 1 + eps_high
    (8.0, -2.0, 5.0, {"clip/high"}),  # whatever the sign of A
    (1e-6, -2.0, 1e-6, set()),  # no lower bound
  ],
)
def test_cispo(ratio, advantage, weight, counted):
  """w A log pi with a constant weight: log pi is -1 + log r, and the slope is w A everywhere."""
  function = make("cispo").recipe.objective
  got, grad, flags = evaluate(function, ratio, advantage)
  expected = [weight * advantage * (math.log(ratio) - 1), weight * advantage]
  np.testing.assert_allclose([got, grad], expected, rtol=1e-5)
  assert flags == counted


def test_cispo_with_a_lower_bound():
  function = make("cispo", eps_low=0.2).recipe.objective
  got, grad, flags = evaluate(function, 0.5, 1.0)
  np.testing.assert_allclose([got, grad], [0.8 * (math.log(0.5) - 1), 0.8], rtol=1e-5)
  assert flags == {"clip/low"}


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope", "counted"),
  [
    (1.0, 2.0, 4.0, 2.0, set()),  # 4 sigmoid(0) A
    (1.0, -2.0, -2 / 1.05 * 2, -2.0, set()),  # tau is 1.05 if A < 0
    # sigmoid(2) = 0.880797; 4 s (1 - s) = 0.419974 < 1/2.
    (3.0, 1.0, 4 * 0.880797, 3 * 0.419974, {"clip/soft"}),
    # sigmoid(-0.525) = 0.371684; 4 s (1 - s) = 0.934140.
    (0.5, -1.0, -4 / 1.05 * 0.371684, -0.5 * 0.934140, set()),
  ],
)
def test_sapo(ratio, advantage, objective, slope, counted):
  got, grad, flags = evaluate(make("sapo").recipe.objective, ratio, advantage)
  np.testing.assert_allclose([got, grad], [objective, slope], rtol=1e-5)
  assert flags == counted


@pytest.mark.parametrize(
  ("ratio", "advantage", "old", "weight", "counted"),
  [
    (1.0, 2.0, -1.0, 1.0, set()),
    (1.5, 2.0, -1.0, 1.5, set()),  # pi rises from 0.368 to 0.552, by less than 0.2
    (1.6, 2.0, -1.0, 0.0, {"clip/high"}),  # to 0.589, by more
    (1.6, -2.0, -1.0, 1.6, set()),  # rises although A < 0
    (0.4, -2.0, -1.0, 0.0, {"clip/low"}),  # falls by 0.221
    (0.5, -2.0, -1.0, 0.5, set()),  # falls by 0.184
    (0.4, 2.0, -1.0, 0.4, set()),
    (50.0, 2.0, -9.0, 5.0, {"clip/cap"}),  # a rare token may change by any factor
  ],
)
def test_dppo(ratio, advantage, old, weight, counted):
  got, grad, flags = evaluate(make("dppo").recipe.objective, ratio, advantage, old=old)
  expected = [weight * advantage * (old + math.log(ratio)), weight * advantage]
  np.testing.assert_allclose([got, grad], expected, rtol=1e-5, atol=1e-6)
  assert flags == counted


def test_gmpo_on_a_completion():
  """Log-ratios 0.1, 0.9 and -0.9, bounded to +-0.4 in the direction of A."""
  log_ratio = jnp.asarray([[[0.1, 0.9, -0.9, 7.0]]])
  mask = jnp.asarray([[[True, True, True, False]]])
  gmpo = make("gmpo").recipe.objective

  def value(log_ratio, advantage):
    inputs = ObjectiveInputs(
      jnp.exp(log_ratio), log_ratio, 0 * log_ratio, advantage + 0 * log_ratio, mask
    )
    objective, flags = gmpo(inputs)
    return objective[0, 0, 0], (objective, flags)

  # A > 0: 0.1 + 0.4 - 0.9; the second token is clipped.
  (_, (objective, flags)), slope = jax.value_and_grad(value, has_aux=True)(log_ratio, 2.0)
  expected = 2 * math.exp((0.1 + 0.4 - 0.9) / 3)
  np.testing.assert_allclose(objective[mask], expected, rtol=1e-5)
  np.testing.assert_allclose(slope, [[[expected / 3, 0, expected / 3, 0]]], rtol=1e-5)
  assert (flags["clip/high"] & mask).tolist() == [[[False, True, False, False]]]
  # A < 0: 0.1 + 0.9 - 0.4; the third token is clipped.
  (got, (_, flags)), slope = jax.value_and_grad(value, has_aux=True)(log_ratio, -2.0)
  expected = -2 * math.exp((0.1 + 0.9 - 0.4) / 3)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  np.testing.assert_allclose(slope, [[[expected / 3, expected / 3, 0, 0]]], rtol=1e-5)
  assert flags["clip/low"].tolist() == [[[False, False, True, False]]]


@pytest.mark.parametrize("ratio", [1.1, 1.5])
def test_clip_cov_drops_the_selected_tokens(ratio):
  function = make("clip_cov").recipe.objective
  assert evaluate(function, ratio, 2.0, selected=True)[:2] == (0.0, 0.0)
  plain = Clip(eps_low=0.2, eps_high=0.2, dual_clip=0.0)
  assert evaluate(function, ratio, 2.0)[:2] == evaluate(plain, ratio, 2.0)[:2]


@pytest.mark.parametrize(
  ("ratio", "selected", "objective", "slope"),
  [
    (2.0, False, 6.0, 6.0),  # r A, never clipped
    (2.0, True, 6.0 - math.log(2), 5.0),
    (0.5, True, 1.5 - math.log(2), 2.5),
    (1.0, True, 3.0, 3.0),  # |log r| has no slope at r = 1
  ],
)
def test_kl_cov(ratio, selected, objective, slope):
  got = evaluate(make("kl_cov").recipe.objective, ratio, 3.0, selected=selected)
  np.testing.assert_allclose(got[:2], [objective, slope], rtol=1e-5)


def test_stare_multiplies_the_clipped_objective():
  function = make("stare").recipe.objective
  for ratio, advantage in ((1.1, 2.0), (1.5, 2.0), (0.5, -2.0)):
    expected = evaluate(PLAIN, ratio, advantage)
    got = evaluate(function, ratio, advantage, selected=True)
    np.testing.assert_allclose(got[:2], 1.1 * np.asarray(expected[:2]), rtol=1e-5)
    assert evaluate(function, ratio, advantage)[:2] == expected[:2]
