"""Compares our engine with other libraries: sampled tokens per second with long-tailed lengths.

    python benchmarks/sampling.py [--json FILE] [--peers transformers] [--rounds 5] [--slots 16] ...
    python benchmarks/sampling.py --model HF_FOLDER --completions 595 --group 5 \\
      --shortest_prompt 30 --prompt_len 320 --median 40 --sigma 0 --longest 40 ...

The model is that of benchmarks/step.py, with random weights in float32, or that of a Hugging Face
folder. One completion (`--group`) is sampled for each of 64 prompts of 64 tokens, at temperature 1;
with `--shortest_prompt`, the lengths of the prompts are uniform from it to `--prompt_len`. The
lengths of the completions are drawn beforehand from a log-normal distribution with median 32, cut
at 512. Our engine ends each completion at its drawn length and starts another in its slot. The
other libraries (`--peers`) sample all completions as one batch until the longest is done, as they
would with unknown lengths.

Tokens per second are the sum of the drawn lengths, divided by the median time of a round. Tokens
that another library generates beyond a drawn length are not counted. In each round our engine and
the others run once, one after another; the first round, which compiles, is discarded.
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import floors
import jax
from measuring import store, versions

from gtpo_jax.models import Transformer
from gtpo_jax.models.config import DTYPES
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams


def ours(
  args: argparse.Namespace, lengths: np.ndarray, prompts: list[list[int]]
) -> Callable[[int], dict[str, float]]:
  """Returns a function that samples all completions with our engine, given a seed.

  It returns the seconds of each of `PHASES`.
  """
  prepare_devices()
  model = Transformer(floors.workload_model(args), make_mesh())
  settings = ProgramSettings(
    model,
    stop=(),
    pad=0,
    max_prompt_tokens=args.prompt_len,
    max_tokens=args.longest,
    config=EngineConfig(slots=args.slots),
  )
  engine = Engine(settings)
  params = engine.layout(floors.workload_params(args, model))
  limits = lengths.reshape(len(prompts), args.group)

  def call(seed: int) -> dict[str, float]:
    first = len(engine.spans)
    keys = engine.completion_keys(jax.random.key(seed), len(prompts), args.group)
    rows = engine.completions(prompts, keys, token_limits=limits)
    for _ in engine.generate(params, rows, sampling_params=SamplingParams()):
      pass
    assert [[completion.length for completion in row] for row in rows] == limits.tolist()
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in list(engine.spans)[first:]:
      seconds[span.phase] += span.end - span.begin
    return seconds

  return call


def transformers(
  args: argparse.Namespace, lengths: np.ndarray, prompts: list[list[int]]
) -> Callable[[int], None]:
  """Returns a function that samples all completions with Transformers, given a seed.

  A stopping criterion ends each row at its drawn length; the batch runs until the last row ends.
  """
  import torch
  from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria

  torch.manual_seed(0)
  model = Qwen2ForCausalLM(
    Qwen2Config(
      vocab_size=args.vocab,
      hidden_size=args.width,
      num_hidden_layers=args.layers,
      num_attention_heads=args.width // 64,
      num_key_value_heads=max(args.width // 128, 1),
      head_dim=64,
      intermediate_size=4 * args.width,
      tie_word_embeddings=True,
      eos_token_id=None,
      pad_token_id=0,
    )
  ).eval()

  class AtLength(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
      return torch.tensor(ids.shape[1] - args.prompt_len >= lengths)

  def call(seed: int) -> None:
    torch.manual_seed(seed)
    with torch.inference_mode():
      model.generate(
        torch.tensor(prompts),
        do_sample=True,
        top_k=0,
        temperature=1.0,
        max_new_tokens=args.longest,
        stopping_criteria=[AtLength()],
      )

  return call


PHASES = ("prefill", "decode")
PEERS = {"transformers": transformers}


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  sizes = {
    "vocab": 8192,
    "width": 256,
    "layers": 4,
    "prompt_len": 64,
    "completions": 64,
    "group": 1,
    "slots": 16,
    "median": 32,
    "longest": 512,
    "rounds": 5,
    "seed": 0,
  }
  for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--shortest_prompt", type=int, help="default: all have --prompt_len tokens")
  parser.add_argument("--model", help="a Hugging Face folder, instead of random weights")
  parser.add_argument("--compute_dtype", default="float32", choices=DTYPES)
  parser.set_defaults(remat="full")  # which sampling does not read
  parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log(length)")
  parser.add_argument("--peers", default="", help=f"other libraries to time: {','.join(PEERS)}")
  parser.add_argument("--json")
  args = parser.parse_args()
  args.peers = [name for name in args.peers.split(",") if name]
  if unknown := set(args.peers) - set(PEERS):
    parser.error(f"--peers names {unknown.pop()!r}; choose from {', '.join(PEERS)}")
  args.shortest_prompt = args.shortest_prompt or args.prompt_len
  if args.completions % args.group:
    parser.error(f"--completions {args.completions} is not a multiple of --group {args.group}")
  if args.peers and (args.model or args.group > 1 or args.shortest_prompt < args.prompt_len):
    parser.error("--peers sample one completion of prompts of one length from random weights")
  return args


def workload(args: argparse.Namespace) -> tuple[np.ndarray, list[list[int]]]:
  """Returns the completions' lengths i32[completions] and the prompts."""
  rng = np.random.default_rng(args.seed)
  drawn = np.exp(rng.normal(np.log(args.median), args.sigma, args.completions))
  lengths = np.clip(np.round(drawn), 1, args.longest).astype(int)
  vocab = floors.workload_model(args).vocab_size
  prompts = rng.integers(2, vocab, (args.completions // args.group, args.prompt_len)).tolist()
  if args.shortest_prompt < args.prompt_len:
    sizes = rng.integers(args.shortest_prompt, args.prompt_len + 1, len(prompts))
    prompts = [prompt[:size] for prompt, size in zip(prompts, sizes, strict=True)]
  return lengths, prompts


def median_seconds(calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
  """Returns the median seconds of each function over `rounds` rounds, after a first one.

  The phases that a function returns are included.
  """
  seconds: dict[str, list[float]] = collections.defaultdict(list)
  for seed in range(rounds + 1):
    for name, call in calls.items():
      started = time.perf_counter()
      phases = call(seed)
      seconds[name].append(time.perf_counter() - started)
      for phase, of_phase in (phases or {}).items():
        seconds[phase].append(of_phase)
  return {name: float(np.median(times[1:])) for name, times in seconds.items()}


def main() -> None:
  args = parse_args()
  lengths, prompts = workload(args)
  calls = {"ours": ours(args, lengths, prompts)}
  calls |= {name: PEERS[name](args, lengths, prompts) for name in args.peers}
  medians = median_seconds(calls, args.rounds)
  total = int(lengths.sum())
  result = {
    "tokens_per_s": total / medians["ours"],
    "tokens": total,
    "seconds": medians,
    "lengths": sorted(lengths.tolist()),
    "ratio": {name: medians[name] / medians["ours"] for name in args.peers},
    "slots": args.slots,
    "compute_dtype": args.compute_dtype,
    **versions(),
  }
  for name in calls:
    seconds = medians[name]
    ratio = seconds / medians["ours"]
    print(
      f"{name:<14} {seconds:8.3f} s {total / seconds:9.0f} tokens/s {ratio:6.2f} x the time of ours"
    )
  print("of these, " + ", ".join(f"{phase} {medians[phase]:.3f} s" for phase in PHASES))
  print(
    f"{total} tokens in {args.completions} completions, the longest {max(lengths)}; "
    f"our engine has {args.slots} slots"
  )
  store(result, args.json)


if __name__ == "__main__":
  main()
