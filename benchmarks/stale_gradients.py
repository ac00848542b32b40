"""Measures what old tokens do to the gradient on `forks`, with and without corrections.

    python benchmarks/stale_gradients.py --out=runs/stale_gradients

docs/experiments.md has the result. Everything is kept under OUT, so that the same
command resumes.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax
from credit_arms import collector_of, opened

import gtpo_jax
from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.arrays import Signals
from gtpo_jax.cli.probing.gradients import make_gradients
from gtpo_jax.cli.probing.statistics import mean_interval
from gtpo_jax.config import Config, load
from gtpo_jax.logs.credit import batch_signals
from gtpo_jax.logs.display import Display
from gtpo_jax.models.params import Params
from gtpo_jax.training.log_probs import make_scorer

CONFIG = str(Path(__file__).parents[1] / "configs" / "forks.py")
RATES = (1e-4, 1e-3)
AGES = (0, 1, 2, 4)
UPDATES = 5
BATCHES = 24  # for each age
REFERENCE = 96  # further ones, which the last policy draws
PLAIN = "recorded ratio"
HALF = "without the old half"  # of batches half of which is old
ARMS = {
  PLAIN: {},
  "tis_cap=2": {"tis_cap": 2.0},
  "tis_cap=2, per completion": {"tis_cap": 2.0, "tis_level": "sequence"},
  "masks 0.8 to 1.25": {"mask_low": 0.8, "mask_high": 1.25},
}


def config_of(rate: float, algorithm: str) -> Config:
  """Returns the config of a run at a learning rate."""
  fields = {"data.filler": 2, "batch.prompts": 16, "batch.group": 8, "steps": UPDATES}
  fields |= {"optimizer.learning_rate": rate, "algorithm.name": algorithm}
  fields |= {"eval.every": 0, "eval.problems": 2, "eval.samples": 1, "batch.micro_batches": 1}
  return load(CONFIG, [f"--config.{key}={value}" for key, value in fields.items()])


def policies(out: Path, rate: float) -> list[Params]:
  """Returns the policies after each update, on the host. All rates begin with one base model."""
  workdir = out / f"{rate:g}"
  base = out / f"{RATES[0]:g}" / "base"
  if workdir.exists():
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
  elif base.exists():
    shutil.copytree(base, workdir / "base")
  run = gtpo_jax.steps(config_of(rate, "gtpo"), workdir, Display())
  return [jax.device_get(step.policy.params) for step in run]


@functools.partial(jax.jit, static_argnums=0)
def derivative(
  algorithm: Algorithm, signals: Signals, now: jax.Array, drawn: jax.Array
) -> jax.Array:
  """Returns the derivative of the loss by the log-probs f32[n, g, t] of the policy `now`.

  Args:
    algorithm: with corrections.
    signals: of the batch.
    now: f32[n, g, t], nats, of the policy that is trained.
    drawn: f32[n, g, t], nats, of the policy that drew the tokens.
  """
  corrections = algorithm.recipe.corrections
  kept = corrections.kept(now, drawn, signals.mask)
  fixed = signals.after_credit().replace(
    advantages=algorithm.advantages(signals),
    mask=algorithm.loss_mask(signals),
    log_probs_old=now if corrections.tis_cap else drawn,
    log_probs_sampler=drawn,
  )
  fixed = fixed.only(kept)
  return jax.grad(lambda x: algorithm.loss(fixed, log_probs=x)[0])(now)


def measure(out: Path, rate: float) -> dict[str, dict[str, np.ndarray]]:
  """Returns sketches of gradients f32[b, s] by age and arm, and of the reference."""
  file = out / f"{rate:g}.npz"
  if not file.exists():
    found: dict[str, list[np.ndarray]] = {}
    after = policies(out, rate)
    config = config_of(rate, "rloo")
    c = config.batch
    with opened(config) as (worker, rewards):
      now = jax.device_put(after[-1])
      gradients = make_gradients(config, worker.model, now, largest=0)
      scorer = make_scorer(worker.model, config.sampling.temperature, c.parts, c.head_chunk)
      arms = {name: make("rloo", loss_aggregation="constant", **x) for name, x in ARMS.items()}
      collector = collector_of(config, worker, rewards)
      todo = [(age, list(arms)) for age in AGES for _ in range(BATCHES)]
      todo += [("reference", [PLAIN])] * REFERENCE
      with Display().counting("batches", len(todo)) as count:
        for number, (age, names) in enumerate(todo):
          drawing = now if age == "reference" else jax.device_put(after[-1 - age])
          batch = collector.collect(drawing, 0, print)
          rollouts = batch.rollouts
          signals = batch_signals(batch)
          log_probs = scorer(now, rollouts)
          for name in names:
            of_loss = derivative(arms[name], signals, log_probs, rollouts.log_probs)
            vector = gradients(rollouts, np.asarray(of_loss), np.zeros(of_loss.shape, np.float32))
            found.setdefault(f"{age}/{name}", []).append(vector)
          count(number + 1)
    np.savez(file, **{key: np.stack(x) for key, x in found.items()})
  with np.load(file) as stored:
    return {key: stored[key].astype(np.float64) for key in stored.files}


def compare(found: dict[str, Any], age: int) -> dict[str, dict[str, Any]]:
  """Returns, by arm, its bias, its spread, and its square error less that of the recorded ratio."""
  reference = found[f"reference/{PLAIN}"]
  mean = reference.mean(0)
  halves = reference[::2].mean(0), reference[1::2].mean(0)
  signal = halves[0] @ halves[1]  # the square of the norm, without noise
  arms = {name: found[f"{age}/{name}"] for name in ARMS}
  fresh = found[f"0/{PLAIN}"]
  mixed = np.roll(fresh, 1, 0)  # other groups' halves
  base = dict.fromkeys(arms, arms[PLAIN]) | {HALF: (mixed + arms[PLAIN]) / 2}
  arms[HALF] = mixed
  errors = lambda x: ((x - mean) ** 2).sum(1) / signal
  rows = {}
  for name, vectors in arms.items():
    bias = (vectors[::2].mean(0) - halves[0]) @ (vectors[1::2].mean(0) - halves[1]) / signal
    rows[name] = {
      "bias": float(np.sign(bias) * np.sqrt(abs(bias))),
      "spread": float(np.sqrt(vectors.var(0, ddof=1).sum() / signal)),
      "error": mean_interval(errors(vectors)),
      "difference": mean_interval(errors(vectors) - errors(base[name])),
    }
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  out = parser.parse_args().out
  results = {}
  print(
    "| learning rate | age | arm | bias | spread | square error | difference |\n" + "|---" * 7 + "|"
  )
  for rate in RATES:
    found = measure(out, rate)
    for age in AGES:
      results[f"{rate:g}/{age}"] = rows = compare(found, age)
      for name, row in rows.items():
        of = row["difference"]
        print(
          f"| {rate:g} | {age} | {name} | {row['bias']:.3f} | {row['spread']:.2f} "
          f"| {row['error'][0]:.3f} | {of[0]:+.3f} [{of[1]:+.3f}, {of[2]:+.3f}] |"
        )
  (out / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
  main()
