"""Measures and simulates what partial rollouts (`sampling.staleness`) gain on long-tailed lengths.

    python benchmarks/partial_rollouts.py measure [--staleness 0,1,2] [--steps 20] [--rounds 3]
    python benchmarks/partial_rollouts.py simulate [--staleness 0,1,2,3,4] [--prompts 512,256,128]

`measure` samples with the engine on this machine: 64 completions a step (16 prompts in groups of
4) in 16 slots, with lengths from a log-normal distribution of median 32, cut at 512. The model is
that of benchmarks/step.py with random weights. Each completion ends at a length that is drawn
beforehand. Each staleness samples the same stream of groups; in each round they take turns. The
reading of carried-over tokens and everything that the host does are included, updates are not.

`simulate` computes the time of sampling for Qwen2.5-7B on 64 chips of TPU v5p, with lengths from a
log-normal distribution of median 3,000, cut at 18,000 tokens. A decoding step takes as long as a
chip needs to read its weights and the keys and values of the completions in its slots, or to
compute the products of all slots, whichever is longer. A prompt or a carried-over completion takes
as long as the FLOP of reading it. All rates are the chip's peaks. Slots are refilled between
chunks. It is a model of the schedule, not a measurement.

Both report the tokens of complete groups per second, and how that compares with staleness 0.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax.models import PRESETS, ModelConfig, Transformer, init_params
from gtpo_jax.models.params import matmul_params
from gtpo_jax.rollout.pool import choose
from gtpo_jax.runtime.chips import CHIPS
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.host_arrays import CompletionBuffer
from gtpo_jax.sampling.paged.programs import FEWER_SLOTS
from gtpo_jax.sampling.params import EngineConfig, SamplingParams

# The measured workload.
PROMPTS = 16
GROUP = 4
SLOTS = 16
PROMPT_LENGTH = 64
LONGEST = 512
MEDIAN = 32
MODEL = ModelConfig(
  vocab_size=4096, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=1024
)


def draw_lengths(
  rng: np.random.Generator, shape: tuple[int, ...], median: float, sigma: float, longest: int
) -> np.ndarray:
  """Returns log-normal lengths i32[shape], rounded, from 1 to `longest`."""
  drawn = median * np.exp(sigma * rng.standard_normal(shape))
  return np.clip(np.round(drawn), 1, longest).astype(np.int32)


class Pool:
  """The groups that are sampled or wait to be trained on, oldest first, as one array per value.

  Attributes:
    numbers: i64[m], each group's number in the stream.
    begun: i64[m], the step in which it began.
    oldest: the most steps so far between the beginning of a group and its training.
  """

  def __init__(self) -> None:
    self.numbers = np.zeros(0, np.int64)
    self.begun = np.zeros(0, np.int64)
    self.oldest = 0
    self._next = 0

  def fill(self, size: int, step: int) -> int:
    """Adds the next groups of the stream until there are `size`; returns how many."""
    count = size - len(self.numbers)
    self.numbers = np.append(self.numbers, self._next + np.arange(count))
    self.begun = np.append(self.begun, np.full(count, step))
    return count

  def train(self, chosen: list[int], has_tokens: np.ndarray, step: int) -> list[int]:
    """Removes the rows `chosen`, and those after the last one that has begun.

    Args:
      chosen: the rows that are trained on.
      has_tokens: bool[m].
      step: the step.

    Returns:
      The rows that are left.
    """
    self.oldest = max(self.oldest, int((step - self.begun[chosen]).max()))
    count = int(np.flatnonzero(has_tokens | (self.begun < step)).max()) + 1
    self._next = max(self._next, int(self.numbers[count - 1]) + 1)
    taken = set(chosen)
    left = [i for i in range(count) if i not in taken]
    self.numbers = self.numbers[left]
    self.begun = self.begun[left]
    return left


class Totals(NamedTuple):
  """What a run of several steps took."""

  tokens: int  # of the groups that were trained on
  read_again: int  # tokens
  seconds: float
  oldest: int  # steps between the first token of a group and its training, at most


# --- measured ---


def make_engine() -> tuple[Engine, object]:
  prepare_devices()
  model = Transformer(MODEL, make_mesh())
  engine = Engine(
    model,
    stop=(),
    pad=0,
    max_prompt_tokens=PROMPT_LENGTH,
    max_tokens=LONGEST,
    engine_config=EngineConfig(slots=SLOTS),
  )
  return engine, engine.layout(init_params(model, jax.random.key(0)))


def rows_of(buffer: CompletionBuffer, rows: list[int]) -> CompletionBuffer:
  """Returns some rows of a buffer."""
  arrays = {name: x[rows] for name, x in vars(buffer).items() if name != "prompts"}
  return CompletionBuffer([buffer.prompts[i] for i in rows], **arrays)


def measure(engine: Engine, params: object, lengths: np.ndarray, staleness: int, steps: int):
  """Samples `steps` steps and returns the totals of those after the first `staleness`."""
  size = PROMPTS * (1 + staleness)
  rng = np.random.default_rng(1)
  prompts = rng.integers(0, MODEL.vocab_size, (len(lengths), PROMPT_LENGTH)).tolist()
  keys = engine.completion_keys(jax.random.key(0), len(lengths), GROUP)
  pool = Pool()
  new_rows = lambda numbers: engine.buffer(
    [prompts[i] for i in numbers], keys[numbers], token_limits=lengths[numbers]
  )
  buffer = new_rows([])
  tokens = read_again = 0
  seconds = 0.0
  for step in range(steps + staleness):
    began = time.perf_counter()
    new = pool.fill(size, step)
    buffer.extend(new_rows(pool.numbers[len(pool.numbers) - new :]))
    again = int(buffer.lengths[~buffer.ended()].sum())
    missing = np.full(size, GROUP)
    pick = lambda: choose(pool.begun, missing == 0, PROMPTS, step, staleness)  # noqa: B023
    stream = engine.generate(params, buffer, sampling_params=SamplingParams(), prompts_at_once=size)
    while (chosen := pick()) is None:
      for row, _ in next(stream):
        missing[row] -= 1
    stream.close()
    duration = time.perf_counter() - began
    if step >= staleness:  # the first steps fill the pool
      tokens += int(buffer.limits[chosen].sum())
      read_again += again
      seconds += duration
    left = pool.train(chosen, buffer.mask.any((1, 2)), step)
    buffer = rows_of(buffer, left)
  return Totals(tokens, read_again, seconds, pool.oldest)


# --- simulated ---


class Pod(NamedTuple):
  """The simulated run."""

  chip: str = "v5p"
  chips: int = 64
  tensor: int = 4
  preset: str = "qwen2.5-7b"
  prompts: int = 512
  group: int = 16
  slots: int = 256  # per shard
  prompt_length: int = 512
  chunk: int = 64
  median: int = 3000
  longest: int = 18000


def simulate(pod: Pod, lengths: np.ndarray, staleness: int, steps: int) -> Totals:
  """Simulates `steps` steps after those that fill the pool; see `measure`."""
  c = PRESETS[pod.preset]
  chip = CHIPS[pod.chip]
  shards = pod.chips // pod.tensor
  slots = pod.slots * shards
  weights = 2 * matmul_params(c) / pod.tensor
  per_position = 2 * 2 * c.layers * c.kv_heads * c.head_dim / min(pod.tensor, c.kv_heads)
  flops_per_token = 2 * matmul_params(c)
  read_seconds = flops_per_token / pod.chips / chip.flops  # of one token
  pool = Pool()
  drawn = np.zeros((0, pod.group), np.int32)  # tokens of each completion so far
  size = pod.prompts * (1 + staleness)
  tokens = read_again = 0
  seconds = 0.0
  for step in range(steps + staleness):
    drawn = np.pad(drawn, ((0, pool.fill(size, step)), (0, 0)))
    limits = lengths[pool.numbers]
    order = [tuple(x) for x in np.argwhere(drawn < limits)][::-1]  # last first
    again = int(drawn[(drawn > 0) & (drawn < limits)].sum())
    duration = 0.0
    rows = np.zeros(0, int)
    columns = np.zeros(0, int)
    ready = lambda: (drawn >= limits).all(1)  # noqa: B023
    while (chosen := choose(pool.begun, ready(), pod.prompts, step, staleness)) is None:
      started = [order.pop() for _ in range(min(slots - len(rows), len(order)))]
      if started:
        new = np.asarray(started)
        rows = np.append(rows, new[:, 0])
        columns = np.append(columns, new[:, 1])
        old = drawn[new[:, 0], new[:, 1]]
        # A prompt is read once for its group, and once more for each completion that goes on.
        prompts = len(np.unique(new[old == 0, 0])) + int((old > 0).sum())
        duration += (prompts * pod.prompt_length + old.sum()) * read_seconds
      chunk = min(pod.chunk, int((limits - drawn)[rows, columns].max()))
      positions = drawn[rows, columns].sum() + len(rows) * (chunk / 2 + pod.prompt_length)
      read = (weights + per_position * positions / shards) / chip.memory_bandwidth
      # Idle slots are computed too; once nothing waits, an eighth of the slots is enough for a few.
      few = not order and len(rows) <= slots // FEWER_SLOTS
      compute = flops_per_token * pod.slots / (FEWER_SLOTS if few else 1) / pod.tensor / chip.flops
      duration += chunk * max(read, compute)
      drawn[rows, columns] = np.minimum(drawn[rows, columns] + chunk, limits[rows, columns])
      left = drawn[rows, columns] < limits[rows, columns]
      rows = rows[left]
      columns = columns[left]
    if step >= staleness:
      tokens += int(limits[chosen].sum())
      read_again += again
      seconds += duration
    drawn = drawn[pool.train(chosen, (drawn > 0).any(1), step)]
  return Totals(tokens, read_again, seconds, pool.oldest)


# --- the report ---


def report(totals: dict[int, list[Totals]]) -> list[dict[str, float]]:
  """Prints a line for each staleness, and returns the numbers."""
  rates = {s: float(np.median([x.tokens / x.seconds for x in runs])) for s, runs in totals.items()}
  rows = []
  for staleness, runs in totals.items():
    row = {
      "staleness": staleness,
      "tokens_per_s": rates[staleness],
      "gain": rates[staleness] / rates[min(rates)],
      "read_again": runs[0].read_again / runs[0].tokens,
      "oldest": runs[0].oldest,
    }
    rows.append(row)
    print(
      f"staleness {staleness}: {row['tokens_per_s']:,.0f} tokens/s, {row['gain']:.2f} x, "
      f"{100 * row['read_again']:.1f} % read again, at most {row['oldest']} updates old"
    )
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("kind", choices=("measure", "simulate"))
  parser.add_argument("--staleness", default="0,1,2")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--rounds", type=int, default=3, help="of `measure`")
  parser.add_argument("--prompts", default="512,256,128", help="groups a step, for `simulate`")
  parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal distribution")
  parser.add_argument("--json")
  args = parser.parse_args()
  bounds = [int(x) for x in args.staleness.split(",")]
  groups = lambda prompts: prompts * (args.steps + 2 * max(bounds) + 2)
  rng = np.random.default_rng(0)
  rows = []
  if args.kind == "measure":
    totals: dict[int, list[Totals]] = {bound: [] for bound in bounds}
    engine, params = make_engine()
    lengths = draw_lengths(rng, (groups(PROMPTS), GROUP), MEDIAN, args.sigma, LONGEST)
    for number in range(args.rounds + 1):
      for bound in bounds:
        run = measure(engine, params, lengths, bound, args.steps if number else 3)
        if number:  # the first round compiles
          totals[bound].append(run)
    rows += report(totals)
  else:
    for prompts in map(int, args.prompts.split(",")):
      pod = Pod(prompts=prompts)
      shape = (groups(prompts), pod.group)
      lengths = draw_lengths(rng, shape, pod.median, args.sigma, pod.longest)
      print(f"{prompts} x {pod.group} completions a step")
      runs = {bound: [simulate(pod, lengths, bound, args.steps)] for bound in bounds}
      rows += [{"prompts": prompts, **row} for row in report(runs)]
  if args.json:
    Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
  main()
