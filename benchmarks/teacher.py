"""Times what a teacher adds to a step, against the teacher's forward pass.

    python benchmarks/teacher.py [--json FILE] [--rounds 7] [--divergence reverse_kl]
    python benchmarks/teacher.py --model HF_FOLDER --compute_dtype bfloat16 --prompts 8 \
                                 --prompt_len 64 --response_len 32

The workload is that of step.py: 4 prompts of 64 tokens x 8 completions of 128, Qwen2 with 4 layers
of width 256, vocabulary 8192, float32; or the model of a Hugging Face folder. The teacher has the
policy's architecture and other weights. Five phases run interleaved: sampling, the update of
`grpo`, which has no teacher, the update of `opd` with the teacher's log-probs given, the teacher's
pass that computes them, and the update that matches the teacher's distributions. A step is sampling
and update, and with "sampled" the teacher's pass between them. Prints medians over the rounds;
compilation is not timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import step as step_benchmark

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Distillation
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.training.log_probs import make_scorer
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import make_update


def make_batch(args: argparse.Namespace, model: Transformer) -> tuple[Rollouts, Rewards]:
  """Returns random completions of the maximum length."""
  rng = np.random.default_rng(0)
  v = model.config.vocab_size
  n, g, p, t = args.prompts, args.group, args.prompt_len, args.response_len
  rollouts = Rollouts(
    prompts=Prompts(rng.integers(1, v, (n, p), np.int32), np.full(n, p, np.int32)),
    tokens=rng.integers(1, v, (n, g, t), np.int32),
    present=np.ones((n, g, t), bool),
    mask=np.ones((n, g, t), bool),
    log_probs=np.full((n, g, t), -np.log(v), np.float32),
    entropy=rng.gamma(1.0, 1.0, (n, g, t)).astype(np.float32),
    finished=np.ones((n, g), bool),
    gaps=False,
  )
  correct = np.arange(n * g).reshape(n, g) % 2 == 0
  reward = correct.astype(np.float32)
  rewards = Rewards(correct, reward, penalty=0 * reward, valid=np.ones((n, g), bool))
  return shard_batch((rollouts, rewards), model.mesh)


def sampling(args: argparse.Namespace, model: Transformer) -> Callable[[], None]:
  """Returns what samples the completions of one step."""
  engine = Engine(
    model, stop=(), pad=0, max_prompt_tokens=args.prompt_len, max_tokens=args.response_len
  )
  rng = np.random.default_rng(0)
  params = init_params(model, jax.random.key(0))
  prompts = rng.integers(1, model.config.vocab_size, (args.prompts, args.prompt_len)).tolist()
  return lambda: jax.block_until_ready(
    engine.sample(
      engine.layout(params),
      prompts,
      jax.random.key(0),
      group=args.group,
      sampling_params=SamplingParams(),
    )
  )


def updating(
  model: Transformer, batch: tuple[Any, ...], distillation: Distillation | None = None
) -> Callable[[], None]:
  """Returns what makes one update with these arguments, of `grpo` without `distillation`."""
  optimizer = make_optimizer(OptimizerConfig(), 1000)
  state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
  algorithm = algorithms.make("opd", distillation) if distillation else algorithms.make("grpo")
  teacher = model if algorithm.recipe.matches_distributions else None
  update = make_update(model, algorithm, optimizer, teacher=teacher)

  def once() -> None:
    nonlocal state
    state, _ = jax.block_until_ready(update(state, *batch))

  return once


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default in step_benchmark.DEFAULTS.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--divergence", default="reverse_kl")
  parser.add_argument("--model", help="a Hugging Face folder, whose shape is used")
  parser.add_argument("--compute_dtype", default="float32")
  parser.add_argument("--remat", default="full")
  parser.add_argument("--json")
  args = parser.parse_args()

  prepare_devices()
  model = Transformer(step_benchmark.architecture(args), make_mesh())
  rollouts, rewards = make_batch(args, model)
  teacher = init_params(model, jax.random.key(1))
  score = make_scorer(model, 1.0, 1, 0)
  taught = rollouts.replace(teacher=score(teacher, rollouts))
  phases = {
    "sample_s": sampling(args, model),
    "plain_update_s": updating(model, (rollouts, rewards)),
    "update_s": updating(model, (taught, rewards), Distillation()),
    "teacher_s": lambda: jax.block_until_ready(score(teacher, rollouts)),
    "matching_update_s": updating(
      model, (rollouts, rewards, teacher), Distillation(divergence=args.divergence)
    ),
  }
  seconds: dict[str, list[float]] = {name: [] for name in phases}
  order = list(phases)
  for i in range(args.rounds + 1):
    order.reverse()
    for name in order:
      started = time.perf_counter()
      phases[name]()
      if i:  # the first call compiles
        seconds[name].append(time.perf_counter() - started)

  sample_s, plain_s, update_s, teacher_s, matching_s = (np.asarray(seconds[x]) for x in phases)
  step_s = sample_s + plain_s
  with_teacher = {
    "sampled": sample_s + teacher_s + update_s,
    args.divergence: sample_s + matching_s,
  }
  result = {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": jax.devices()[0].device_kind,
    "rounds": args.rounds,
    "divergence": args.divergence,
    **{name: float(np.median(x)) for name, x in seconds.items()},
    "added_by_matching": float(np.median((matching_s - update_s) / teacher_s)),
    "over_update_and_teacher": float(np.median(matching_s / (update_s + teacher_s)) - 1),
  }
  for name, taught_s in with_teacher.items():
    result[f"step_over_plain, {name}"] = float(np.median(taught_s / step_s))
    result[f"over_step_and_teacher, {name}"] = float(np.median(taught_s / (step_s + teacher_s)) - 1)
  for name, value in result.items():
    print(f"{name:<34} {value:.4g}" if isinstance(value, float) else f"{name:<34} {value}")
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
