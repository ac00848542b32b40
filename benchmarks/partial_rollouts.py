"""Measures and simulates what partial rollouts (`sampling.staleness`) gain on long-tailed lengths.

    python benchmarks/partial_rollouts.py measure [--staleness 0,1,2] [--steps 20] [--rounds 3]
    python benchmarks/partial_rollouts.py simulate [--staleness 0,1,2] [--prompts 512,128]
        [--config qwen2_5_7b_gtpo] [--topology v5p:4x4x4] [--tensor 4] [--slots 64,256]
        [--longest 4096,18000]

`measure` samples with the engine on this machine: 64 completions a step (16 prompts in groups of
4) in 16 slots, with lengths from a log-normal distribution of median 32, cut at 512. The model is
that of benchmarks/step.py with random weights. Each completion ends at a length that is drawn
beforehand. Each staleness samples the same stream of groups; in each round they take turns. The
reading of carried-over tokens and everything that the host does are included, updates are not.

`simulate` computes the time of sampling on one of the shards of a TPU slice or of GPUs that are not
attached, with the scheduler and the pool of pages of a run: as many slots and pages as its engine
has there (`sampling.cache_fraction="auto"`). Lengths are from a log-normal distribution of median
3,000, cut at the longest. A decoding step takes as long as a chip needs to read its weights and the
keys and values of the completions that run, or to compute the products of all slots, whichever is
longer. A prompt or a carried-over completion takes as long as the FLOP of reading it. All rates are
the chip's peaks. It is a model of the time, not a measurement.

Both report the tokens of complete groups per second, and how that compares with staleness 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gtpo_jax.runtime.startup import prepare_devices, prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax.config import load
from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.models.params import matmul_params
from gtpo_jax.planning.run_programs import build_engine, build_model
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.rollout.group_pool import choose
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.buffer import CompletionBuffer
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.paged.pool import PagePool, PoolSizes
from gtpo_jax.sampling.paged.programs import FEWER_SLOTS
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import capacity_for
from gtpo_jax.sampling.session import REFILL_FRACTION
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams

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
  fields = {name: x[rows] if isinstance(x, np.ndarray) else x for name, x in vars(buffer).items()}
  return CompletionBuffer(**fields | {"prompts": [buffer.prompts[i] for i in rows]})


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


class Shard(NamedTuple):
  """What a shard of the batch has, and what it samples in a step.

  Attributes:
    shards: the number of shards.
    chip: the chip.
    model: the architecture.
    tensor: chips of the shard.
    slots: completions at once.
    pool: the sizes of its pool of pages.
    prompts: groups that it trains on in a step.
    group: completions of each.
    prompt_length: tokens of a prompt.
  """

  shards: int
  chip: Chip
  model: ModelConfig
  tensor: int
  slots: int
  pool: PoolSizes
  prompts: int
  group: int
  prompt_length: int

  @classmethod
  def planned(
    cls, name: str, topology: str, tensor: int, prompts: int, slots: int, longest: int
  ) -> Shard:
    """Returns the shard of a run of a config on hardware that is not attached.

    Args:
      name: the config.
      topology: as in `gtpo plan`.
      tensor: shards of the tensor axis.
      prompts: those of a step, over all shards.
      slots: those of a shard, at most.
      longest: the most tokens of a completion.
    """
    devices, chip = topology_devices(topology)
    shards = len(devices) // tensor
    overrides = {
      "mesh.data": 1,
      "mesh.fsdp": shards,
      "mesh.tensor": tensor,
      "batch.prompts": prompts,
      "sampling.slots": slots * shards,
      "sampling.max_tokens": longest,
    }
    config = load(name, [f"--config.{key}={value}" for key, value in overrides.items()])
    model = build_model(config, devices)
    programs = build_engine(config, model).programs
    group = config.batch.group
    return cls(
      shards,
      chip,
      model.config,
      tensor,
      programs.slots,
      programs.pool,
      prompts // shards,
      group,
      config.data.max_prompt_tokens // 4,
    )


def simulate(shard: Shard, lengths: np.ndarray, staleness: int, steps: int) -> tuple[Totals, float]:
  """Simulates `steps` steps after those that fill the pool; see `measure`.

  Returns:
    The totals of all shards, and the share of the chunks for which completions waited for pages.
  """
  c = shard.model
  weights = 2 * matmul_params(c) / shard.tensor
  kv_shards = shard.tensor if c.kv_heads % shard.tensor == 0 else 1
  per_position = 2 * 2 * c.layers * c.kv_heads * c.head_dim / kv_shards
  flops_per_token = 2 * matmul_params(c) / shard.tensor
  pool = Pool()
  drawn = np.zeros((0, shard.group), np.int32)  # tokens of each completion so far
  size = shard.prompts * (1 + staleness)
  tokens = read_again = 0
  seconds = 0.0
  waited = []
  for step in range(steps + staleness):
    drawn = np.pad(drawn, ((0, pool.fill(size, step)), (0, 0)))
    limits = lengths[pool.numbers]
    capacity = capacity_for(size, shard.group, 1, shard.slots)
    scheduler = Scheduler(capacity, PagePool(capacity, shard.pool))
    prompt_lengths = np.full(size, shard.prompt_length, np.int32)
    keys = np.zeros((*limits.shape, 2), np.uint32)
    scheduler.add(prompt_lengths, np.where(drawn < limits, limits, 0), keys, drawn)
    again = int(drawn[(drawn > 0) & (drawn < limits)].sum())
    duration = 0.0
    while (chosen := _chosen(pool, drawn >= limits, shard.prompts, step, staleness)) is None:
      read = 0
      while any(assigned := scheduler.assign(size)):
        read += shard.prompt_length * len(assigned[0])
      for slot in scheduler.take_resumed():
        read += shard.prompt_length + int(scheduler.slots.generated[slot])
      duration += read * flops_per_token / shard.chip.flops
      active = scheduler.inputs().active
      slots = scheduler.slots
      left = (slots.token_limits - slots.generated)[active]
      finished = max(len(left) // REFILL_FRACTION, 1) if scheduler.has_waiting else len(left)
      chunk = min(shard.pool.chunk, int(np.sort(left)[finished - 1]))
      positions = slots.generated[active].sum() + len(left) * (chunk / 2 + shard.prompt_length)
      read_s = (weights + per_position * positions) / shard.chip.memory_bandwidth
      compute_s = flops_per_token * len(active) / shard.chip.flops  # idle slots are computed too
      duration += chunk * max(read_s, compute_s)
      new = np.where(active, np.minimum(slots.token_limits - slots.generated, chunk), 0)
      rows, columns = slots.completions[active].T
      drawn[rows, columns] += new[active]
      scheduler.advance(new, active & (slots.generated + new >= slots.token_limits))
      fewer = shard.slots // FEWER_SLOTS
      if not scheduler.has_waiting and scheduler.slots.active.sum() <= fewer < len(active):
        scheduler.shrink(fewer)
    if step >= staleness:
      tokens += shard.shards * int(limits[chosen].sum())
      read_again += shard.shards * again
      seconds += duration
      waited.append(scheduler.space.statistics()["sampling/waiting"])
    drawn = drawn[pool.train(chosen, (drawn > 0).any(1), step)]
  return Totals(tokens, read_again, seconds, pool.oldest), float(np.mean(waited))


def _chosen(
  pool: Pool, ended: np.ndarray, prompts: int, step: int, staleness: int
) -> list[int] | None:
  return choose(pool.begun, ended.all(1), prompts, step, staleness)


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


def _numbers(text: str) -> list[int]:
  return [int(x) for x in text.split(",")]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("kind", choices=("measure", "simulate"))
  parser.add_argument("--staleness", default="0,1,2")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--rounds", type=int, default=3, help="of `measure`")
  parser.add_argument("--config", default="qwen2_5_7b_gtpo", help="this and below: of `simulate`")
  parser.add_argument("--topology", default="v5p:4x4x4")
  parser.add_argument("--tensor", type=int, default=4)
  parser.add_argument("--prompts", default="512,128", help="groups a step")
  parser.add_argument("--slots", default="64,256", help="of a shard")
  parser.add_argument("--longest", default="4096,18000", help="tokens of a completion")
  parser.add_argument("--median", type=int, default=3000)
  parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal distribution")
  parser.add_argument("--json")
  args = parser.parse_args()
  bounds = _numbers(args.staleness)
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
    sizes = itertools.product(*(_numbers(x) for x in (args.prompts, args.longest, args.slots)))
    for prompts, longest, slots in sizes:
      shard = Shard.planned(args.config, args.topology, args.tensor, prompts, slots, longest)
      shape = (shard.prompts * (args.steps + 2 * max(bounds) + 2), shard.group)
      lengths = draw_lengths(rng, shape, args.median, args.sigma, longest)
      pages = shard.pool.pages / (shard.slots * shard.pool.completion_pages)
      print(
        f"{prompts} x {shard.group} completions of at most {longest}, {shard.slots} slots a shard, "
        f"{shard.pool.pages} pages ({100 * pages:.0f} % of all slots at full length)"
      )
      runs = {bound: simulate(shard, lengths, bound, args.steps) for bound in bounds}
      values = {"prompts": prompts, "longest": longest, "slots": slots, "pages": shard.pool.pages}
      for row in report({bound: [run] for bound, (run, _) in runs.items()}):
        waiting = runs[row["staleness"]][1]
        print(f"  waiting at staleness {row['staleness']}: {100 * waiting:.1f} %")
        rows.append({**values, **row, "waiting": waiting})
  if args.json:
    Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
  main()
