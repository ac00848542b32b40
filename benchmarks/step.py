"""Times one on-policy step (sample, reward, update) on the workload used to measure TRL and Tunix.

    python benchmarks/step.py [--json FILE] [--algorithm gtpo] [--steps 6] [--vocab 32768] ...
    python benchmarks/step.py --model HF_FOLDER --compute_dtype bfloat16 --prompts 8 ...

The model is a Qwen2 with random weights in float32, 4 layers of width 256 and a vocabulary of 8192,
or that of a Hugging Face folder. A step has 4 prompts of 64 tokens x 8 completions of exactly 128
tokens at temperature 1, and one update with AdamW and no KL term. Prints medians and minima over
the steps after the first, and what the matrix products alone take on the same device (`*_floor_s`,
see benchmarks/floors.py) if there is one.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax

jax.config.update("jax_compilation_cache_dir", None)  # so that the first step compiles

import floors
from measuring import show, store, versions

from gtpo_jax import algorithms
from gtpo_jax.arrays import Rewards
from gtpo_jax.models import Transformer
from gtpo_jax.models.config import DTYPES, REMAT
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.runtime.resource_limits import return_freed_memory
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.training.head_logits import default_chunk
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import make_update

DEFAULTS = {
  "vocab": 8192,
  "width": 256,
  "layers": 4,
  "prompts": 4,
  "group": 8,
  "prompt_len": 64,
  "response_len": 128,
  "steps": 6,
}


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default in DEFAULTS.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--algorithm", default="grpo", choices=algorithms.RECIPES)
  parser.add_argument("--model", help="a Hugging Face folder, instead of random weights")
  parser.add_argument("--compute_dtype", default="float32", choices=DTYPES)
  parser.add_argument("--remat", default="full", choices=REMAT, help="as model.remat")
  parser.add_argument("--json")
  args = parser.parse_args()
  if args.steps < 2:
    parser.error(
      f"--steps must be at least 2, got {args.steps}: the first step compiles and is not counted"
    )
  return args


def run_steps(
  args: argparse.Namespace,
) -> tuple[list[tuple[float, float, float]], dict[str, float], int]:
  """Returns the seconds (step, sampling, update) of each step, and the metrics of the first.

  Those compare sampler and trainer for the same weights whatever the other arguments are. The last
  result is how many completions the engine samples at once.
  """
  prepare_devices()
  model = Transformer(floors.workload_model(args), make_mesh())
  optimizer = make_optimizer(OptimizerConfig(), args.steps)
  update = make_update(model, algorithms.make(args.algorithm), optimizer)
  # Without stop tokens, every completion has the same length.
  settings = ProgramSettings(
    model, stop=(), pad=0, max_prompt_tokens=args.prompt_len, max_tokens=args.response_len
  )
  engine = Engine(settings)
  state = init_state(floors.workload_params(args, model), optimizer, model)
  rng = np.random.default_rng(0)
  seconds = []
  first = {}
  for step in range(args.steps):
    prompts = rng.integers(1, model.config.vocab_size, (args.prompts, args.prompt_len)).tolist()
    started = time.perf_counter()
    rollouts = jax.block_until_ready(
      engine.sample(
        engine.layout(state.params),
        prompts,
        jax.random.key(step),
        group=args.group,
        sampling_params=SamplingParams(),
      )
    )
    sampled = time.perf_counter()
    correct = fetch(rollouts.tokens).sum(-1) % 2 == 0
    reward = correct.astype(np.float32)
    rewards = shard_batch(Rewards(correct, reward, np.zeros_like(reward)), model.mesh)
    rewarded = time.perf_counter()
    return_freed_memory()
    state, metrics = jax.block_until_ready(update(state, rollouts, rewards))
    ended = time.perf_counter()
    first = first or {name: float(value) for name, value in metrics.items()}
    seconds.append((ended - started, sampled - started, ended - rewarded))
  return seconds, first, engine.programs.config.slots


def measure_floors(args: argparse.Namespace, slots: int) -> dict[str, float | None]:
  """Returns the FLOP and the seconds of the matrix products that each phase needs at least.

  The seconds are None if several devices share the products.

  Args:
    args: the arguments.
    slots: how many completions are sampled at once.
  """
  c = floors.workload_model(args)
  prompt_tokens = args.prompts * args.prompt_len
  completions = args.prompts * args.group
  tokens = completions * args.response_len
  chunk = default_chunk(make_mesh(), c.vocab_size)
  products = {
    "sample": floors.sampling_products(c, prompt_tokens, completions, slots, args.response_len),
    "update": floors.update_products(c, prompt_tokens, tokens, chunk),
  }
  measured = {}
  for phase, of_phase in products.items():
    alone = jax.device_count() == 1
    seconds = floors.measure_seconds(of_phase, args.compute_dtype) if alone else None
    measured[f"{phase}_floor_s"] = seconds
    measured[f"{phase}_floor_tflop"] = floors.total_flops(of_phase) / 1e12
  return measured


def main() -> None:
  args = parse_args()
  seconds, metrics, slots = run_steps(args)
  fastest = np.min(seconds[1:], axis=0).tolist()
  step_s, sample_s, update_s = np.median(seconds[1:], axis=0).tolist()
  result = {
    "step_s": step_s,
    "sample_s": sample_s,
    "update_s": update_s,
    "least_step_s": fastest[0],
    "least_sample_s": fastest[1],
    "least_update_s": fastest[2],
    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
    "first_s": seconds[0][0],
    "tokens": args.prompts * args.group * args.response_len,
    "algorithm": args.algorithm,
    **versions(),
    "compute_dtype": args.compute_dtype,
    "remat": args.remat,
    "grad_norm": metrics["grad_norm"],
    **{name: value for name, value in metrics.items() if name.startswith("mismatch/")},
  }
  result |= measure_floors(args, slots)
  show(result)
  for phase in ("sample", "update"):
    if floor := result[f"{phase}_floor_s"]:
      print(f"{phase}: {result[f'{phase}_s'] / floor:.2f} x its matrix products alone")
  store(result, args.json)


if __name__ == "__main__":
  main()
