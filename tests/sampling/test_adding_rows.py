"""Prompts that join a schedule, before it begins and while it runs, with arrays and with pages."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import play

from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.paged.pool import PagePool, PoolSizes
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import capacity_for

CHUNK = 5
LONGEST_PROMPT = 12
LIMIT = 40
PAGE = 4


def make_scheduler(paged, spare, prompts, group, shards, slots):
  """A scheduler for that many completions; in a pool of the fewest pages and `spare` more."""
  capacity = capacity_for(prompts, group, shards, slots * shards)
  if not paged:
    return Scheduler(capacity, DenseSpace(capacity))
  sizes = PoolSizes(
    (LONGEST_PROMPT + LIMIT) // PAGE + spare, PAGE, LONGEST_PROMPT // PAGE, LIMIT // PAGE, CHUNK, 2
  )
  return Scheduler(capacity, PagePool(capacity, sizes))


def make_rows(rng, prompts, group):
  """The arguments of `add`, and the length of each completion."""
  limits = rng.integers(0, LIMIT + 1, (prompts, group)).astype(np.int32)
  drawn = rng.integers(0, 2, (prompts, group)) * rng.integers(0, LIMIT, (prompts, group))
  drawn = np.minimum(drawn, np.maximum(limits - 1, 0)).astype(np.int32)
  keys = rng.integers(0, 2**32, (prompts, group, 2), dtype=np.uint32)
  lengths = np.minimum(drawn + rng.integers(1, LIMIT, (prompts, group)), limits)
  return (rng.integers(1, LONGEST_PROMPT, prompts), limits, keys, drawn), lengths


def run(scheduler, parts, rows, lengths, shrink=False):
  """Runs all completions, and adds parts[k], a slice of the rows, before chunk k.

  Returns the ended completions, and everything that the scheduler said.
  """
  shards = scheduler.capacity.shards
  said = []

  def join(number):
    for part in parts.get(number, ()):
      scheduler.add(*(x[part] for x in rows))
    return number < max(parts)

  def drop(scheduler):
    most = int(scheduler.slots.active.reshape(shards, -1).sum(1).max())
    if shrink and not scheduler.has_waiting and most < scheduler.capacity.slots:
      scheduler.shrink(most)

  def ran(inputs, tokens):
    said.append((scheduler.take_resumed(), scheduler.slots.completions.tolist()))
    said.extend(leaf.tolist() for leaf in jax.tree.leaves(inputs))

  done, _ = play(scheduler, lengths, CHUNK, join=join, assigned=said.append, shrink=drop, ran=ran)
  return done, said


SHAPES = {
  "prompts": st.integers(2, 9),
  "group": st.integers(1, 5),
  "shards": st.integers(1, 3),
  "slots": st.integers(1, 8),
  "spare": st.integers(0, 30),
  "seed": st.integers(0, 999),
}


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_rows_added_in_parts_before_the_first_chunk(
  paged, prompts, group, shards, slots, spare, seed
):
  """They run in the same order, in the same slots and entries, as rows that are added at once."""
  rng = np.random.default_rng(seed)
  rows, lengths = make_rows(rng, prompts, group)
  cut = int(rng.integers(1, prompts))
  make = lambda: make_scheduler(paged, spare, prompts, group, shards, slots)
  whole = run(make(), {0: [slice(None)]}, rows, lengths)
  assert run(make(), {0: [slice(cut), slice(cut, None)]}, rows, lengths) == whole


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=40, deadline=None)
@given(shrink=st.booleans(), expected=st.integers(1, 9), **SHAPES)
def test_rows_that_join_while_others_run(
  paged, shrink, expected, prompts, group, shards, slots, spare, seed
):
  """Each runs once, also if more come than were expected, and after slots were dropped."""
  rng = np.random.default_rng(seed)
  rows, lengths = make_rows(rng, prompts, group)
  parts = {}
  for prompt in range(prompts):
    parts.setdefault(int(rng.integers(0, 12)), []).append(prompt)
  order = np.concatenate([parts[chunk] for chunk in sorted(parts)])
  rows = tuple(x[order] for x in rows)
  lengths = lengths[order]
  sizes = np.cumsum([0] + [len(parts[chunk]) for chunk in sorted(parts)])
  slices = {
    chunk: [slice(begin, end)]
    for chunk, begin, end in zip(sorted(parts), sizes[:-1], sizes[1:], strict=True)
  }
  scheduler = make_scheduler(paged, spare, min(expected, prompts), group, shards, slots)
  done, _ = run(scheduler, slices, rows, lengths, shrink)
  assert sorted(done) == [tuple(pair) for pair in np.argwhere(rows[1]).tolist()]


def test_groups_of_different_sizes():
  """Groups may be larger than expected: then fewer of their completions run at once."""
  scheduler = make_scheduler(False, 0, 2, 2, 1, 8)
  zeros = lambda *shape: np.zeros(shape, np.uint32)
  scheduler.add(np.full(1, 3), np.full((1, 2), 9), zeros(1, 2, 2))
  scheduler.add(np.full(1, 3), np.full((1, 5), 9), zeros(1, 5, 2))
  assert scheduler.assign(4) == [[(0, 0), (1, 1)]]
  assert scheduler.slots.completions.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
  scheduler.advance(np.full(4, 9), np.array([False, False, True, True]))
  scheduler.assign(4)
  assert scheduler.slots.completions.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3]]
