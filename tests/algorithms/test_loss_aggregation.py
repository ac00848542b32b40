import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms.loss import LOSS_AGGREGATIONS

AGGREGATIONS = {name: jax.jit(aggregate) for name, aggregate in LOSS_AGGREGATIONS.items()}

# Lengths 3, 1; 2, 0; 0, 0.
RAGGED = jnp.asarray([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], bool)


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    # Six tokens.
    ("token", [[[1 / 6] * 3, [1 / 6, 0, 0]], [[1 / 6, 1 / 6, 0], [0, 0, 0]]]),
    # Three completions with tokens.
    ("completion", [[[1 / 9] * 3, [1 / 3, 0, 0]], [[1 / 6, 1 / 6, 0], [0, 0, 0]]]),
    # Two groups with tokens: 4 and 2 of them.
    ("group", [[[1 / 8] * 3, [1 / 8, 0, 0]], [[1 / 4, 1 / 4, 0], [0, 0, 0]]]),
    # Six completions of at most 3 tokens.
    ("constant", [[[1 / 18] * 3, [1 / 18, 0, 0]], [[1 / 18, 1 / 18, 0], [0, 0, 0]]]),
  ],
)
def test_aggregations_by_hand(name, expected):
  np.testing.assert_allclose(AGGREGATIONS[name](RAGGED), [*expected, [[0] * 3] * 2], rtol=1e-6)
