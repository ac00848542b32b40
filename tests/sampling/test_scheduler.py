"""The scheduler without an engine: the tests choose the lengths of the completions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import play

from gtpo_jax.sampling.dense.inventory import slot_counts
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import Capacity, capacity_for

PROMPT_LENGTH = 5  # of the first prompt; each later prompt is one token longer


def assert_inputs_are_consistent(scheduler, cached, limits, keys):
  """Each active slot's inputs are those of its completion, and its entry holds its prompt."""
  inputs = scheduler.inputs()
  capacity = scheduler.capacity
  active = np.flatnonzero(inputs.active)
  assert len({tuple(scheduler.slots.completions[slot]) for slot in active}) == len(active)
  for slot in active:
    shard, local = divmod(int(slot), capacity.slots)
    prompt, index = scheduler.slots.completions[slot]
    entry, position = divmod(int(inputs.tables.table_index[slot]), capacity.slots_per_entry)
    row = shard * capacity.entries + entry
    assert cached[shard, entry] == prompt
    assert inputs.tables.slot_table[row, position] == local
    assert inputs.tables.entry_lengths[row] == inputs.prompt_lengths[slot] == PROMPT_LENGTH + prompt
    assert inputs.max_tokens[slot] == limits[prompt, index]
    assert inputs.is_new[slot] == (inputs.generated[slot] == 0)
    np.testing.assert_array_equal(inputs.keys[slot], keys[prompt, index])


def assert_shrinks_in_order(scheduler):
  """The remaining slots keep their completions."""
  shards = scheduler.capacity.shards
  fewer = max(int(scheduler.slots.active.reshape(shards, -1).sum(1).max()), 1)
  before = scheduler.slots.completions.copy().reshape(shards, -1, 2)
  order = scheduler.shrink(fewer)
  assert order.shape == (shards, fewer)
  after = scheduler.slots.completions.reshape(shards, -1, 2)
  np.testing.assert_array_equal(after, np.take_along_axis(before, order[..., None], 1))


def run(capacity, lengths, max_prompts=2, token_limits=None, shrink=False):
  """Runs completions of these lengths, and checks the inputs before every chunk.

  Returns the completions that ended, in order, and the number of chunks.
  """
  prompts, group = lengths.shape
  limits = np.repeat(np.asarray(token_limits or [40] * prompts)[:, None], group, 1)
  keys = np.arange(prompts * group * 2, dtype=np.uint32).reshape(prompts, group, 2)
  scheduler = Scheduler(capacity, DenseSpace(capacity))
  scheduler.add(PROMPT_LENGTH + np.arange(prompts), limits, keys)
  cached = {}  # (shard, entry) -> prompt

  def assigned(of_shards):
    for shard, pairs in enumerate(of_shards):
      assert len(pairs) <= max_prompts
      for entry, prompt in pairs:
        assert prompt not in {other for (s, _), other in cached.items() if s == shard}
        cached[shard, entry] = prompt

  def drop(scheduler):
    if shrink and not scheduler.has_waiting:
      assert_shrinks_in_order(scheduler)
    assert_inputs_are_consistent(scheduler, cached, limits, keys)

  lengths = np.minimum(lengths, limits)
  return play(scheduler, lengths, 4, max_prompts, assigned=assigned, shrink=drop)


@settings(max_examples=60, deadline=None)
@given(
  prompts=st.integers(1, 9),
  group=st.integers(1, 6),
  shards=st.integers(1, 3),
  slots=st.integers(1, 9),
  max_prompts=st.integers(1, 4),
  shrink=st.booleans(),
  seed=st.integers(0, 999),
)
def test_every_completion_runs_once(prompts, group, shards, slots, max_prompts, shrink, seed):
  lengths = np.random.default_rng(seed).integers(1, 40, (prompts, group))
  capacity = capacity_for(prompts, group, shards, slots * shards)
  done, _ = run(capacity, lengths, max_prompts, shrink=shrink)
  assert sorted(done) == list(np.ndindex(prompts, group))


def test_capacity():
  assert capacity_for(4, 8, 1, 64) == Capacity(1, 32, 4, 8)  # all at once
  assert capacity_for(100, 8, 1, 64) == Capacity(1, 64, 32, 8)  # four entries per eight slots
  assert capacity_for(100, 1, 1, 64) == Capacity(1, 64, 64, 1)
  assert capacity_for(100, 16, 4, 32) == Capacity(4, 8, 4, 8)  # a group larger than a shard
  assert capacity_for(3, 2, 8, 4) == Capacity(8, 1, 1, 1)  # at least one slot per shard
  assert capacity_for(512, 16, 8, 1024) == Capacity(8, 128, 32, 16)


def test_slot_counts():
  assert slot_counts(64, 4) == [64, 16, 4, 1]
  assert slot_counts(50, 4) == [50, 12, 3]
  assert slot_counts(1, 16) == [1]


def test_slots_do_not_wait_for_the_slowest_of_a_group():
  """One completion of each prompt takes ten times as long, and the others do not wait for it."""
  lengths = np.where(np.arange(8) == 0, 40, np.full((8, 8), 4))
  done, chunks = run(capacity_for(8, 8, 1, 16), lengths)
  assert len(done) == 64
  minimum = (8 * 10 + 56) / 16  # chunks, if no slot were ever idle
  assert minimum <= chunks <= minimum + 10  # the last long completion may start late
  by_groups = 4 * 10  # chunks if two groups ran at a time, each until its slowest has ended
  assert chunks < by_groups / 2


def test_token_limits_hold_and_prompts_with_limit_0_are_skipped():
  capacity = capacity_for(3, 2, 1, 2)
  done, chunks = run(capacity, np.full((3, 2), 99), token_limits=[7, 0, 3])
  assert sorted(done) == [(0, 0), (0, 1), (2, 0), (2, 1)]
  assert chunks == 2 + 1


def test_no_prompts():
  limits = np.zeros((0, 4), int)
  keys = np.zeros((0, 4, 2), np.uint32)
  capacity = capacity_for(0, 4, 2, 8)
  scheduler = Scheduler(capacity, DenseSpace(capacity))
  scheduler.add(np.zeros(0, int), limits, keys)
  assert scheduler.assign(3) == [[], []]
  assert not scheduler.has_waiting and not scheduler.slots.active.any()


@pytest.mark.parametrize("shards", [1, 4])
def test_prompts_are_prefilled_together(shards):
  """All free entries are filled at once, so that prompts are prefilled in few batches."""
  capacity = capacity_for(64, 4, shards, 16 * shards)
  scheduler = Scheduler(capacity, DenseSpace(capacity))
  scheduler.add(np.full(64, 3), np.full((64, 4), 9), np.zeros((64, 4, 2), np.uint32))
  assert [len(pairs) for pairs in scheduler.assign(8)] == [8] * shards
