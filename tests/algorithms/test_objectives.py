import jax
import numpy as np
import pytest

from gtpo_jax.algorithms.objectives import clipped_objective
from gtpo_jax.algorithms.settings import Settings

PLAIN = Settings(eps_low=0.2, eps_high=0.28, dual_clip=0.0)
DUAL = Settings(eps_low=0.2, eps_high=0.28, dual_clip=3.0)
VALUE_AND_SLOPE = jax.jit(
  jax.value_and_grad(clipped_objective, has_aux=True), static_argnames="settings"
)


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope", "clipped"),
  [
    (1.0, 2.0, 2.0, 2.0, None),  # inside
    (1.5, 2.0, 2.56, 0.0, "clip/high"),  # above, A > 0: clipped at 1.28
    (1.5, -2.0, -3.0, -2.0, None),  # above, A < 0: not clipped
    (0.5, 2.0, 1.0, 2.0, None),  # below, A > 0: not clipped
    (0.5, -2.0, -1.6, 0.0, "clip/low"),  # below, A < 0: clipped at 0.8
    (1.25, 2.0, 2.5, 2.0, None),  # the upper bound is eps_high's
    (0.75, -2.0, -1.6, 0.0, "clip/low"),  # the lower bound is eps_low's
    (3.0, 0.0, 0.0, 0.0, None),
  ],
)
def test_clipped_objective_by_hand(ratio, advantage, objective, slope, clipped):
  (value, flags), grad = VALUE_AND_SLOPE(ratio, advantage, settings=PLAIN)
  np.testing.assert_allclose([value, grad], [objective, slope], rtol=1e-6)
  assert [name for name, flag in flags.items() if flag] == ([clipped] if clipped else [])


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope"),
  [
    (5.0, -2.0, -6.0, 0.0),  # bounded by 3 A
    (2.5, -2.0, -5.0, -2.0),  # not that far
    (0.5, -2.0, -1.6, 0.0),
    (5.0, 2.0, 2.56, 0.0),  # no change for A > 0
    (0.5, 2.0, 1.0, 2.0),
    (5.0, 0.0, 0.0, 0.0),
  ],
)
def test_dual_clip_by_hand(ratio, advantage, objective, slope):
  (value, _), grad = VALUE_AND_SLOPE(ratio, advantage, settings=DUAL)
  np.testing.assert_allclose([value, grad], [objective, slope], rtol=1e-6)
