"""Pages without an engine: the tests keep a pool of their own, and write and read what it says."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import play

from gtpo_jax.sampling.paged.pool import PagePool, PoolSizes, places
from gtpo_jax.sampling.prefill.batches import PrefillBatch
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import capacity_for


class Memory:
  """A pool whose positions contain (prompt, completion or -1, position)."""

  def __init__(self, pool, shards):
    self.content = np.full((shards, pool.pages, pool.page, 3), -9)
    self.page = pool.page

  def write(self, shard, pages, first, values):
    for offset, value in enumerate(values):
      page = pages[(first + offset) // self.page]
      self.content[shard, page, (first + offset) % self.page] = value

  def read(self, shard, pages, start, end):
    return self.content[shard, pages].reshape(-1, 3)[start:end].tolist()


def rows_of(rows, shard):
  """The rows in use of a shard: slots, pages, start and end."""
  size = len(rows.start) // len(rows.count)
  for row in range(shard * size, shard * size + rows.count[shard]):
    yield rows.slots[row], rows.pages[row], rows.start[row], rows.end[row]


def run(pool, shards, slots, lengths, prompt_lengths, limit, fewer=0):
  """Runs every completion to its end, and checks what each slot would read before every chunk.

  Returns the numbers of chunks that completions ran and waited.
  """
  scheduler = make_scheduler(pool, shards, slots, lengths, prompt_lengths, limit)
  memory = Memory(pool, shards)
  width = pool.prompt_pages * pool.page
  counts = {"ran": 0, "waited": 0}

  def assigned(of_shards):
    written = places(scheduler.space, "prompts", PrefillBatch(width, 2, of_shards))
    for shard, pairs in enumerate(of_shards):
      for row, (_, prompt) in enumerate(pairs):
        length = prompt_lengths[prompt]
        unused = (width - length) // pool.page
        assert (written[shard, row, :unused] >= pool.pages).all()
        values = [(prompt, -1, i) for i in range(length)]
        memory.write(shard, written[shard, row], width - length, values)
      assert (written[shard, len(pairs) :] >= pool.pages).all()

  def drop(scheduler):
    most = scheduler.slots.active.reshape(shards, -1).sum(1).max()
    if not scheduler.has_waiting and most <= fewer < scheduler.capacity.slots:
      scheduler.shrink(fewer)

  def ran(inputs, tokens):
    running = np.flatnonzero(inputs.active)
    counts["ran"] += len(running)
    counts["waited"] += int(scheduler.slots.active.sum()) - len(running)
    check_reads(scheduler, inputs, memory, prompt_lengths)
    for slot in running:
      completion = tuple(scheduler.slots.completions[slot])
      first = inputs.generated[slot]
      written = inputs.tables.written[slot]
      used = (first % pool.page + tokens[slot] - 1) // pool.page + 1
      assert (written[:used] < pool.pages).all()
      values = [(*completion, i) for i in range(first, first + tokens[slot])]
      shard = int(slot) // scheduler.capacity.slots
      memory.write(shard, written, first % pool.page, values)

  done, _ = play(scheduler, lengths, pool.chunk, assigned=assigned, shrink=drop, ran=ran)
  assert sorted(done) == list(np.ndindex(lengths.shape))
  share = counts["waited"] / sum(counts.values())
  assert scheduler.space.statistics() == {"sampling/waiting": share}
  return counts["ran"], counts["waited"]


def make_scheduler(pool, shards, slots, lengths, prompt_lengths, limit):
  """A scheduler with a row for each of these completions of at most `limit` tokens."""
  capacity = capacity_for(*lengths.shape, shards, slots * shards)
  scheduler = Scheduler(capacity, PagePool(capacity, pool))
  keys = np.zeros((*lengths.shape, 2), np.uint32)
  scheduler.add(prompt_lengths, np.full(lengths.shape, limit), keys)
  return scheduler


def check_reads(scheduler, inputs, memory, prompt_lengths):
  """Each running slot reads its prompt and its own tokens, and nothing else."""
  per_shard = scheduler.capacity.slots
  read = {slot: [] for slot in np.flatnonzero(inputs.active).tolist()}
  for rows in (inputs.tables.prompts, inputs.tables.completions):
    for shard in range(scheduler.capacity.shards):
      for slots, pages, start, end in rows_of(rows, shard):
        for local in set(slots.tolist()):
          read[shard * per_shard + local] += memory.read(shard, pages, start, end)
  for slot, content in read.items():
    prompt, index = scheduler.slots.completions[slot].tolist()
    expected = [[prompt, -1, i] for i in range(prompt_lengths[prompt])]
    assert content == expected + [[prompt, index, i] for i in range(inputs.generated[slot])]
  written = inputs.tables.written.reshape(scheduler.capacity.shards, -1)
  assert all(len(set(row)) == len(row) for row in written.tolist())


@settings(max_examples=60, deadline=None)
@given(
  prompts=st.integers(1, 8),
  group=st.integers(1, 5),
  shards=st.integers(1, 2),
  slots=st.integers(1, 8),
  page=st.sampled_from([2, 4, 16]),
  chunk=st.integers(1, 9),
  limit=st.integers(1, 40),
  spare=st.integers(0, 30),
  fewer=st.integers(0, 2),
  seed=st.integers(0, 999),
)
def test_every_completion_ends_however_few_pages_there_are(
  prompts, group, shards, slots, page, chunk, limit, spare, fewer, seed
):
  """From a pool for a single longest prompt and completion to one that is never used up."""
  rng = np.random.default_rng(seed)
  prompt_lengths = rng.integers(1, 12, prompts)
  prompt_pages = -(-int(prompt_lengths.max()) // page)
  completion_pages = -(-limit // page)
  pool = PoolSizes(
    prompt_pages + completion_pages + spare, page, prompt_pages, completion_pages, chunk, 2
  )
  lengths = rng.integers(1, limit + 1, (prompts, group))
  run(pool, shards, slots, lengths, prompt_lengths, limit, fewer)


def test_with_pages_for_all_nothing_waits():
  lengths = np.full((3, 4), 20)
  pool = PoolSizes(12 * 5 + 3, 4, 1, 5, 6, 4)
  assert run(pool, 1, 12, lengths, np.full(3, 4), 20) == (12 * 4, 0)


def test_completions_that_wait_for_pages():
  """Two of 20 tokens need 5 pages each, and there are 9: the younger waits for the last one."""
  pool = PoolSizes(10, 4, 1, 5, 4, 4)
  # 4 + 4 pages are given out; the ninth goes to the older, after whose end the younger goes on.
  assert run(pool, 1, 2, np.full((1, 2), 20), np.full(1, 4), 20) == (10, 1)


def log_normal_lengths(rng, count):
  return np.minimum(np.maximum(rng.lognormal(np.log(3000), 1.0, count), 1), 18000).astype(int)


def test_long_tailed_lengths_do_not_wait_in_less_than_half_of_the_memory():
  """256 slots, lengths of median 3,000 and at most 18,000: 45 % of the pages of full lengths."""
  rng = np.random.default_rng(0)
  slots, page, limit, group = 256, 128, 18000, 16
  completion_pages = -(-limit // page)
  pool = PoolSizes(int(0.45 * slots * completion_pages), page, 8, completion_pages, 64, 16)
  lengths = log_normal_lengths(rng, (64, group))
  scheduler = make_scheduler(pool, 1, slots, lengths, np.full(64, 1000), limit)
  _, chunks = play(scheduler, lengths, pool.chunk, 4)
  assert scheduler.space.statistics()["sampling/waiting"] == 0.0
  assert chunks >= lengths.sum() / slots / pool.chunk
