"""Tests that every algorithm learns, and every objective acts, on the task of the tiny config.

All runs start from one warm start. They compute for minutes, with XLA's default settings.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from gtpo_jax.algorithms import OBJECTIVES, RECIPES
from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.config import load
from gtpo_jax.config.sections import AlgorithmSection
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.rollout.worker import RolloutWorker

pytestmark = pytest.mark.manual


@pytest.fixture(scope="module")
def tiny():
  return load(
    str(Path(__file__).parents[1] / "configs/tiny.py"),
    [
      "--config.steps=30",
      "--config.eval.every=0",
      "--config.eval.problems=200",
      "--config.eval.samples=4",
      "--config.log.tensorboard=false",
    ],
  )


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("tiny")
  base_model(tiny, RolloutWorker(tiny), workdir, Display(enabled=False), lambda: False)
  return workdir / "base"


@pytest.mark.parametrize("name", [name for name in RECIPES if not RECIPES[name].distillation])
def test_thirty_steps(name, tiny, base, tmp_path):
  shutil.copytree(base, tmp_path / "base")
  config = dataclasses.replace(tiny, algorithm=AlgorithmSection(name=name))
  result = train(config, tmp_path, Display(enabled=False))
  rows = read_jsonl(tmp_path / "metrics.jsonl")
  assert result.finished and len(rows) == 31
  trained = [row for row in rows[1:] if row["update/empty"] < 1]
  assert all(
    np.isfinite([row["loss"], row["grad_norm"], row["entropy/mean"]]).all() for row in trained
  )
  before = rows[0]["eval/sums/mean@4"]
  after = rows[-1]["eval/sums/mean@4"]
  print(
    f"{name}: {before:.1%} -> {after:.1%}, {rows[-1]['reward/accuracy']:.1%} at the last step, "
    f"{sum(row['time/step'] for row in rows[1:]):.0f} s, entropy {rows[-1]['entropy/mean']:.3f}"
  )
  assert after > before + 0.1
  found = Checkpoints(tmp_path / "checkpoints")
  assert found.latest == 30
  found.close()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_bounds_of_every_objective_act_with_several_updates(objective, tiny, base, tmp_path):
  """With published settings, a high learning rate and sixteen updates on each batch."""
  shutil.copytree(base, tmp_path / "base")
  name = "grpo" if objective == "gmpo" else "gtpo"  # GMPO needs one advantage per completion
  config = dataclasses.replace(
    tiny,
    steps=2,
    algorithm=AlgorithmSection(name=name, objective=objective),
    batch=dataclasses.replace(tiny.batch, prompts=32, group=8, minibatches=4, epochs=4),
    optimizer=dataclasses.replace(tiny.optimizer, learning_rate=2e-3),
    eval=dataclasses.replace(tiny.eval, problems=32, samples=1),
  )
  train(config, tmp_path, Display(enabled=False))
  rows = read_jsonl(tmp_path / "metrics.jsonl")[1:]
  shares = {key: max(row[key] for row in rows) for key in rows[0] if key.startswith("clip/")}
  print(objective, shares)
  bounds = {"cispo": {"clip/high"}}.get(objective, shares.keys())  # cispo has no lower bound
  assert all(shares[key] > 0 for key in bounds)
