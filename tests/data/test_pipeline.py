import itertools
import json
import os
import socket
import subprocess
import sys

import pytest

from gtpo_jax.data.pipeline import Batches as MixedBatches
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.tasks import TaskPart, make_task
from gtpo_jax.runtime.errors import UserError

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
  forward = ids(Batches(task, SIZE, 3), steps)
  backward = ids(Batches(task, SIZE, 3), steps[::-1])[::-1]
  assert forward == backward
  assert all(len(batch) == SIZE for batch in forward)
  assert ids(Batches(task, SIZE, 4), steps) != forward


def test_what_is_read_ahead_is_what_is_asked_for(task):
  steps = [0, 1, 2, 2, 3, 1, 1, 2, 9, 10]
  batches = Batches(task, SIZE, 3)
  assert ids(batches, steps) == [ids(Batches(task, SIZE, 3), [step])[0] for step in steps]


def test_the_batch_size_does_not_change_the_order(task):
  by_11 = ids(Batches(task, SIZE, 0), range(6))
  by_22 = ids(Batches(task, 2 * SIZE, 0), range(3))
  assert joined(by_11) == joined(by_22)


def test_an_epoch_has_every_training_problem_once(task):
  count = len(task.train_ids)
  steps = -(-2 * count // SIZE)
  stream = joined(ids(Batches(task, SIZE, 0), range(steps)))
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
  assert [
    name for name in joined(ids(mixed, range(20))) if name.startswith("sums")
  ] == alone  # the order within a source is its own


def sharded(task, process, processes, size=12, seed=3):
  return MixedBatches(PARTS(task), size, seed, process, processes)


def PARTS(task):
  other = make_task("countdown", 3, 9)
  return [(TaskPart(task, task.train_ids), 2.0), (TaskPart(other, other.train_ids), 1.0)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 12])
def test_the_rows_of_all_processes_in_order_are_the_batch_of_one(task, processes):
  whole = MixedBatches(PARTS(task), 12, 3)
  steps = [0, 1, 7, 200, 2]
  shards = [ids(sharded(task, process, processes), steps) for process in range(processes)]
  assert [joined(parts) for parts in zip(*shards, strict=True)] == ids(whole, steps)
  assert all(len(set(map(len, parts))) == 1 for parts in shards)


@pytest.mark.parametrize(("process", "processes"), [(2, 2), (-1, 2), (0, 13)])
def test_processes_that_get_no_rows(task, process, processes):
  with pytest.raises(
    UserError, match=f"batch.prompts = 12 cannot be cut for process {process} of {processes}"
  ):
    sharded(task, process, processes)


PROCESS = """
import json, sys
import jax
import numpy as np
address, process, processes, first, last = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, processes, process)
from jax.experimental import multihost_utils
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.data.tasks import TaskPart, make_task
from gtpo_jax.runtime.mesh import make_mesh, named_sharding
sums, countdown = make_task("sums", 1, 9), make_task("countdown", 3, 9)
parts = [(TaskPart(sums, sums.train_ids), 2.0), (TaskPart(countdown, countdown.train_ids), 1.0)]
batches = Batches(parts, 12, 3, jax.process_index(), jax.process_count())
own, whole = [], []
for step in range(first, last):
  own.append([problem.id for problem in batches[step]])
  numbers = np.asarray([int(name.split("-")[1]) for name in own[-1]], np.int32)
  placed = jax.make_array_from_process_local_data(named_sharding(make_mesh(), "batch"), numbers)
  whole.append(multihost_utils.process_allgather(placed, tiled=True).tolist())
print(json.dumps([own, whole]))
"""


def run_processes(processes, first, last):
  """What each of several real processes, two devices each, sees of the steps, and what lies on the mesh of all of them."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
  started = [
    subprocess.Popen(
      [sys.executable, "-c", PROCESS, address, *map(str, (i, processes, first, last))],
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for i in range(processes)
  ]
  try:
    said = [process.communicate(timeout=120) for process in started]
  finally:
    for process in started:
      process.kill()
  assert all(process.returncode == 0 for process in started), [err[-2000:] for _, err in said]
  return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_two_real_processes_and_a_resume_by_one(task):
  """Steps 0-3 on two processes, then 4-5 on one: disjoint rows, in order the batch of one process, on the mesh too."""
  whole = ids(MixedBatches(PARTS(task), 12, 3), range(6))
  two = run_processes(2, 0, 4)
  one = run_processes(1, 4, 6)
  (first, on_mesh), (second, same) = two
  for step in range(4):
    assert len(first[step]) == len(second[step]) == 6 and not set(first[step]) & set(second[step])
    assert first[step] + second[step] == whole[step]
    assert on_mesh[step] == same[step] == [int(name.split("-")[1]) for name in whole[step]]
  assert one[0][0] == whole[4:]
