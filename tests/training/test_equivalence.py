"""Three steps give the same loss and parameters on every mesh, in two processes, and however the batch is cut."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.training.packing import plan_rows
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import make_update

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
  vocab_size=64,
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp=64,
  matmul_precision="highest",
)
N = 8  # two blocks of attention, of which one is not whole
G = 4
P = 6
T = 70


def batch(step):
  """Rollouts of uneven lengths and their verdicts, a pure function of the step."""
  rng = np.random.default_rng(step)
  mask = np.arange(T) < rng.integers(1, T + 1, (2, N, G, 1)).min(0)
  prompts = Prompts(
    rng.integers(0, 64, (N, P)).astype(np.int32), rng.integers(1, P + 1, N).astype(np.int32)
  )
  number = lambda low, high: np.where(mask, rng.uniform(low, high, (N, G, T)), 0).astype(np.float32)
  tokens = rng.integers(0, 64, (N, G, T)).astype(np.int32)
  correct = rng.random((N, G)) < 0.5
  rollouts = Rollouts(prompts, tokens, mask, number(-4.4, -3.9), number(0.5, 4.0), mask.sum(-1) < T)
  return rollouts, Rewards(correct, correct.astype(np.float32), np.zeros((N, G), np.float32))


def three_steps(mesh, micro_batches=1, pack=False):
  """The loss of each of three steps of GTPO, and the parameters after them, on the host."""
  model = Qwen2(CONFIG, mesh)
  optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, eps=1e-3), 10)
  update = make_update(
    model, algorithms.make("gtpo"), optimizer, micro_batches=micro_batches, head_chunk=64
  )
  state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
  losses = []
  for step in range(3):
    rollouts, verdicts = batch(step)
    if pack:
      rollouts = rollouts.replace(packing=plan_rows(rollouts.mask.sum(-1), T))
      assert rollouts.packing.source.shape[1] < G
    state, metrics = update(state, *shard_batch((rollouts, verdicts), mesh))
    losses.append(float(metrics["loss"]))
  return losses, jax.tree.leaves(fetch(state.params))


@pytest.fixture(scope="module")
def one_device():
  return three_steps(make_mesh(1, 1, 1, jax.devices()[:1]))


def on(shape):
  """The mesh of these sizes, (data, fsdp, tensor) or with context behind them."""
  return make_mesh(*shape[:3], jax.devices()[: int(np.prod(shape))], *shape[3:])


def assert_same(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_three_steps_move_the_parameters(one_device):
  start = jax.tree.leaves(
    jax.device_get(
      init_params(Qwen2(CONFIG, make_mesh(1, 1, 1, jax.devices()[:1])), jax.random.key(0))
    )
  )
  assert max(np.abs(a - b).max() for a, b in zip(one_device[1], start, strict=True)) > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "micro_batches"),
  [
    ((1, 1, 1), 2),
    ((8, 1, 1), 1),
    ((1, 8, 1), 1),
    ((2, 2, 2), 1),
    ((2, 2, 2), 2),
    ((1, 1, 2), 1),
    ((1, 1, 2), 4),
    ((1, 1, 1, 2), 1),
    ((1, 2, 2, 2), 2),
    ((2, 1, 1, 4), 1),
  ],
)  # 70 positions do not divide over the last: they stay whole
def test_on_every_mesh(one_device, shape, micro_batches):
  assert_same(three_steps(on(shape), micro_batches), one_device)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "micro_batches"),
  [
    ((1, 1, 1), 1),
    ((1, 1, 1), 2),
    ((8, 1, 1), 1),
    ((2, 2, 2), 2),
    ((1, 1, 2), 1),
    ((1, 2, 2, 2), 1),
  ],
)
def test_packed_on_every_mesh(one_device, shape, micro_batches):
  assert_same(three_steps(on(shape), micro_batches, pack=True), one_device)


CHILD = """
import sys
import jax, numpy as np
port, rank, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
sys.path.insert(0, "tests/training")
from test_equivalence import three_steps
from gtpo_jax.runtime.mesh import make_mesh
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
losses, params = three_steps(make_mesh(2, 2, 2), micro_batches=2)
if rank == 0:
  np.savez(out, losses, *params)
"""


@pytest.mark.slow
def test_in_two_processes(one_device, tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "NPROC": "128"}
  command = [sys.executable, "-c", CHILD, str(port)]
  children = [
    subprocess.Popen(
      [*command, str(rank), tmp_path / "out.npz"],
      cwd=ROOT,
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for rank in range(2)
  ]
  try:
    said = [child.communicate(timeout=240) for child in children]
  finally:
    for child in children:
      child.kill()
  assert [child.returncode for child in children] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
  with np.load(tmp_path / "out.npz") as found:
    losses, *params = (found[name] for name in found.files)
  assert_same((losses, params), one_device)
