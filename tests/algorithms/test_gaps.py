"""Credit where a completion has tokens between those that the policy drew, such as tool results."""

import jax
import numpy as np
import pytest
from recipe_cases import BONUS, COMPARISONS, arrays, random_batch

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.relative_entropy import COMPARE, relative_entropy, turn_places
from gtpo_jax.algorithms.shaping import EntropyShaping


def with_gaps(batch, seed, t=11):
  """Returns `batch` with its tokens at random positions of longer completions, in their order."""
  rng = np.random.default_rng(seed)
  n, g, short = batch["mask"].shape
  places = np.stack([np.sort(rng.permutation(t)[:short]) for _ in range(n * g)])
  places = places.reshape(n, g, short)
  spread = dict(batch)
  for name, filler in (("mask", False), ("entropy", 7e5)):
    values = np.full((n, g, t), filler, batch[name].dtype)
    np.put_along_axis(values, places, batch[name], -1)
    spread[name] = values
  return spread, places


def slow_shares(entropy, side, mask, scope):
  """Returns entropies over the mean of those at the same count of drawn tokens, by loops."""
  n, g, t = mask.shape
  shares = np.zeros(mask.shape)
  count = lambda i, j, k: mask[i, j, : k + 1].sum()
  for i, j, k in np.argwhere(side):
    prompts = [i] if scope == "group" else range(n)
    compared = [
      float(entropy[a, b, c])
      for a in prompts
      for b in range(g)
      for c in range(t)
      if side[a, b, c] and count(a, b, c) == count(i, j, k)
    ]
    mean = np.mean(compared)
    shares[i, j, k] = entropy[i, j, k] / mean if mean > 0 else 1.0
  return shares


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_drawn_tokens_are_compared_by_their_count_as_in_a_slow_loop(scope):
  batch, _ = with_gaps(random_batch(3) | {"penalty": None}, seed=4)
  algorithm = make("gtpo", scope=scope, alpha2=0.7, contrast=False)
  shaped, _ = jax.jit(lambda x: algorithm.shaped(**x))(arrays(batch))
  mask, correct = batch["mask"], batch["correct"][..., None]
  assert (mask[..., 1:] & ~mask[..., :-1]).any()
  plus = slow_shares(batch["entropy"], mask & correct, mask, scope)
  expected = np.where(mask & correct, 1 + 0.7 * plus, 0)
  np.testing.assert_allclose(shaped.plus, expected, rtol=1e-5, atol=1e-6)
  inverse = 1 / np.maximum(batch["entropy"], 1e-2)
  minus = slow_shares(inverse, mask & ~correct, mask, scope)
  expected = np.where(mask & ~correct, -1 - 0.7 * minus, 0)
  np.testing.assert_allclose(shaped.minus, expected, rtol=1e-5, atol=1e-6)


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


def places_of(mask):
  """(turn, place in it) of each drawn token, by a loop."""
  places = {}
  for i, j in np.ndindex(mask.shape[:2]):
    turn = place = -1
    for k, drawn in enumerate(mask[i, j]):
      if drawn:
        begins = k == 0 or not mask[i, j, k - 1]
        turn, place = (turn + 1, 0) if begins else (turn, place + 1)
        places[i, j, k] = (turn, place)
  return places


def test_places_in_turns_by_hand():
  mask = np.array([[[1, 1, 0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0, 0, 0]]], bool)
  places = turn_places(mask)[0]
  assert places[0][mask[0, 0]].tolist() == [0, 1, 8, 9, 10]
  assert places[1][mask[0, 1]].tolist() == [0, 8]


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_the_same_place_of_the_same_turn_is_compared_as_in_a_slow_loop(scope):
  batch, _ = with_gaps(random_batch(3) | {"penalty": None}, seed=4)
  mask, correct, entropy = batch["mask"], batch["correct"], batch["entropy"]
  places = places_of(mask)
  assert {turn for turn, _ in places.values()} > {0, 1}
  algorithm = make("gtpo", compare="turn", scope=scope, alpha2=0.7, contrast=False)
  shaped, _ = jax.jit(lambda x: algorithm.shaped(**x))(arrays(batch))
  for (i, j, k), place in places.items():
    compared = [
      other
      for other, its in places.items()
      if its == place
      and correct[other[:2]] == correct[i, j]
      and (scope == "batch" or other[0] == i)
    ]
    value = entropy if correct[i, j] else 1 / np.maximum(entropy, 1e-2)
    mean = np.mean([float(value[other]) for other in compared])
    share = value[i, j, k] / mean if mean > 0 else 1.0
    got = shaped.plus if correct[i, j] else -shaped.minus
    np.testing.assert_allclose(got[i, j, k], 1 + 0.7 * share, rtol=1e-5)
  assert not np.asarray(shaped.plus)[~mask].any() and not np.asarray(shaped.minus)[~mask].any()


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_turns_without_gaps_are_positions(scope):
  x = np.asarray(random_batch(8)["entropy"])
  mask = random_batch(8)["mask"]
  mask = np.sort(mask, -1)[..., ::-1]
  expected = relative_entropy(x, mask, COMPARE["position", scope])
  got = relative_entropy(x, mask, COMPARE["turn", scope])
  np.testing.assert_allclose(got, expected, rtol=1e-5)
