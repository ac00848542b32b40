"""Prompts are prefilled in batches of their own width, and the cache has more entries if needed."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import CONFIG, assert_same, build, sample

from gtpo_jax.sampling.prefill.batches import prefill_batches, row_counts, sequence_lengths
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams

WIDTHS = (75, 150, 300)
LENGTHS = (40, 300, 90, 2, 75, 160, 3, 76, 10, 151, 30, 1)
MIXED = [np.random.default_rng(i).integers(12, 48, size).tolist() for i, size in enumerate(LENGTHS)]


def batches(lengths, counts):
  prompts = [[1] * length for length in lengths]
  return list(prefill_batches([[(i, i) for i in range(len(prompts))]], prompts, counts))


def test_numbers_of_rows():
  assert row_counts(320, 52) == [25, 6, 1]
  assert row_counts(1024, 52) == [8, 2]
  assert row_counts(64, 64) == [64, 16, 4]
  assert row_counts(64, 32) == [32, 8]
  assert row_counts(20_000, 4) == [1]


def test_lengths_of_sequences():
  assert sequence_lengths(20) == [20]
  assert sequence_lengths(92) == [33, 46, 66, 92]
  assert sequence_lengths(1536) == [34, 68, 136, 272, 544, 768, 1087, 1536]


def test_a_batch_has_the_width_of_its_longest_prompt():
  counts = {100: [8, 2], 400: [4, 1]}
  found = batches([50, 300, 20, 350, 399, 100], counts)
  # Four rows of 400, the last of which takes the longest of the shorter prompts.
  assert [(x.width, x.rows) for x in found] == [(400, 4), (100, 2)]
  assert found[0].assigned == [[(4, 4), (3, 3), (1, 1), (5, 5)]]
  assert found[1].assigned == [[(0, 0), (2, 2)]]


def test_a_few_prompts_do_not_pay_for_a_large_batch():
  assert [x.rows for x in batches([10] * 3, {16: [8, 2, 1]})] == [2, 1]
  assert [x.rows for x in batches([10] * 4, {16: [8, 2, 1]})] == [8]
  assert [x.rows for x in batches([10], {16: [8, 2]})] == [2]


@settings(max_examples=100, deadline=None)
@given(
  shards=st.lists(st.lists(st.integers(1, 300), max_size=20), min_size=1, max_size=3),
  most=st.integers(1, 20),
)
def test_each_prompt_is_in_one_batch(shards, most):
  prompts = [[1] * length for lengths in shards for length in lengths]
  numbers = iter(range(len(prompts)))
  assigned = [[(entry, next(numbers)) for entry in range(len(lengths))] for lengths in shards]
  counts = {width: row_counts(width, most) for width in WIDTHS}
  done = [[] for _ in shards]
  for batch in prefill_batches(assigned, prompts, counts):
    assert batch.rows in counts[batch.width]
    for shard, pairs in enumerate(batch.assigned):
      assert len(pairs) <= batch.rows
      assert all(len(prompts[prompt]) <= batch.width for _, prompt in pairs)
      done[shard] += pairs
  assert [sorted(pairs) for pairs in done] == assigned


def mixed(mesh=None, slots=64):
  return build(
    mesh,
    stop=(7,),
    max_prompt_tokens=300,
    config=dataclasses.replace(CONFIG, context=1024),
    engine_config=EngineConfig(slots=slots, chunk=4),
  )


@pytest.fixture
def more_programs(monkeypatch):
  """Small batches and caches are treated as large ones are."""
  monkeypatch.setattr("gtpo_jax.sampling.prefill.batches.LEAST_TOKENS", 1)
  monkeypatch.setattr("gtpo_jax.sampling.dense.dense_sizes.LONG_PROMPTS", 1)


def test_tokens_do_not_depend_on_the_prompts_beside_them(more_programs):
  """A prompt is first and alone, or first among others, which are shorter and longer."""
  for first in (0, 1, 4):
    alone = sample(mixed(), [MIXED[first]], group=3)
    together = sample(mixed(slots=6), [MIXED[first], *MIXED[2:9]], group=3)
    np.testing.assert_array_equal(together.tokens[0], alone.tokens[0])
    np.testing.assert_allclose(together.log_probs[0], alone.log_probs[0], atol=1e-4)


def sample_with_limits(built, limits):
  """Samples completions of `MIXED`, each at most as long as its limit."""
  _, engine, layout = built
  keys = engine.completion_keys(jax.random.key(0), *limits.shape)
  rows = engine.completions(MIXED, keys, limits)
  for _ in engine.generate(layout, rows, sampling_params=SamplingParams()):
    pass
  return engine.rollouts(rows)


@pytest.mark.slow
def test_entries_are_added_for_slots_that_idle(more_programs):
  """Six entries are enough for four full groups, unless slow completions keep too many."""
  built = mixed(slots=12)
  programs = built[1].programs
  sizes = programs.sizes
  assert sizes.entry_counts(sizes.scheduler(12, 3).space.capacity) == [6, 12]
  assert sizes.scheduler(12, 3).capacity.entries == 6
  added = []
  add_entries = programs.add_entries
  programs.add_entries = lambda *arguments: added.append(arguments[2]) or add_entries(*arguments)
  sample_with_limits(built, np.full((12, 3), 4))
  assert added == []
  limits = np.tile([10, 1, 1], (12, 1))
  rollouts = sample_with_limits(built, limits)
  assert added == [12]
  programs.add_entries = add_entries
  assert_same(rollouts, sample_with_limits(mixed(), limits))


def test_short_prompts_need_no_more_programs():
  sizes = build(engine_config=EngineConfig(slots=12, chunk=4))[1].programs.sizes
  scheduler = sizes.scheduler(12, 3)
  assert sizes.entry_counts(scheduler.space.capacity) == [12]
  widths = sizes.widths["prompts"]
  assert [sizes.row_counts(scheduler, "prompts", width) for width in widths] == [[12]]
