"""A mix of tasks of reasoning-gym has metrics of each, in training, evaluation and report."""

import importlib.util

import pytest

import gtpo_jax
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.report.report import make_report


@pytest.mark.skipif(
  importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
@pytest.mark.manual
def test_a_weighted_mix_of_tasks(tmp_path):
  config = gtpo_jax.default_config()
  config.steps = 2
  config.data.train = "rg:chain_sum?max_terms=2&max_digits=1&size=40*3,rg:gcd?max_value=9&size=40*1"
  config.data.eval = "rg:chain_sum?max_terms=2&size=20&seed=1,rg:gcd?size=20&seed=1"
  config.data.max_prompt_tokens = 200
  config.data.difficulty = "explore"
  config.sampling.max_tokens = 8
  config.batch.prompts = 8
  config.batch.group = 4
  config.eval.every = 2
  config.eval.problems = 8
  config.eval.samples = 2
  config.model.random_weights = True
  result = gtpo_jax.train(config, tmp_path / "run", Display(enabled=False))
  assert result.finished
  rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  labels = ("rg:chain_sum", "rg:gcd")
  shares = [[row.get(f"source/{label}/groups", 0.0) for label in labels] for row in rows[1:]]
  assert all(sum(share) == 1 for share in shares)
  assert sum(share[0] for share in shares) > sum(share[1] for share in shares)
  for name in (*(f"eval/{label}/mean@2" for label in labels), "eval/all/mean@2"):
    assert 0 <= rows[-1][name] <= 1
  assert rows[-1]["difficulty/tried"] > 0
  page = make_report([tmp_path / "run"])
  assert "rg:chain_sum" in page and "rg:gcd" in page and "Problems by difficulty" in page
