"""The tiny preset learns in bfloat16 on a CPU, from its warm start to its last step."""

import pytest

from gtpo_jax.config import load
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train


@pytest.mark.manual
def test_the_tiny_preset_learns_in_bfloat16_on_a_cpu(tmp_path):
  """Measured: from 17 % to 65 % in 15 steps, and from 19 % to 67 % in float32."""
  overrides = {
    "model.compute_dtype": "bfloat16",
    "warm_start.steps": 600,
    "steps": 15,
    "eval.problems": 200,
    "eval.samples": 4,
    "eval.every": 0,
  }
  config = load("tiny", [f"--config.{name}={value}" for name, value in overrides.items()])
  result = train(config, tmp_path, Display(enabled=False))
  rows = read_jsonl(tmp_path / "metrics.jsonl")
  before, after = (row["eval/sums/mean@4"] for row in (rows[0], rows[-1]))
  assert result.finished and 0.05 < before < 0.35
  assert after > before + 0.3
  mismatch = [row["mismatch/kl"] for row in rows[1:]]
  assert all(1e-7 < kl < 0.05 for kl in mismatch)  # reduced precision, below the warning
