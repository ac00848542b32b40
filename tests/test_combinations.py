"""Combinations of settings: each trains two tiny steps or is refused in one line."""

import collections
import dataclasses
import random
from pathlib import Path

import jax
import numpy as np
import pytest
from toys import nested

from gtpo_jax.algorithms import OBJECTIVES, RECIPES
from gtpo_jax.algorithms.ratios import RATIOS
from gtpo_jax.config import freeze
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train
from gtpo_jax.models import PRESETS
from gtpo_jax.models.kinds import Mixture
from gtpo_jax.runtime.errors import UserError

BASE = {
  "steps": 2,
  "seed": 3,
  "batch.prompts": 4,
  "batch.group": 4,
  "data.terms": 2,
  "data.max_prompt_tokens": 20,
  "eval.problems": 2,
  "eval.samples": 1,
  "eval.every": 0,
  "model.preset": "tiny",
  "model.random_weights": True,
  "sampling.max_tokens": 6,
  "sampling.slots": 16,
  "optimizer.learning_rate": 1e-3,
}
# Every point draws a value for each of these; most values leave the recipe as it is.
CHOICES = {
  "algorithm.name": tuple(name for name in RECIPES if not RECIPES[name].distillation),
  "algorithm.objective": (None, None, None, *OBJECTIVES),
  "algorithm.ratio": (None, None, None, *RATIOS),
  "algorithm.tis_cap": (None, None, 1.5),
  "algorithm.tis_level": (None, None, None, "sequence"),
  "algorithm.mask_low": (None, None, None, 0.9),
  "algorithm.mask_high": (None, None, None, 1.1),
  "algorithm.behaviour": (None, None, None, "drawn"),
  "algorithm.kl_weight": (None, None, None, 0.1),
  "algorithm.entropy_coef": (None, None, None, 0.01),
  "algorithm.dynamic_sampling": (None, None, True, False),
  "sampling.staleness": (0, 0, 1, 2),
  "batch.minibatches": (1, 1, 2, 4),
  "batch.epochs": (1, 1, 2),
  "batch.micro_batches": (1, 1, 2),
  "batch.pack": (False, True),
}


def reward(prompts, completions, answers, extras):
  """Judges completions so that almost all groups have right and wrong ones."""
  return [sum(map(ord, completion)) % 2 == 0 for completion in completions]


def check(point):
  """Trains two steps with these settings; returns the message if they are refused."""
  began = []
  settings = {name: value for name, value in point.items() if value is not None}
  try:
    config = freeze(nested(BASE | settings))
    result = train(config, None, Display(enabled=False), lambda: began.append(1), reward=reward)
  except UserError as error:
    assert "\n" not in str(error) and not began
    return str(error)
  assert result.finished
  for row in result.history[1:]:
    assert row["update/skipped"] == 0 and np.isfinite(row["entropy/mean"])
    if row["update/empty"] < 1:
      assert all(np.isfinite([row["loss"], row["grad_norm"], row["ratio/mean"]]))
  for x in jax.tree.leaves(result.policy.params):
    assert np.isfinite(np.asarray(x, np.float32)).all()
  return ""


@pytest.mark.manual
def test_three_hundred_random_combinations_train_or_are_refused():
  draw = random.Random(0)
  refused = collections.Counter()
  failures = []
  trained = 0
  for _ in range(300):
    point = {name: draw.choice(values) for name, values in CHOICES.items()}
    try:
      message = check(point)
    except Exception as error:  # the other points are tried too
      failures.append((point, repr(error)[:500]))
      continue
    trained += not message
    refused[message] += bool(message)
  print(f"{trained} trained, {refused.total()} refused for {len(refused)} reasons")
  assert not failures, "\n".join(map(str, failures))
  assert trained > 60


@pytest.mark.manual
def test_ten_random_combinations_train_a_mixture_of_experts(monkeypatch):
  small = Mixture(4, 2, 16, normalised=True, shared=16)
  small = dataclasses.replace(PRESETS["tiny-moe"], width=32, layers=1, heads=2, mixture=small)
  monkeypatch.setitem(PRESETS, "tiny-moe", dataclasses.replace(small, head_dim=16, kv_heads=1))
  draw = random.Random(1)
  trained = 0
  while trained < 10:
    point = {name: draw.choice(values) for name, values in CHOICES.items()}
    point |= {
      "model.preset": "tiny-moe",
      "model.router_replay": draw.choice((True, True, False)),
      "model.router_balance": draw.choice((0.0, 0.01)),
    }
    trained += not check(point)


FEATURES = {  # of the table in docs/choosing.md
  "algorithm.overlong_filter": {"algorithm.overlong_filter": True},
  "algorithm.dynamic_sampling": {"algorithm.dynamic_sampling": True, "batch.max_gen_batches": 3},
  "data.difficulty": {"data.difficulty": "explore", "data.largest": 9},
  "sampling.staleness": {"sampling.staleness": 1},
  "env.make": {"env.make": "own_environments:Echo", "env.max_turns": 2},
  "env.agent": {"env.agent": "own_environments:asks_twice", "env.workers": 16},
}


def table():
  """The cells of the table by their pairs of features."""
  text = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
  lines = text.partition("### What combines")[2].split("\n\n")[2].splitlines()
  head, _, *rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
  assert head[1:] == [row[0] for row in rows] == list(FEATURES)
  return {
    (row[0], name): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)
  }


def trained(*names):
  """Returns how a run with these features is refused; "" if it trains."""
  point = {"algorithm.name": "gtpo", "sampling.max_tokens": 48}
  for name in names:
    point |= FEATURES[name]
  return check(point)


PAIRS = sorted(table())


@pytest.mark.manual
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] < pair[1]], ids=" ".join)
def test_what_the_table_says_of_a_pair(pair):
  cells = table()
  assert cells[pair] == cells[pair[::-1]]
  assert ("no" if trained(*pair) else "yes") == cells[pair]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["env.make", "env.agent"])
def test_all_of_a_column_train_together(last):
  cells = table()
  assert not trained(*(name for name in FEATURES if cells[last, name] == "yes"), last)
