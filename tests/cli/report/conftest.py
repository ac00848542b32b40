"""Fixtures: short real runs, and their report in a real browser."""

import sys
import types

import pytest
from pages import open_report
from shared_folders import create_once
from toys import small_run

from gtpo_jax.logs.credit import credit_files, read_credit
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train


def mixed_verdicts(prompts, completions, answers, extras):
  """A verifier that calls some completions of a group correct, so that most groups are mixed."""
  return [i % 2 == len(text) % 2 for i, text in enumerate(completions)]


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
  """The folder of a run of GTPO with two steps."""
  return create_once(
    tmp_path_factory, "report_runs", lambda folder: train_runs(folder, {"gtpo-0": {}})
  )


@pytest.fixture(scope="package")
def grpo(tmp_path_factory):
  """The run of GRPO with one step."""
  rows = {"grpo": {"algorithm.name": "grpo", "steps": 1}}
  create = lambda folder: train_runs(folder, rows)
  return create_once(tmp_path_factory, "grpo", create) / "grpo"


@pytest.fixture(scope="package")
def second_seed(tmp_path_factory):
  """The run of GTPO with another seed."""
  rows = {"gtpo-1": {"seed": 1}}
  create = lambda folder: train_runs(folder, rows)
  return create_once(tmp_path_factory, "second_seed", create) / "gtpo-1"


COMMON = {
  "steps": 2,
  "sampling.max_tokens": 18,
  "batch.micro_batches": 2,
  "warm_start.steps": 20,
  "warm_start.batch": 8,
  "reward.verifier": "a_verifier:verify",
  "eval.every": 10,
  "eval.problems": 12,
  "eval.samples": 2,
  "log.credit_groups": 3,
}


def train_runs(folder, rows):
  """Trains a run for each name in `rows`, with these changes of the config."""
  module = types.ModuleType("a_verifier")
  module.verify = mixed_verdicts
  sys.modules["a_verifier"] = module
  for name, changes in rows.items():
    config = small_run(**COMMON | changes)
    assert train(config, folder / name, Display(enabled=False)).finished
  del sys.modules["a_verifier"]


@pytest.fixture(scope="package")
def record(runs):
  """The last credit record of the first run."""
  return read_credit(credit_files(runs / "gtpo-0")[2])


@pytest.fixture
def opened(browser, tmp_path):
  """Opens the report of some runs. The page must make no request and log nothing."""
  pages = []

  def make(*workdirs, **options):
    page = open_report(browser, tmp_path / "report.html", workdirs, options)
    pages.append(page)
    return page

  yield make
  for page in pages:
    assert page.complaints == []
    page.close()
