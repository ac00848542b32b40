"""The lines about a run."""

from gtpo_jax.config import freeze
from gtpo_jax.logs.summary import _short_warm_up


def test_a_warm_up_that_is_longer_than_the_run_is_said():
  config = freeze({"steps": 5, "optimizer": {"warmup_steps": 10, "learning_rate": 1e-3}})
  (line,) = _short_warm_up(config)
  assert line.startswith("the learning rate only reaches 0.0004 of optimizer.learning_rate = 0.001")
  (line,) = _short_warm_up(freeze({"warm_start": {"steps": 20}}))
  assert "reaches 0.00057 of warm_start.optimizer.learning_rate = 0.0015" in line
  assert not _short_warm_up(freeze({"steps": 11, "optimizer": {"warmup_steps": 10}}))
