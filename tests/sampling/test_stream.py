"""Completions as they are written: prefixes of what `sample` gives for the same key."""

import jax
import numpy as np
import pytest
from small import LONGEST, PAD, build

from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.filters import SamplingParams

PROMPT = [5, 9, 1]


@pytest.fixture(scope="module")
def built():
  return build()


def both(built, *, key=4, group=3, every=4, **settings):
  _, engine, layout = built
  sampling_params = SamplingParams(**settings)
  key = jax.random.key(key)
  whole = engine.sample(layout, [PROMPT], key, group=group, sampling_params=sampling_params)
  parts = [
    (jax.tree.map(np.copy, engine.rollouts(buffer, [PROMPT])), ended)
    for buffer, ended in engine.generate(
      layout, [PROMPT], key, group=group, sampling_params=sampling_params, every=every
    )
  ]
  return whole, parts


def assert_prefix(part, whole, until):
  """What is written before `until` is that of the whole; behind it there is nothing yet."""
  np.testing.assert_array_equal(part.tokens[..., :until], whole.tokens[..., :until])
  np.testing.assert_array_equal(part.mask[..., :until], whole.mask[..., :until])
  np.testing.assert_allclose(part.log_probs[..., :until], whole.log_probs[..., :until], atol=1e-5)
  np.testing.assert_allclose(part.entropy[..., :until], whole.entropy[..., :until], atol=1e-5)
  assert not part.mask[..., until:].any() and (part.tokens[..., until:] == PAD).all()
  assert not part.log_probs[..., until:].any() and not part.entropy[..., until:].any()
  np.testing.assert_array_equal(part.finished, whole.finished & (whole.mask.sum(-1) <= until))


@pytest.mark.parametrize(
  ("group", "every", "settings"),
  [
    (3, 1, {}),
    (3, 3, {}),
    (3, 99, {}),
    (1, 4, {"temperature": 0.0}),
    (5, 4, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}),
  ],
)
def test_each_part_is_a_prefix_of_the_whole(group, every, settings, built):
  whole, parts = both(built, group=group, every=every, **settings)
  assert whole.tokens.shape == (1, group, LONGEST)
  for i, (part, _) in enumerate(parts):
    assert_prefix(part, whole, min(i * min(every, 4), LONGEST))  # the engine's own chunk is 4
  np.testing.assert_array_equal(parts[-1][0].tokens, whole.tokens)
  np.testing.assert_array_equal(parts[-1][0].finished, whole.finished)


def test_each_end_is_told_once(built):
  """In the part in which the completion is first whole."""
  whole, parts = both(built, group=6, every=2)
  lengths = whole.mask.sum(-1)[0]
  told = [end for _, ended in parts for end in ended]
  assert sorted(told) == [(0, j) for j in range(6)] and len(set(lengths.tolist())) > 2
  for i, (_, ended) in enumerate(parts):
    for _, j in ended:
      assert 2 * (i - 1) < lengths[j] <= 2 * i


def test_it_stops_when_all_are_done(built):
  """Nothing is yielded after the last completion has ended."""
  _, engine, layout = built
  draw = lambda key: engine.sample(
    layout, [PROMPT], jax.random.key(key), group=1, sampling_params=SamplingParams()
  )
  lengths = {key: int(draw(key).mask.sum()) for key in range(30)}
  early = min(lengths, key=lengths.get)
  late = max(lengths, key=lengths.get)
  assert lengths[early] < 5 and lengths[late] == LONGEST
  for key in (early, late):
    _, parts = both(built, key=key, group=1, every=2)
    assert len(parts) == 1 + -(-lengths[key] // 2)
    assert parts[-1][1] == [(0, 0)] and not any(ended for _, ended in parts[:-1])


def test_eight_devices_stream_the_same(built):
  whole, _ = both(built)
  _, engine, layout = build(make_mesh(2, 2, 2))
  for i, (buffer, _) in enumerate(
    engine.generate(
      layout, [PROMPT], jax.random.key(4), group=3, sampling_params=SamplingParams(), every=3
    )
  ):
    until = min(3 * i, LONGEST)
    np.testing.assert_array_equal(buffer.tokens[..., :until], whole.tokens[..., :until])
    assert not buffer.mask[..., until:].any()
