"""Rows that are drawn each in their own way, and slots that come and go while they run."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.filters import RowSampling, filter_rows, sample_rows, sample_token
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import Capacity
from gtpo_jax.sampling.settings import SamplingParams

WAYS = [
  SamplingParams(),
  SamplingParams(0.0),
  SamplingParams(0.5),
  SamplingParams(1.3, top_k=3),
  SamplingParams(1.0, top_p=0.8),
  SamplingParams(1.0, min_p=0.1),
  SamplingParams(0.9, top_k=20, top_p=0.6, min_p=0.05),
  SamplingParams(0.0, top_k=2),
]


def rows_of(ways, lists_alternatives=False):
  plain = RowSampling(lists_alternatives=lists_alternatives)
  names = [name for name in plain._fields if name != "lists_alternatives"]
  return RowSampling.of(plain._replace(**{x: getattr(way, x) for x in names}) for way in ways)


def test_each_row_draws_what_it_draws_by_itself():
  vocab = 300
  logits = 3 * jax.random.normal(jax.random.key(0), (len(WAYS), vocab))
  keys = jax.random.split(jax.random.key(1), len(WAYS))
  sampled, others = sample_rows(rows_of(WAYS, lists_alternatives=True), logits, keys)
  for i, way in enumerate(WAYS):
    alone = sample_token(way, way.temperature, logits[i : i + 1], keys[i : i + 1])
    assert sampled.token[i] == alone.token[0]
    for name in ("log_prob", "entropy", "drawn_log_prob", "plain_log_prob"):
      np.testing.assert_allclose(
        getattr(sampled, name)[i], getattr(alone, name)[0], atol=2e-5, err_msg=f"{name} {way}"
      )
  expected = jax.lax.top_k(jax.nn.log_softmax(logits, -1), 20)
  np.testing.assert_allclose(others.log_probs, expected[0], atol=1e-5)
  np.testing.assert_array_equal(others.tokens, expected[1])


@given(seed=st.integers(0, 999), top_k=st.integers(0, 12), top_p=st.floats(0, 1))
@settings(max_examples=15)
def test_filters_keep_the_fewest_tokens_that_are_enough(seed, top_k, top_p):
  rng = np.random.default_rng(seed)
  weights = rng.random(10).astype(np.float32) ** 3
  weights /= weights.max()
  way = RowSampling.of([RowSampling(top_k=top_k, top_p=top_p)])
  kept = np.asarray(filter_rows(way, jnp.asarray(weights)[None]))[0]
  ordered = np.sort(weights)[::-1].astype(np.float64)
  ordered = ordered[: top_k or None]
  before = np.cumsum(ordered) - ordered
  clear = np.abs(before - top_p * ordered.sum()) > 1e-5  # others depend on rounding
  inside = (before < top_p * ordered.sum()) | (np.arange(len(ordered)) == 0) | (top_p == 1)
  assert set(ordered[inside & clear].astype(np.float32)) <= set(kept[kept > 0])
  assert set(kept[kept > 0]) <= set(ordered[inside | ~clear].astype(np.float32))


@given(shards=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=15)
def test_slots_come_and_go(shards, seed):
  """Each completion keeps its count, its key and its prompt, whatever becomes of its slot."""
  rng = np.random.default_rng(seed)
  capacity = Capacity(shards, 1, 1, 1)
  scheduler = Scheduler(capacity, DenseSpace(capacity))
  lengths = rng.integers(1, 9, 30)
  counts = {}
  added = 0
  while added < 30 or scheduler.has_waiting or scheduler.slots.active.any():
    new = min(int(rng.integers(0, 4)), 30 - added)
    keys = np.arange(added, added + new, dtype=np.uint32)[:, None, None].repeat(2, 2)
    scheduler.add(lengths[added : added + new], np.full((new, 1), 9, np.int32), keys)
    added += new
    active = int(scheduler.slots.active.reshape(shards, -1).sum(1).max())
    before = scheduler.slots.completions[:, 0].reshape(shards, -1)
    order, entries = scheduler.refit(max(active, int(rng.integers(1, 9))))
    scheduler.space.capacity = scheduler.capacity
    after = scheduler.slots.completions[:, 0].reshape(shards, -1)
    for shard in range(shards):
      used = after[shard] >= 0
      np.testing.assert_array_equal(before[shard, order[shard, used]], after[shard, used])
    assert entries.shape == order.shape
    while any(scheduler.assign(2)):
      pass
    inputs = scheduler.inputs()
    slots = scheduler.slots
    used = slots.active
    numbers = slots.completions[used, 0]
    np.testing.assert_array_equal(slots.keys[used, 0], numbers)
    np.testing.assert_array_equal(slots.prompt_lengths[used], lengths[numbers])
    np.testing.assert_array_equal(slots.generated[used], [counts.get(i, 0) for i in numbers])
    in_entry = inputs.tables.entry_lengths.reshape(shards, -1)
    shard = np.flatnonzero(used) // scheduler.capacity.slots
    np.testing.assert_array_equal(in_entry[shard, inputs.entries[used]], lengths[numbers])
    tokens = np.where(used, rng.integers(1, 4, len(used)), 0)
    ended = used & (slots.generated + tokens >= 9)
    for slot in np.flatnonzero(used):
      counts[int(slots.completions[slot, 0])] = int(slots.generated[slot] + tokens[slot])
    gone = slots.completions[ended, 0].tolist()
    scheduler.advance(tokens, ended)
    for number in gone:
      scheduler.forget(number)
  assert sorted(counts) == list(range(30)) and min(counts.values()) >= 9
  assert not scheduler._rows
