"""What shaping and diagnostics add to the compiled update: each algorithm against plain GRPO without any diagnostics.

    python benchmarks/shaping.py [--json FILE] [--rounds 8] [--algorithms gtpo,grpo_s]

The update of the peers' workload (see step.py): 4 prompts of 64 tokens x 8 completions of 128, Qwen2 of 4 layers, width 256,
vocabulary 8192, float32. The updates take turns, so that what disturbs the machine disturbs all alike; medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from unittest import mock

import numpy as np

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.training import update as update_module
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

SHAPE = ModelConfig(8192, 256, 4, heads=4, kv_heads=2, head_dim=64, mlp=1024)
N = 4
G = 8
P = 64
T = 128


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=8)
  parser.add_argument("--algorithms", default="grpo,gtpo,grpo_s,dapo_forking")
  parser.add_argument("--json")
  args = parser.parse_args()

  model = Qwen2(SHAPE, make_mesh())
  rng = np.random.default_rng(0)
  optimizer = make_optimizer(OptimizerConfig(), 1000)
  correct = rng.random((N, G)) < 0.5
  correct[:, 0], correct[:, 1] = True, False
  rollouts = Rollouts(
    Prompts(rng.integers(1, 8192, (N, P), np.int32), np.full(N, P, np.int32)),
    rng.integers(1, 8192, (N, G, T), np.int32),
    np.ones((N, G, T), bool),
    np.full((N, G, T), -9.0, np.float32),
    rng.gamma(1.0, 1.0, (N, G, T)).astype(np.float32),
    np.ones((N, G), bool),
  )
  batch = shard_batch(
    (
      rollouts,
      Rewards(
        correct, correct.astype(np.float32), np.zeros((N, G), np.float32), np.ones((N, G), bool)
      ),
    ),
    model.mesh,
  )

  def prepared(name: str) -> list:
    """[the update, its state, its seconds]."""
    state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
    update = update_module.make_update(model, algorithms.make(name), optimizer)
    state, _ = jax.block_until_ready(update(state, *batch))
    return [update, state, []]

  none = mock.Mock(return_value={})
  with (
    mock.patch.multiple(update_module, measure=none, mismatch=none),
    mock.patch.object(algorithms.Algorithm, "credit_metrics", none),
  ):
    runs = {"plain": prepared("grpo")}
  runs |= {name: prepared(name) for name in args.algorithms.split(",")}
  for i in range(args.rounds):
    for name in list(runs) if i % 2 else list(runs)[::-1]:
      update, state, seconds = runs[name]
      began = time.perf_counter()
      runs[name][1], _ = jax.block_until_ready(update(state, *batch))
      seconds.append(time.perf_counter() - began)

  plain = np.asarray(runs["plain"][2])
  result = {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": jax.devices()[0].device_kind,
    "rounds": args.rounds,
    "plain_s": float(np.median(plain)),
  }
  for name in runs.keys() - {"plain"}:
    ratio = np.asarray(runs[name][2]) / plain  # of the same round
    result[name] = {
      "update_s": float(np.median(runs[name][2])),
      "added": float(np.median(ratio) - 1),
    }
  for name, value in result.items():
    print(
      f"{name:<16} {value['update_s']:.3f} s  {value['added']:+.2%}"
      if isinstance(value, dict)
      else f"{name:<16} {value}"
    )
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
