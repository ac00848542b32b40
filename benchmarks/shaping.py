"""Times the update of each algorithm against that of GRPO without diagnostics.

    python benchmarks/shaping.py [--json FILE] [--rounds 8] [--algorithms gtpo,gtpo:cispo,grpo_s]

NAME:OBJECTIVE is an algorithm with another objective. The difference is the cost of reward shaping,
objective and diagnostics. The workload is that of step.py: 4 prompts of 64 tokens x 8 completions
of 128, Qwen2 with 4 layers of width 256, vocabulary 8192, float32. The updates run interleaved, so
that noise from other work on the machine affects all of them. Prints medians over the rounds;
compilation is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from unittest import mock

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax import algorithms
from gtpo_jax.algorithms import algorithm as algorithm_module
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.training import update as update_module
from gtpo_jax.training.state import OptimizerConfig, TrainState, init_state, make_optimizer

VOCAB = 8192
ARCHITECTURE = ModelConfig(VOCAB, 256, 4, heads=4, kv_heads=2, head_dim=64, mlp=1024)
N = 4
G = 8
P = 64
T = 128


@dataclasses.dataclass
class TimedUpdate:
  """A compiled update, its training state, and the seconds it took in each round."""

  update: update_module.Update
  state: TrainState
  seconds: list[float] = dataclasses.field(default_factory=list)


def make_batch(model: Transformer) -> tuple[Rollouts, Rewards]:
  """Returns random completions; each group has at least one correct and one incorrect."""
  rng = np.random.default_rng(0)
  correct = rng.random((N, G)) < 0.5
  correct[:, 0] = True
  correct[:, 1] = False
  rollouts = Rollouts(
    prompts=Prompts(rng.integers(1, VOCAB, (N, P), np.int32), np.full(N, P, np.int32)),
    tokens=rng.integers(1, VOCAB, (N, G, T), np.int32),
    present=np.ones((N, G, T), bool),
    mask=np.ones((N, G, T), bool),
    log_probs=np.full((N, G, T), -9.0, np.float32),
    entropy=rng.gamma(1.0, 1.0, (N, G, T)).astype(np.float32),
    finished=np.ones((N, G), bool),
  )
  reward = correct.astype(np.float32)
  rewards = Rewards(correct, reward, penalty=np.zeros_like(reward), valid=np.ones((N, G), bool))
  return shard_batch((rollouts, rewards), model.mesh)


def compile_update(spec: str, model: Transformer, batch: tuple[Rollouts, Rewards]) -> TimedUpdate:
  """Returns the update of the algorithm NAME or NAME:OBJECTIVE, compiled by a first call."""
  optimizer = make_optimizer(OptimizerConfig(), 1000)
  state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
  name, _, objective = spec.partition(":")
  algorithm = algorithms.make(name, **({"objective": objective} if objective else {}))
  update = update_module.make_update(model, algorithm, optimizer)
  state, _ = jax.block_until_ready(update(state, *batch))
  return TimedUpdate(update, state)


def compile_plain(model: Transformer, batch: tuple[Rollouts, Rewards]) -> TimedUpdate:
  """Returns the compiled update of GRPO without diagnostics."""
  no_metrics = mock.Mock(return_value={})
  with (
    mock.patch.multiple(update_module, batch_metrics=no_metrics, mismatch_metrics=no_metrics),
    mock.patch.object(algorithm_module, "ratio_metrics", no_metrics),
    mock.patch.object(algorithms.Algorithm, "credit_metrics", no_metrics),
  ):
    plain = compile_update("grpo", model, batch)
  update_module.make_update.cache_clear()  # or GRPO with diagnostics would get this function
  return plain


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=8)
  parser.add_argument("--algorithms", default="grpo,gtpo,grpo_s,gtpo:cispo,gtpo:kl_cov")
  parser.add_argument("--json")
  args = parser.parse_args()

  prepare_devices()

  model = Transformer(ARCHITECTURE, make_mesh())
  batch = make_batch(model)
  plain = compile_plain(model, batch)
  updates = {name: compile_update(name, model, batch) for name in args.algorithms.split(",")}
  order = [plain, *updates.values()]
  for _ in range(args.rounds):
    order.reverse()
    for timed in order:
      started = time.perf_counter()
      timed.state, _ = jax.block_until_ready(timed.update(timed.state, *batch))
      timed.seconds.append(time.perf_counter() - started)

  result = {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": jax.devices()[0].device_kind,
    "rounds": args.rounds,
    "plain_s": float(np.median(plain.seconds)),
  }
  for key, value in result.items():
    print(f"{key:<16} {value}")
  for name, timed in updates.items():
    ratios = np.asarray(timed.seconds) / plain.seconds  # less noisy than a ratio of medians
    update_s = float(np.median(timed.seconds))
    added = float(np.median(ratios) - 1)
    result[name] = {"update_s": update_s, "added": added}
    print(f"{name:<16} {update_s:.3f} s  {added:+.2%}")
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
