"""Problems drawn by their difficulty: the weights, the outcomes, and runs that resume exactly."""

from types import SimpleNamespace

import numpy as np
import pytest
from experience_cases import (
  N,
  assert_equal,
  coins,  # noqa: F401 (an autouse fixture)
  collect,
  config_of,
  host,
  make_collector,
)

from gtpo_jax.rollout.drawing import (
  DECAY,
  FLOOR,
  PRIOR,
  SHARPNESS,
  DrawingByDifficulty,
  Outcomes,
  draw_weights,
  expected_contrast,
)
from gtpo_jax.runtime.errors import UserError

PROBLEMS = list(range(40))


def make(preference="explore", seed=0, problems=None, rows=0):
  return DrawingByDifficulty(problems or [(PROBLEMS, 1.0)], 4, seed, 4, preference, rows)


def group(index, correct, scored=None, guided=None):
  """Returns a group as far as outcomes are read from it."""
  correct = np.asarray(correct, bool)
  scored = np.ones_like(correct) if scored is None else np.asarray(scored, bool)
  own = np.ones_like(correct) if guided is None else ~np.asarray(guided, bool)
  rewards = SimpleNamespace(correct=correct, scored=scored)
  return SimpleNamespace(index=index, rewards=rewards, own=own)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.0), (5.0, 1.5), (40.0, 60.0)])
def test_expected_contrast_is_the_integral_over_success_rates(a, b):
  root = (np.arange(400_000) + 0.5) / 400_000
  p = root**8  # the integrand of root has no pole at 0
  density = root**7 * p ** (a - 1) * (1 - p) ** (b - 1)
  value = ((1 - p**4 - (1 - p) ** 4) * density).sum() / density.sum()
  found = expected_contrast(np.array([a]), np.array([b]), 4)
  np.testing.assert_allclose(found, [value], rtol=1e-3)


def reference_weights(right, tried, group, preference):
  """Returns the weights in a loop over the problems."""
  mean = (sum(right) + PRIOR / 2) / (sum(tried) + PRIOR)
  seen = sum(t > 0 for t in tried)
  new = len(tried) - seen
  weights = []
  for r, t in zip(right, tried, strict=True):
    a = r + PRIOR * mean
    b = t - r + PRIOR * (1 - mean)
    right_all = np.prod([(a + i) / (a + b + i) for i in range(group)])
    wrong_all = np.prod([(b + i) / (a + b + i) for i in range(group)])
    prefer = {"explore": 1.0, "low": b / (a + b), "high": a / (a + b)}[preference]
    weight = (prefer * (1 - right_all - wrong_all)) ** SHARPNESS + FLOOR
    weights.append(weight if t else weight * min(1.0, max(seen, 1) / new))
  return weights


@pytest.mark.parametrize("preference", ["explore", "low", "high"])
def test_weights_equal_a_slow_loop(preference):
  rng = np.random.default_rng(1)
  tried = (8 * rng.integers(0, 3, 30) * (rng.random(30) < 0.6)).astype(np.float32)
  right = np.floor(tried * rng.random(30)).astype(np.float32)
  weights = draw_weights(right, tried, 8, preference)
  np.testing.assert_allclose(weights, reference_weights(right, tried, 8, preference), rtol=1e-5)


def test_which_problems_are_preferred():
  right = np.array([0, 2, 4, 6, 8, 0], np.float32)
  tried = np.array([8, 8, 8, 8, 8, 0], np.float32)
  explore, low, high = (draw_weights(right, tried, 8, x) for x in ("explore", "low", "high"))
  assert explore.argmax() == 2 and explore[0] < explore[5] and explore[4] < explore[5]
  assert low[1] > low[3] > low[4] and low[1] > low[0]
  assert high[3] > high[1] > high[0] and high[3] > high[4]


def test_problems_are_drawn_in_proportion_to_their_weights():
  drawing = make(problems=[(list(range(5)), 1.0)])
  right = np.array([0, 4, 8, 2, 0], np.float32)
  tried = np.array([8, 8, 8, 8, 0], np.float32)
  drawing.state = Outcomes(right, tried, {})
  weights = draw_weights(right, tried, 4, "explore")
  counts = np.bincount([drawing.draw(k, 1, [])[0][1] for k in range(4000)], minlength=5)
  np.testing.assert_allclose(counts / 4000, weights / weights.sum(), atol=0.03)


def test_a_draw_is_a_function_of_seed_groups_and_outcomes():
  state = Outcomes(np.arange(40, dtype=np.float32) % 5, np.full(40, 5, np.float32), {})

  def draw(seed, begun):
    drawing = make(seed=seed)
    drawing.state = state
    return drawing.draw(begun, 8, [])

  first = draw(0, 12)
  assert first == draw(0, 12) and first != draw(0, 16) and first != draw(1, 12)
  assert [index for index, _ in first] == [(3 + i // 4, i % 4) for i in range(8)]
  assert len({problem for _, problem in first}) == 8


def test_kept_groups_keep_their_problems():
  drawing = make(rows=8)
  kept = [group(index, [0] * 4) for index, _ in drawing.draw(0, 30, [])][:8]
  drawing.observe([], kept)
  numbers = [drawing.state.numbers[x.index] for x in kept]
  assert len(drawing.state.numbers) == 8
  drawn = [problem for _, problem in drawing.draw(30, 32, kept)]
  assert sorted(drawn + numbers) == PROBLEMS
  again = make(rows=8)
  places = {"place": np.asarray([x.index for x in kept]), "count": np.int32(8)}
  problem_at = again.restore(drawing.save(kept) | places)
  assert [problem_at(x.index) for x in kept] == numbers
  drawing.observe([], kept)
  assert again.draw(30, 4, kept) == drawing.draw(30, 4, kept)


def test_outcomes_decay_and_count_only_verdicts_of_the_policy():
  drawing = make()
  (index, number), *_ = drawing.draw(0, 4, [])
  before = drawing.state
  drawing.observe([group(index, [1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0])], [])
  assert (drawing.state.right[number], drawing.state.tried[number]) == (2, 3)
  again = Outcomes(drawing.state.right, drawing.state.tried, {(5, 0): number})
  drawing.state = again
  drawing.observe([group((5, 0), [1, 0, 0, 1], None, [0, 0, 0, 1])], [])
  assert drawing.state.right[number] == DECAY * 2 + 1
  assert drawing.state.tried[number] == DECAY * 3 + 3
  metrics = drawing.metrics()
  assert metrics["difficulty/repeated"] == 1 and metrics["difficulty/tried"] == 1 / 40
  assert metrics["difficulty/mixed"] == 1 and metrics["difficulty/solved"] == 0
  drawing.state = again
  drawing.observe([group((5, 0), [1] * 4, [0] * 4)], [])
  assert_equal(drawing.state[:2], again[:2])
  drawing.state = before
  assert not drawing.state.tried.any() and "difficulty/mixed" not in drawing.metrics()


def test_weights_of_sources_count_before_anything_is_known():
  drawing = make(problems=[([0] * 100, 3.0), ([1] * 300, 1.0)])
  drawn = [problem for k in range(500) for _, problem in drawing.draw(4 * k, 4, [])]
  assert abs(np.mean(drawn) - 0.25) < 0.04


def test_samples_for_a_group_with_contrast_are_fewer():
  """On simulated problems with success rates near 0 and 1."""
  rates = np.random.default_rng(0).beta(0.2, 0.2, 400)
  contrast = {}
  for preference in ("uniform", "explore"):
    drawing = make(problems=[(list(range(400)), 1.0)])
    rng = np.random.default_rng(7)
    groups = []
    for step in range(200):
      drawn = drawing.draw(4 * step, 4, [])
      sampled = [group(index, rng.random(4) < rates[problem]) for index, problem in drawn]
      groups += [x.rewards.correct for x in sampled]
      drawing.observe(sampled if preference == "explore" else [], [])
    contrast[preference] = np.mean([0 < x.sum() < 4 for x in groups])
  assert contrast["explore"] > 1.4 * contrast["uniform"]


@pytest.mark.parametrize("problems", [[(PROBLEMS[:3], 1.0)], [(range(2**22 + 1), 1.0)]])
def test_too_few_or_too_many_problems_are_refused(problems):
  with pytest.raises(UserError, match=r"data.difficulty = 'explore' needs from 4 .* to 4194304"):
    make(problems=problems)


def test_rates_of_other_problems_are_refused():
  saved = make().save([])
  with pytest.raises(UserError, match="no success rates of these 39 problems"):
    make(problems=[(PROBLEMS[:39], 1.0)]).restore(saved)
  with pytest.raises(UserError, match="no success rates"):
    make().restore({})


SETTINGS = [
  ("gtpo", {}),
  pytest.param("dapo", {"batch.max_gen_batches": 4}, marks=pytest.mark.manual),
  pytest.param("gtpo", {"sampling.staleness": 1}, marks=pytest.mark.manual),
  pytest.param(
    "dapo", {"batch.max_gen_batches": 4, "sampling.staleness": 2}, marks=pytest.mark.manual
  ),
]


@pytest.mark.parametrize(("name", "changes"), SETTINGS)
def test_a_restored_collector_draws_the_same(name, changes):
  config = config_of(name, **{"data.difficulty": "explore", "data.largest": 9, **changes})
  collector, _ = collect(config, 2)
  saved = collector.leftovers()
  drawn = 2 * N * config.policy_completions  # repeats count for less
  assert drawn / 2 < saved["difficulty_tried"].sum()
  expected = [collect(config, 1, collector=collector, first=k)[1][0] for k in (2, 3)]
  again = make_collector(config, steps=2)
  again.restore(saved)
  again_batches = [collect(config, 1, collector=again, first=k)[1][0] for k in (2, 3)]
  for batch, other in zip(expected, again_batches, strict=True):
    assert batch.problems == other.problems and batch.texts == other.texts
    assert_equal(host(batch), host(other))
  assert_equal(collector.leftovers(), again.leftovers())
  collector.discard()
  assert collect(config, 1, collector=collector, first=3)[1][0].texts == expected[1].texts
