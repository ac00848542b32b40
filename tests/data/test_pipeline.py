"""Batches of problems, on one process and on several."""

import itertools
import json

import pytest
from command_line import run_connected

from gtpo_jax.data.pipeline import Batches, fixed_sample
from gtpo_jax.data.tasks import TaskPart, make_task
from gtpo_jax.runtime.errors import UserError

SIZE = 11


def batches_of(task, size, seed):
  return Batches([(TaskPart(task, task.train_ids), 1.0)], size, seed)


def held_out(task, count):
  return fixed_sample(TaskPart(task, task.held_out_ids), count)


@pytest.fixture(scope="module")
def task():
  return make_task("sums", 1, 9)  # about 638 training problems: an epoch is short


def ids(batches, steps):
  return [[problem.id for problem in batches[step]] for step in steps]


def joined(lists):
  return list(itertools.chain.from_iterable(lists))


def test_a_batch_is_a_pure_function_of_seed_and_step(task):
  steps = [0, 1, 2, 57, 58, 1000]
  forward = ids(batches_of(task, SIZE, 3), steps)
  backward = ids(batches_of(task, SIZE, 3), steps[::-1])[::-1]
  assert forward == backward
  assert all(len(batch) == SIZE for batch in forward)
  assert ids(batches_of(task, SIZE, 4), steps) != forward


def test_prefetched_batches_are_the_requested_ones(task):
  steps = [0, 1, 2, 2, 3, 1, 1, 2, 9, 10]
  batches = batches_of(task, SIZE, 3)
  assert ids(batches, steps) == [ids(batches_of(task, SIZE, 3), [step])[0] for step in steps]


def test_the_batch_size_does_not_change_the_order(task):
  by_11 = ids(batches_of(task, SIZE, 0), range(6))
  by_22 = ids(batches_of(task, 2 * SIZE, 0), range(3))
  by_1 = ids(batches_of(task, 1, 0), range(6 * SIZE))
  assert joined(by_11) == joined(by_22) == joined(by_1)


def test_an_epoch_has_every_training_problem_once(task):
  count = len(task.train_ids)
  steps = -(-2 * count // SIZE)
  stream = joined(ids(batches_of(task, SIZE, 0), range(steps)))
  train = {f"sums-{index}" for index in task.train_ids}
  first = stream[:count]
  second = stream[count : 2 * count]
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


def test_a_sample_larger_than_its_source_is_the_source(task):
  everything = held_out(task, 10**6)
  assert len(everything) == len(task.held_out_ids)
  assert {problem.id for problem in everything} == {f"sums-{index}" for index in task.held_out_ids}


def test_sources_alternate_by_their_weights(task):
  other = make_task("countdown", 3, 9)
  parts = [(TaskPart(task, task.train_ids), 1.0), (TaskPart(other, other.train_ids), 3.0)]
  mixed = Batches(parts, 16, 0)
  names = [problem.id.split("-")[0] for step in range(20) for problem in mixed[step]]
  assert names.count("sums") == 80 and names.count("countdown") == 240
  assert ids(mixed, [19, 3]) == ids(Batches(parts, 16, 0), [19, 3])
  # The order within a source does not depend on the other source.
  alone = joined(ids(batches_of(task, 16, 0), range(5)))
  assert [name for name in joined(ids(mixed, range(20))) if name.startswith("sums")] == alone


def two_sources(task):
  other = make_task("countdown", 3, 9)
  return [(TaskPart(task, task.train_ids), 2.0), (TaskPart(other, other.train_ids), 1.0)]


def slice_of(task, process_index, process_count):
  return Batches(two_sources(task), 12, 3, process_index, process_count)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 12])
def test_the_slices_of_all_processes_are_the_batch_of_one(task, processes):
  single = Batches(two_sources(task), 12, 3)
  steps = [0, 1, 7, 200, 2]
  shards = [ids(slice_of(task, process, processes), steps) for process in range(processes)]
  assert [joined(parts) for parts in zip(*shards, strict=True)] == ids(single, steps)
  assert all(len(set(map(len, parts))) == 1 for parts in shards)


@pytest.mark.parametrize(("process", "processes"), [(2, 2), (-1, 2), (0, 13)])
def test_processes_without_rows_are_rejected(task, process, processes):
  message = f"batch.prompts = 12 cannot be divided for process {process} of {processes}"
  with pytest.raises(UserError, match=message):
    slice_of(task, process, processes)


PROCESS = """
import json
import numpy as np
first, last = map(int, sys.argv[4:])
from jax.experimental import multihost_utils
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.data.tasks import TaskPart, make_task
from gtpo_jax.runtime.mesh import make_mesh, named_sharding
sums = make_task("sums", 1, 9)
countdown = make_task("countdown", 3, 9)
sources = [(TaskPart(sums, sums.train_ids), 2.0), (TaskPart(countdown, countdown.train_ids), 1.0)]
batches = Batches(sources, 12, 3, jax.process_index(), jax.process_count())
own = []
everyone = []
for step in range(first, last):
  own.append([problem.id for problem in batches[step]])
  numbers = np.asarray([int(name.split("-")[1]) for name in own[-1]], np.int32)
  array = jax.make_array_from_process_local_data(named_sharding(make_mesh(), "batch"), numbers)
  everyone.append(multihost_utils.process_allgather(array, tiled=True).tolist())
print(json.dumps([own, everyone]))
"""


def run_processes(processes, first, last):
  """Returns the batches of several real processes with two devices each, and their arrays."""
  outputs = run_connected(PROCESS, processes, 2, first, last)
  return [json.loads(out.splitlines()[-1]) for out in outputs]


@pytest.mark.slow
def test_two_real_processes_and_a_resume_by_one(task):
  """Steps 0-3 on two processes, then 4-5 on one, equal the batches of a single process."""
  expected = ids(Batches(two_sources(task), 12, 3), range(6))
  (first, first_mesh), (second, second_mesh) = run_processes(2, 0, 4)
  ((resumed, _),) = run_processes(1, 4, 6)
  for step in range(4):
    assert len(first[step]) == len(second[step]) == 6
    assert not set(first[step]) & set(second[step])
    assert first[step] + second[step] == expected[step]
    numbers = [int(name.split("-")[1]) for name in expected[step]]
    assert first_mesh[step] == second_mesh[step] == numbers
  assert resumed == expected[4:]
