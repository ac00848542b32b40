"""Credit where a completion has tokens between those that the policy drew, such as tool results.

test_against_slow_loops.py compares it with loops.
"""

import jax
import numpy as np
import pytest
from recipe_cases import BONUS, COMPARISONS, arrays, random_batch, with_gaps

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.relative_entropy import COMPARE, relative_entropy, turn_places
from gtpo_jax.algorithms.shaping import EntropyShaping


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_gaps_and_what_is_in_them_do_not_change_the_credit(name):
  batch = random_batch(5)
  spread, places = with_gaps(batch, seed=6)
  for compare, scope in COMPARISONS if name == "gtpo" else [(None, "group")]:
    options = {"compare": compare} if compare else {}
    algorithm = make(name, scope=scope, **{BONUS[name]: 0.7}, **options)
    credit = jax.jit(lambda x, a=algorithm: (a.advantages(**x), a.credit_metrics(**x)))
    expected, expected_metrics = credit(arrays(batch))
    got, metrics = credit(arrays(spread))
    got = np.take_along_axis(np.asarray(got), places, -1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    for key, value in expected_metrics.items():
      np.testing.assert_allclose(metrics[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gtpo", "gtpo_v1", "gtpo_v1_clipped", "gtpo_v2"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.some(3)
def test_without_gaps_the_result_is_that_of_the_columns_bit_for_bit(name, scope):
  algorithm = make(name, scope=scope)
  shaping = algorithm.recipe.shaping
  _, units = algorithm.shaped(**arrays(random_batch(8)))
  by_count = jax.jit(shaping)(units)
  by_column = jax.jit(lambda x: EntropyShaping.__call__(shaping, x))(units)
  jax.tree.map(np.testing.assert_array_equal, by_count, by_column)


def test_places_in_turns_by_hand():
  mask = np.array([[[1, 1, 0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0, 0, 0]]], bool)
  places = turn_places(mask)[0]
  assert places[0][mask[0, 0]].tolist() == [0, 1, 8, 9, 10]
  assert places[1][mask[0, 1]].tolist() == [0, 8]


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_turns_without_gaps_are_positions(scope):
  x = np.asarray(random_batch(8)["entropy"])
  mask = random_batch(8)["mask"]
  mask = np.sort(mask, -1)[..., ::-1]
  expected = relative_entropy(x, mask, COMPARE["position", scope])
  got = relative_entropy(x, mask, COMPARE["turn", scope])
  np.testing.assert_allclose(got, expected, rtol=1e-5)
