"""Unfinished completions are prefixes of those that `sample` returns for the same key."""

import jax
import numpy as np
import pytest
from small import MAX_TOKENS, PAD, build, places

from gtpo_jax.sampling.settings import SamplingParams

PROMPT = [5, 9, 1]
CHUNK = 4  # tokens per chunk of the engine


@pytest.fixture(scope="module")
def built():
  return build()


def sample_and_stream(built, *, seed=4, group=3, interval=4, **settings):
  """The rollouts of `sample`, and the (rollouts, ended) that `generate` yields."""
  _, engine, layout = built
  sampling_params = SamplingParams(**settings)
  key = jax.random.key(seed)
  complete = engine.sample(layout, [PROMPT], key, group=group, sampling_params=sampling_params)
  rows = engine.completions([PROMPT], engine.completion_keys(key, 1, group))
  parts = []
  for ended in engine.generate(
    layout, rows, sampling_params=sampling_params, stream_interval=interval
  ):
    parts.append((engine.rollouts(rows), places(ended)))
  return complete, parts


def assert_prefix(part, complete, end):
  """The first `end` tokens equal those of the complete rollouts, and the rest is still empty."""
  np.testing.assert_array_equal(part.tokens[..., :end], complete.tokens[..., :end])
  np.testing.assert_array_equal(part.mask[..., :end], complete.mask[..., :end])
  np.testing.assert_allclose(part.log_probs[..., :end], complete.log_probs[..., :end], atol=1e-5)
  np.testing.assert_allclose(part.entropy[..., :end], complete.entropy[..., :end], atol=1e-5)
  assert not part.mask[..., end:].any() and (part.tokens[..., end:] == PAD).all()
  assert not part.log_probs[..., end:].any() and not part.entropy[..., end:].any()
  ended = complete.mask.sum(-1) <= end
  np.testing.assert_array_equal(part.finished, complete.finished & ended)


@pytest.mark.parametrize(
  ("group", "interval", "settings"),
  [
    (3, 1, {}),
    (3, 3, {}),
    (3, 99, {}),
    pytest.param(1, 4, {"temperature": 0.0}, marks=pytest.mark.slow),
    pytest.param(5, 4, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}, marks=pytest.mark.slow),
  ],
)
def test_each_part_is_a_prefix_of_the_complete_rollouts(group, interval, settings, built):
  complete, parts = sample_and_stream(built, group=group, interval=interval, **settings)
  assert complete.tokens.shape == (1, group, MAX_TOKENS)
  for i, (part, _) in enumerate(parts):
    assert_prefix(part, complete, min(i * min(interval, CHUNK), MAX_TOKENS))
  last, _ = parts[-1]
  np.testing.assert_array_equal(last.tokens, complete.tokens)
  np.testing.assert_array_equal(last.finished, complete.finished)


def test_each_end_is_reported_once(built):
  """It is reported with the first part in which the completion is complete."""
  complete, parts = sample_and_stream(built, group=6, interval=2)
  lengths = complete.mask.sum(-1)[0]
  reported = [completion for _, ended in parts for completion in ended]
  assert sorted(reported) == [(0, j) for j in range(6)] and len(set(lengths.tolist())) > 2
  for i, (_, ended) in enumerate(parts):
    for _, j in ended:
      assert 2 * (i - 1) < lengths[j] <= 2 * i


def test_it_stops_when_all_completions_have_ended(built):
  """Nothing is yielded after the last completion has ended."""
  _, engine, layout = built
  lengths = {}
  for seed in range(12):
    key = jax.random.key(seed)
    rollouts = engine.sample(layout, [PROMPT], key, group=1, sampling_params=SamplingParams())
    lengths[seed] = int(rollouts.mask.sum())
  early = min(lengths, key=lengths.get)
  late = max(lengths, key=lengths.get)
  assert lengths[early] < 5 and lengths[late] == MAX_TOKENS
  for seed in (early, late):
    _, parts = sample_and_stream(built, seed=seed, group=1, interval=2)
    assert len(parts) == 1 + -(-lengths[seed] // 2)
    assert parts[-1][1] == [(0, 0)] and not any(ended for _, ended in parts[:-1])
