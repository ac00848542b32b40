"""Completions that go on in a later call, as if they had never stopped."""

import jax
import numpy as np
import pytest
from meshes import mesh_of
from small import (
  RAGGED_PROMPTS,
  assert_same,
  build,
  log_prob_errors,
  places,
  sample,
  trainer_scores,
)

from gtpo_jax.sampling.settings import EngineConfig, SamplingParams

GROUP = 6
TOKENS = 40
KEY = 4


def sample_in_parts(built, chunks, prompts=RAGGED_PROMPTS, layouts=None, **settings):
  """Samples in calls that each end after the next of `chunks`, and returns all completions."""
  _, engine, layout = built
  n = len(prompts)
  rows = engine.completions(prompts, engine.completion_keys(jax.random.key(KEY), n, GROUP))
  ended = []
  had_ended = []
  for call, count in enumerate([*chunks, 10**6]):
    policy = layouts[call] if layouts else layout
    stream = engine.generate(policy, rows, sampling_params=SamplingParams(**settings))
    had_ended += next(stream)
    for _, have_ended in zip(range(count), stream, strict=False):
      ended += have_ended
    stream.close()
  assert len(ended) == len(set(ended)) == n * GROUP  # each ends once
  assert set(had_ended) <= set(ended)
  return engine.rollouts(rows)


@pytest.fixture(scope="module")
def expected():
  rollouts = sample(build(max_tokens=TOKENS), RAGGED_PROMPTS, group=GROUP)
  assert rollouts.mask.sum(-1).max() == TOKENS and 0.2 < rollouts.finished.mean() < 0.98
  return rollouts


@pytest.mark.parametrize("chunks", [pytest.param((1,), marks=pytest.mark.manual), (3, 1, 0, 2)])
def test_completions_are_those_of_one_call(chunks, expected):
  built = build(max_tokens=TOKENS, engine_config=EngineConfig(slots=5, chunk=4))
  rollouts = sample_in_parts(built, chunks)
  assert_same(rollouts, expected)
  assert log_prob_errors(built, rollouts).max() <= 1e-4


@pytest.mark.devices
@pytest.mark.slow
def test_the_mesh_does_not_matter(expected):
  built = build(
    mesh_of(2, 2, 1, 2), max_tokens=TOKENS, engine_config=EngineConfig(slots=16, chunk=4)
  )
  assert_same(sample_in_parts(built, (2, 3)), expected)


@pytest.mark.parametrize(
  ("mesh", "slots", "fraction"),
  [
    pytest.param((1, 1, 1, 1), 6, 1.0, marks=pytest.mark.manual),
    pytest.param((1, 1, 1, 1), 6, 0.3, marks=pytest.mark.slow),
    pytest.param((2, 2, 1, 2), 16, 0.5, marks=[pytest.mark.manual, pytest.mark.devices]),
  ],
)
def test_pages_do_not_matter(mesh, slots, fraction, expected):
  """Some completions wait for the pages of the tokens that they have already."""
  config = EngineConfig(
    slots=slots, chunk=4, attention="pallas", page_size=16, cache_fraction=fraction
  )
  built = build(mesh_of(*mesh), max_tokens=TOKENS, engine_config=config)
  assert_same(sample_in_parts(built, (5, 2, 4)), expected)


@pytest.mark.slow
def test_int8_keys_and_a_repetition_penalty():
  """Tokens that were read again are penalised as those that were drawn."""
  settings = {"repetition_penalty": 1.5, "top_k": 8}
  built = build(max_tokens=TOKENS, engine_config=EngineConfig(slots=8, chunk=4))
  whole = sample(built, RAGGED_PROMPTS, group=GROUP, **settings)
  assert_same(sample_in_parts(built, (2, 3), **settings), whole)
  built = build(max_tokens=TOKENS, engine_config=EngineConfig(slots=8, chunk=4, kv_dtype="int8"))
  assert log_prob_errors(built, sample_in_parts(built, (2, 3))).max() < 0.3


def test_each_token_is_drawn_from_the_policy_of_its_call():
  """After a change of the parameters, the old tokens stay, and the new ones follow the new ones."""
  first = build(max_tokens=TOKENS, engine_config=EngineConfig(slots=5, chunk=4))
  params, engine, layout = first
  other = jax.tree.map(lambda x: 0.7 * x, params)
  rollouts = sample_in_parts(first, (6,), layouts=[layout, engine.layout(other)])
  whole = sample(first, RAGGED_PROMPTS, group=GROUP)
  under_first = log_prob_errors_of_all(first, rollouts)
  under_other = log_prob_errors_of_all((other, engine, None), rollouts)
  old = under_first <= 1e-5
  new = under_other <= 1e-5
  mask = rollouts.mask
  assert (old | new)[mask].all() and old[mask].any() and new[mask].any()
  both = (old & new & mask).sum()  # where a token is certain under both policies
  assert both < 0.1 * mask.sum()
  mixed = (old & mask).any(-1) & (new & ~old & mask).any(-1)
  assert mixed.any()
  np.testing.assert_array_equal(rollouts.tokens[old & ~new & mask], whole.tokens[old & ~new & mask])
  for i, j in np.argwhere(mixed):  # no old token after a new one
    is_new = (new & ~old)[i, j, mask[i, j]]
    is_old = (old & ~new)[i, j, mask[i, j]]
    assert np.flatnonzero(is_new).min() > np.flatnonzero(is_old).max()


def log_prob_errors_of_all(built, rollouts):
  log_probs, _ = trainer_scores(built, rollouts)
  return np.abs(np.asarray(log_probs) - rollouts.log_probs)


@pytest.mark.parametrize("attention", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_rows_join_while_others_are_sampled(attention, expected):
  """They get the tokens that they get if all rows are there from the beginning."""
  config = EngineConfig(slots=5, chunk=4, attention=attention, page_size=16)
  _, engine, layout = build(max_tokens=TOKENS, engine_config=config)
  n = len(RAGGED_PROMPTS)
  keys = engine.completion_keys(jax.random.key(KEY), n, GROUP)
  rows = engine.completions(RAGGED_PROMPTS, keys)
  session = engine.session(layout, rows, SamplingParams())
  ended = []
  submitted = 0
  for chunk in range(10**6):
    complete = len(ended) == GROUP * submitted  # the last rows join when all others have ended
    if complete or chunk in (2, 5):
      until = next((x for x in (3, 4, 9, n) if x > submitted), None)
      if until is None:
        break
      for row in rows[submitted:until]:
        session.submit(row[0].prompt, row)
      submitted = until
    ended += session.step()
  assert submitted == n and not session.busy
  assert sorted(places(ended)) == [(i, j) for i in range(n) for j in range(GROUP)]
  assert_same(engine.rollouts(rows), expected)


def test_context_between_drawn_tokens():
  """Tokens that somebody else has written are read, but neither scored nor drawn."""
  built = build(max_tokens=TOKENS, engine_config=EngineConfig(slots=5, chunk=4))
  _, engine, layout = built
  n = len(RAGGED_PROMPTS)
  rows = engine.completions(RAGGED_PROMPTS, engine.completion_keys(jax.random.key(KEY), n, GROUP))
  completions = [completion for row in rows for completion in row]
  for chunks in (3, 2, 10**6):
    stream = engine.generate(layout, rows, sampling_params=SamplingParams())
    for _ in zip(range(chunks), stream, strict=False):
      pass
    stream.close()
    for completion in completions:
      if not completion.ended and completion.limit - completion.length > 3:
        completion.read((5, 9, 11))
  assert all(completion.ended for completion in completions)
  rollouts = engine.rollouts(rows)
  context = rollouts.present & ~rollouts.mask
  assert (context.sum(-1) == 6).any() and (
    rollouts.tokens[context].reshape(-1, 3) == (5, 9, 11)
  ).all()
  assert not rollouts.log_probs[context].any() and not rollouts.entropy[context].any()
  assert (np.diff(rollouts.present.astype(int)) <= 0).all()  # they are the first ones of the row
  assert rollouts.lengths.max() == TOKENS
  assert log_prob_errors(built, rollouts).max() <= 1e-4
