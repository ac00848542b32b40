"""Tests that a student reaches its teacher on the task of the tiny config, in a few minutes."""

import shutil
from pathlib import Path

import pytest

from gtpo_jax.config import load
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train

pytestmark = pytest.mark.manual

CONFIG = str(Path(__file__).parents[1] / "configs/tiny.py")
QUIET = ["--config.eval.every=0", "--config.log.tensorboard=false"]
STUDENT = [
  "--config.algorithm.name=opd",
  "--config.steps=15",
  "--config.batch.minibatches=4",
  "--config.batch.epochs=2",
  "--config.optimizer.learning_rate=3e-4",
  "--config.optimizer.schedule=linear",
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """Returns the workdir of a finished run, and its accuracy."""
  workdir = tmp_path_factory.mktemp("teacher")
  result = train(load(CONFIG, QUIET), workdir, Display(enabled=False))
  return workdir, result.history[-1]["eval/sums/mean@8"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("divergence", ["sampled", "reverse_kl", "forward_kl", "jsd"])
def test_fifteen_steps_reach_most_of_the_teacher(divergence, seed, teacher, tmp_path):
  """The student starts from the base model that the teacher started from."""
  workdir, accuracy = teacher
  shutil.copytree(workdir / "base", tmp_path / "base")
  settings = [f"--config.teacher.path={workdir}", f"--config.distill.divergence={divergence}"]
  config = load(CONFIG, [*QUIET, *STUDENT, *settings, f"--config.seed={seed}"])
  result = train(config, tmp_path, Display(enabled=False))
  reached = result.history[-1]["eval/sums/mean@8"]
  print(f"{divergence}, seed {seed}: {reached:.1%} of the teacher's {accuracy:.1%}")
  assert reached >= 0.95 * accuracy
