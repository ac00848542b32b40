"""The schedule alone, with completions whose lengths are drawn by the test."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.sampling.slots import Room, Schedule, room


def play(place, prompts, group, length_of, prefill=2, chunk=4, limits=None, shrink=False):
  """Runs a schedule to its end; returns what ran (prompt, number) -> tokens, and chunks used. Checks its promises on the way."""
  limits = np.repeat(np.asarray(limits or [40] * prompts)[:, None], group, 1)
  keys = np.arange(prompts * group * 2, dtype=np.uint32).reshape(prompts, group, 2)
  schedule = Schedule(place, 5 + np.arange(prompts), limits, keys)
  sat = {}
  done = {}
  chunks = 0
  while True:
    while any(seated := schedule.fill(prefill)):
      for shard, rows in enumerate(seated):
        assert len(rows) <= prefill
        for seat, prompt in rows:
          assert prompt not in {p for (s, _), p in sat.items() if s == shard}
          sat[shard, seat] = prompt
    if not schedule.live.any():
      break
    if shrink and not schedule.waiting:
      fewer = max(int(schedule.live.reshape(place.shards, -1).sum(1).max()), 1)
      before = schedule.completion.copy().reshape(place.shards, -1, 2)
      order = schedule.shrink(fewer)
      assert order.shape == (place.shards, fewer)
      after = schedule.completion.reshape(place.shards, -1, 2)
      np.testing.assert_array_equal(after, np.take_along_axis(before, order[..., None], 1))
    control = schedule.control()
    size = schedule.room
    live = np.flatnonzero(control.live)
    assert len({tuple(schedule.completion[i]) for i in live}) == len(live)
    for i in live:
      shard, local = divmod(int(i), size.slots)
      prompt, number = schedule.completion[i]
      seat, row = divmod(int(control.place[i]), size.rows)
      assert (
        sat[shard, seat] == prompt
      )  # its prompt was read there, and nobody sat down on it since
      assert control.slot[shard * size.prompt_cache + seat, row] == local
      assert control.seated[shard * size.prompt_cache + seat] == control.prompt[i] == 5 + prompt
      assert control.limit[i] == limits[prompt, number]
      assert control.fresh[i] == (control.written[i] == 0)
      np.testing.assert_array_equal(control.keys[i], keys[prompt, number])
    wanted = np.array(
      [
        min(length_of(*schedule.completion[i]), limits[tuple(schedule.completion[i])])
        if control.live[i]
        else 0
        for i in range(len(control.live))
      ]
    )
    tokens = np.where(control.live, np.minimum(wanted - control.written, chunk), 0)
    ended = control.live & (control.written + tokens == wanted)
    for i in np.flatnonzero(ended):
      assert tuple(schedule.completion[i]) not in done
      done[tuple(schedule.completion[i])] = int(wanted[i])
    schedule.advance(tokens, ended)
    chunks += 1
    assert chunks < 10_000
  assert not schedule.waiting
  return done, chunks


@settings(max_examples=150, deadline=None)
@given(
  prompts=st.integers(1, 9),
  group=st.integers(1, 6),
  shards=st.integers(1, 3),
  slots=st.integers(1, 9),
  prefill=st.integers(1, 4),
  shrink=st.booleans(),
  seed=st.integers(0, 999),
)
def test_every_completion_runs_once(prompts, group, shards, slots, prefill, shrink, seed):
  long = np.random.default_rng(seed).integers(1, 40, (prompts, group))
  done, _ = play(
    room(prompts, group, shards, slots * shards),
    prompts,
    group,
    lambda i, j: int(long[i, j]),
    prefill,
    shrink=shrink,
  )
  assert done == {(i, j): long[i, j] for i in range(prompts) for j in range(group)}


def test_room():
  assert room(4, 8, 1, 64) == Room(1, 32, 4, 8)  # all at once
  assert room(100, 8, 1, 64) == Room(1, 64, 32, 8)  # four seats for every eight slots
  assert room(100, 1, 1, 64) == Room(1, 64, 64, 1)
  assert room(100, 16, 4, 32) == Room(4, 8, 4, 8)  # a group larger than a shard's slots
  assert room(3, 2, 8, 4) == Room(8, 1, 1, 1)  # at least one slot a shard
  assert room(512, 16, 8, 1024) == Room(8, 128, 32, 16)


def test_slots_do_not_wait_for_the_slowest_of_a_group():
  """One completion of each prompt takes ten times as long; the others go on beside it."""
  length = lambda i, j: 40 if j == 0 else 4
  done, chunks = play(room(8, 8, 1, 16), 8, 8, length)
  assert len(done) == 64
  least = (8 * 10 + 56) / 16  # chunks, if no slot were ever idle
  assert least <= chunks <= least + 10  # the last long one may begin late
  by_groups = 4 * 10  # two groups at a time, each until its slowest is done
  assert chunks < by_groups / 2


def test_limits_hold_and_prompts_without_room_are_left_out():
  done, _ = play(room(3, 2, 1, 2), 3, 2, lambda i, j: 99, token_limits=[7, 0, 3])
  assert done == {(0, 0): 7, (0, 1): 7, (2, 0): 3, (2, 1): 3}


def test_no_prompts():
  schedule = Schedule(
    room(0, 4, 2, 8), np.zeros(0, int), np.zeros((0, 4), int), np.zeros((0, 4, 2), np.uint32)
  )
  assert schedule.fill(3) == [[], []] and not schedule.waiting and not schedule.live.any()


@pytest.mark.parametrize("shards", [1, 4])
def test_prompts_are_read_together(shards):
  """Free seats fill up at once, so that prompts are read in few batches."""
  schedule = Schedule(
    room(64, 4, shards, 16 * shards),
    np.full(64, 3),
    np.full((64, 4), 9),
    np.zeros((64, 4, 2), np.uint32),
  )
  assert [len(rows) for rows in schedule.fill(8)] == [8] * shards
