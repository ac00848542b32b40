"""Compares steps that wait for slow tools, agents or long completions with `sampling.staleness`.

    python benchmarks/episodes.py [tools|agent|lengths] [--scale 1] [--steps 10] [--json FILE]

A policy with random weights plays `guess`. Each answer of the environment, or of the agent's tool,
takes a log-normal time with a median of 2 seconds and a 99th percentile of 20, times `--scale`.
Three runs follow one another: without waits, and with waits at a staleness of 0 and of 1. With
`lengths`, the completions have log-normal lengths instead, whose 99th percentile is 20 times the
median, and share 16 slots. Prints means over the steps after the first ones, and the factor that
the steps without staleness predict.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax

import gtpo_jax
from gtpo_jax.config import freeze
from gtpo_jax.environments import Result, Step, Turn
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.logs.display import Display
from gtpo_jax.rollout.forecast import measured, path_of
from gtpo_jax.sampling.engine import Engine

SETTLING = 4  # steps that are left out: they compile, or begin without groups of earlier ones
MEDIAN_S = 2.0
P99_S = 20.0
MEDIAN_TOKENS = 12
LONGEST = 20 * MEDIAN_TOKENS
SLOTS = 16  # of `lengths`
P99 = statistics.NormalDist().inv_cdf(0.99)
METRICS = ("time/step", "time/sample", "time/update", "env/idle_share", "time/waiting")
WAITS = {"no waits": (0.0, 1), "staleness 0": (1.0, 0), "staleness 1": (1.0, 1)}  # scale, staleness


class SlowGuess(Guess):
  """Answers a guess after a log-normal time."""

  scale = 1.0

  @classmethod
  def wait_s(cls) -> float:
    """Returns how long an answer takes."""
    return cls.scale * random.lognormvariate(math.log(MEDIAN_S), math.log(P99_S / MEDIAN_S) / P99)

  def step(self, turn: Turn) -> Step:
    """See `Environment`."""
    time.sleep(self.wait_s())
    return super().step(turn)


async def slow_agent(row: dict[str, Any], client: Any, seed: int) -> Result:
  """Plays the same game as an agent whose tool is slow."""
  game = Guess()
  game.reset(row, seed)
  messages = list(row["messages"])
  while True:
    answer = await client.chat.completions.create(model="policy", messages=messages)
    text = (answer.choices[0].message.content or "").strip()
    await asyncio.sleep(SlowGuess.wait_s())
    step = game.step(Turn(text))
    if step.done:
      return Result(reward=step.reward, correct=step.correct)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.messages}]


def completions(
  engine: Engine, prompts: Any, keys: np.ndarray, token_limits: Any = None, *, original: Any
) -> Any:
  """Returns `Engine.completions` with log-normal limits, which depend on the keys alone."""
  uniform = (keys[..., 1].astype(np.float64) + 0.5) / 2**32
  normal = np.vectorize(statistics.NormalDist().inv_cdf)(uniform)
  lengths = MEDIAN_TOKENS * np.exp(math.log(20) / P99 * normal)
  return original(engine, prompts, keys, np.clip(lengths, 1, LONGEST).astype(np.int32))


def make_config(kind: str, staleness: int, steps: int, prompts: int, group: int) -> Any:
  """Returns the config of a run, which evaluates as little as possible."""
  config = gtpo_jax.default_config()
  config.steps = steps
  config.model.preset = "tiny"
  config.warm_start.steps = 0
  config.batch.prompts, config.batch.group = prompts, group
  config.algorithm.name = "gtpo"
  config.sampling.staleness = staleness
  config.eval.every, config.eval.problems, config.eval.samples = 0, 1, 1
  config.log.tensorboard = False
  if kind == "lengths":
    config.sampling.slots = SLOTS
    config.sampling.max_tokens = LONGEST
    return config
  config.data.train = "guess"
  config.data.max_prompt_tokens = 16
  config.sampling.max_tokens = 192
  config.sampling.stop = tuple("0123456789")  # random weights rarely draw an end token
  config.env.workers = 2 * prompts * group
  config.env.step_timeout_s = config.env.episode_timeout_s = 3600.0
  return config


def measure(kind: str, args: argparse.Namespace, scale: float, staleness: int) -> dict[str, float]:
  """Returns the means of one run, and what its steps predict for a staleness of 1."""
  SlowGuess.scale = scale
  players = {"tools": {"environment": SlowGuess}, "agent": {"agent": slow_agent}}
  steps = SETTLING + args.steps
  config = make_config(kind, staleness, steps, args.prompts, args.group)
  rows = []
  groups = []
  for step in gtpo_jax.steps(config, display=Display(enabled=False), **players.get(kind, {})):
    if step.step > SETTLING:
      rollouts = step.batch.rollouts
      tokens = float(np.asarray(rollouts.mask).sum())
      drawn = step.metrics.get("tokens/sampled", tokens)
      draws = drawn / step.metrics["sampling/slots_busy"]  # of all slots together
      rows.append(step.metrics | {"tokens": tokens, "draws": draws})
      groups += [[path_of(x) for x in group.completions] for group in step.batch.groups]
    engine = step.policy.worker.engine
  found = {key: float(np.mean([row.get(key, 0.0) for row in rows])) for key in METRICS}
  total = {key: sum(row[key] for row in rows) for key in ("time/step", "tokens", "draws")}
  found |= {"tokens/s": total["tokens"] / total["time/step"], "draws": total["draws"] / len(rows)}
  if not staleness:
    simulation = measured(freeze(config), engine, groups, rows)
    whole, one = simulation.run(0), simulation.run(1)
    found |= {"predicted": one.step_s / whole.step_s, "predicted draws": one.draws / whole.draws}
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("kind", nargs="?", choices=("tools", "agent", "lengths"), default="tools")
  parser.add_argument("--scale", type=float, default=1.0, help="of all waits")
  parser.add_argument("--steps", type=int, default=10, help="that are measured")
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--group", type=int, default=4)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  waits = WAITS
  if args.kind == "lengths":
    waits = {name: (0.0, staleness) for name, (scale, staleness) in WAITS.items() if scale}
    Engine.completions = functools.partialmethod(completions, original=Engine.completions)
  results = {}
  for name, (scale, staleness) in waits.items():
    results[name] = measure(args.kind, args, scale * args.scale, staleness)
    shown = ", ".join(f"{key} {value:.3g}" for key, value in results[name].items())
    print(f"{name}: {shown}", flush=True)
  whole, one = results["staleness 0"], results["staleness 1"]
  print(f"a step takes {one['time/step'] / whole['time/step']:.2f} times as long with staleness 1")
  print(f"predicted: {whole['predicted']:.2f}")
  print(f"decode steps of all slots: {one['draws'] / whole['draws']:.2f} times as many")
  print(f"predicted: {whole['predicted draws']:.2f}")
  if "no waits" in results:
    share = one["tokens/s"] / results["no waits"]["tokens/s"]
    print(f"tokens a second: {share:.2f} times those without waits")
  if args.json:
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    args.json.write_text(
      json.dumps({"results": results, "arguments": vars(args)} | versions, default=str)
    )


if __name__ == "__main__":
  main()
