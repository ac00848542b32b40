"""Three steps give the same losses and parameters on any mesh, in two processes and packed."""

import dataclasses

import jax
import numpy as np
import pytest
from command_line import run_connected
from meshes import mesh_of
from toys import TOY

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import shard_batch
from gtpo_jax.training.packing import plan_rows
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update

pytestmark = pytest.mark.devices

CONFIG = dataclasses.replace(TOY, vocab_size=64, matmul_precision="highest")
N = 8
G = 4
P = 6
T = 70  # two attention blocks, the second not full


def batch(step):
  """Rollouts of uneven lengths and their rewards, a pure function of the step."""
  rng = np.random.default_rng(step)
  mask = np.arange(T) < rng.integers(1, T + 1, (2, N, G, 1)).min(0)
  prompts = Prompts(
    rng.integers(0, 64, (N, P)).astype(np.int32), rng.integers(1, P + 1, N).astype(np.int32)
  )

  def uniform(low, high):
    return np.where(mask, rng.uniform(low, high, (N, G, T)), 0).astype(np.float32)

  tokens = rng.integers(0, 64, (N, G, T)).astype(np.int32)
  correct = rng.random((N, G)) < 0.5
  log_probs = uniform(-4.4, -3.9)
  entropy = uniform(0.5, 4.0)
  rollouts = Rollouts(prompts, tokens, mask, mask, log_probs, entropy, mask.sum(-1) < T)
  return rollouts, Rewards(correct, correct.astype(np.float32), np.zeros((N, G), np.float32))


def three_steps(mesh, micro_batches=1, pack=False):
  """The losses of three GTPO steps and the parameters after them, on the host."""
  model = Transformer(CONFIG, mesh)
  optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, eps=1e-3), 10)
  update = make_update(
    model,
    algorithms.make("gtpo"),
    optimizer,
    UpdateSettings(micro_batches=micro_batches, head_chunk=64),
  )
  state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
  losses = []
  for step in range(3):
    rollouts, rewards = batch(step)
    if pack:
      rollouts = rollouts.replace(packing=plan_rows(rollouts.mask.sum(-1), T))
      assert rollouts.packing.source.shape[1] < G
    state, metrics = update(state, *shard_batch((rollouts, rewards), mesh))
    losses.append(float(metrics["loss"]))
  return losses, jax.tree.leaves(fetch(state.params))


@pytest.fixture(scope="module")
def one_device():
  mesh = mesh_of(1, 1, 1, 1)
  losses, params = three_steps(mesh)
  start = jax.tree.leaves(jax.device_get(init_params(Transformer(CONFIG, mesh), jax.random.key(0))))
  assert max(np.abs(a - b).max() for a, b in zip(params, start, strict=True)) > 5e-3
  return losses, params


def assert_same(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
  ("shape", "micro_batches"),
  [
    ((1, 2, 2, 2), 2),
    *(
      pytest.param(*row, marks=pytest.mark.manual)
      for row in [
        ((8, 1, 1, 1), 1),
        ((2, 2, 1, 2), 2),  # also that of the two processes below
        ((1, 1, 1, 1), 2),
        ((1, 8, 1, 1), 1),
        ((2, 2, 1, 2), 1),
        ((1, 1, 1, 2), 1),
        ((1, 1, 1, 2), 4),
        ((1, 1, 2, 1), 1),
        ((2, 1, 4, 1), 1),  # 70 positions are not divisible by 4, so they are not sharded
      ]
    ),
  ],
)
@pytest.mark.slow
def test_on_every_mesh(one_device, shape, micro_batches):
  assert_same(three_steps(mesh_of(*shape), micro_batches), one_device)


CHILD = """
import numpy as np
sys.path[:0] = ["tests", "tests/training"]
from meshes import mesh_of
from test_equivalence import three_steps
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
losses, params = three_steps(mesh_of(2, 2, 1, 2), micro_batches=2)
if jax.process_index() == 0:
  np.savez(sys.argv[4], losses, *params)
"""


@pytest.mark.slow
def test_in_two_processes(one_device, tmp_path):
  run_connected(CHILD, 2, 4, tmp_path / "out.npz", NPROC="128")
  with np.load(tmp_path / "out.npz") as arrays:
    losses, *params = (arrays[name] for name in arrays.files)
  assert_same((losses, params), one_device)
