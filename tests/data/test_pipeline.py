import itertools

import pytest

from gtpo_jax.data.pipeline import Batches as MixedBatches
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.tasks import TaskPart, make_task

SIZE = 11


def Batches(task, size, seed):
  return MixedBatches([(TaskPart(task, task.train_ids), 1.0)], size, seed)


def held_out(task, count):
  return fixed_sample(TaskPart(task, task.held_out_ids), count)


@pytest.fixture(scope="module")
def task():
  return make_task("sums", 1, 9)  # 638 training problems or so: an epoch is short


def ids(batches, steps):
  return [[problem.id for problem in batches[step]] for step in steps]


def joined(lists):
  return list(itertools.chain.from_iterable(lists))


def test_a_batch_is_a_pure_function_of_seed_and_step(task):
  steps = [0, 1, 2, 57, 58, 1000]
  forward, backward = ids(Batches(task, SIZE, 3), steps), ids(Batches(task, SIZE, 3), steps[::-1])[::-1]
  assert forward == backward
  assert all(len(batch) == SIZE for batch in forward)
  assert ids(Batches(task, SIZE, 4), steps) != forward


def test_the_batch_size_does_not_change_the_order(task):
  by_11, by_22 = ids(Batches(task, SIZE, 0), range(6)), ids(Batches(task, 2 * SIZE, 0), range(3))
  assert joined(by_11) == joined(by_22)


def test_an_epoch_has_every_training_problem_once(task):
  count = len(task.train_ids)
  steps = -(-2 * count // SIZE)
  stream = joined(ids(Batches(task, SIZE, 0), range(steps)))
  train = {f"sums-{index}" for index in task.train_ids}
  first, second = stream[:count], stream[count:2 * count]
  for epoch in (first, second):
    assert len(set(epoch)) == count
    assert set(epoch) == train
  assert first != second
  assert first != sorted(first, key=lambda name: int(name.split("-")[1]))


def test_held_out_problems_are_fixed_and_never_trained_on(task):
  some = held_out(task, 20)
  assert len({problem.id for problem in some}) == 20
  assert held_out(task, 20) == some
  assert {problem.id for problem in some} <= {f"sums-{index}" for index in task.held_out_ids}
  assert held_out(task, 10) == some[:10]


def test_all_held_out_problems_where_more_are_asked_for(task):
  everything = held_out(task, 10**6)
  assert len(everything) == len(task.held_out_ids)
  assert {problem.id for problem in everything} == {f"sums-{index}" for index in task.held_out_ids}


def test_sources_take_turns_by_their_weights(task):
  other = make_task("countdown", 3, 9)
  parts = [(TaskPart(task, task.train_ids), 1.0), (TaskPart(other, other.train_ids), 3.0)]
  mixed = MixedBatches(parts, 16, 0)
  names = [problem.id.split("-")[0] for step in range(20) for problem in mixed[step]]
  assert names.count("sums") == 80 and names.count("countdown") == 240
  assert ids(mixed, [19, 3]) == ids(MixedBatches(parts, 16, 0), [19, 3])
  alone = joined(ids(Batches(task, 16, 0), range(5)))
  assert [name for name in joined(ids(mixed, range(20))) if name.startswith("sums")] == alone  # the order within a source is its own
