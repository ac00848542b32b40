"""What a simulated schedule says of staleness: numbers worked by hand, and what a run needs."""

import functools

import numpy as np
import pytest
from experience_cases import G, N, coins, collect, config_of, random_worker  # noqa: F401

import gtpo_jax
from gtpo_jax.rollout.forecast import Observer, Simulation, advice, lengths_from, path_of
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.session import Pace

PLAIN = {"sampling.slots": 4 * N * G, "sampling.chunk": 4}


def simulation(groups, **changes):
  config = config_of("gtpo", **{**PLAIN, **changes})
  worker, _ = random_worker(config)
  return Simulation(config, worker.engine, groups)


def groups_of(*lengths, wait_s=0.0):
  return [[[(length, wait_s)] for length in lengths]]


def test_a_step_takes_as_long_as_its_longest_completion():
  simulated = simulation(groups_of(2, 3, 5, 12))
  simulated.token_s = 2.0
  simulated.update_s = 7.0
  forecast = simulated.run(0)
  # 32 slots draw 12 times; a device reads 256 tokens in the time of a draw.
  prompts = N * simulated._config.data.max_prompt_tokens / 256
  assert forecast.step_s == pytest.approx(2 * (12 + prompts) + 7)
  assert forecast.idle == pytest.approx(1 - (2 + 3 + 5 + 12) / (4 * 12))


def test_waits_pass_during_the_update_only_with_staleness():
  simulated = simulation(groups_of(4, 4, 4, 4, wait_s=100.0))
  simulated.update_s = 50.0
  read = simulated.run(0).step_s - 154
  assert 0 < read < 20
  # A batch begins at each update and is trained on an update later; its wait spans that update.
  assert simulated.run(1).step_s < 0.75 * simulated.run(0).step_s


def test_equal_lengths_gain_nothing_and_a_long_tail_does():
  even = simulation(groups_of(8, 8, 8, 8), **{"sampling.slots": N * G})
  assert "would not pay: a step would be " in advice(even, "lengths")
  rng = np.random.default_rng(0)
  lengths = np.clip(3 * np.exp(rng.normal(size=(50, G))), 1, 100).astype(int)
  tail = simulation([[[(n, 0.0)] for n in row] for row in lengths.tolist()])
  line = advice(tail, "lengths of steps 3 to 8")
  assert line.startswith("slots idle ") and "x faster (lengths of steps 3 to 8)" in line


@pytest.mark.parametrize("slots", [pytest.param(5, marks=pytest.mark.slow), 16])
def test_the_forecast_is_what_a_run_needs(monkeypatch, slots):
  """Decode steps of an update, with and without staleness: within 15 % of the sampler's own."""
  counted = []
  observe = Pace.observe
  monkeypatch.setattr(
    Pace, "observe", lambda self, s, steps: (counted.append(steps), observe(self, s, steps))[1]
  )
  needed = {}
  for staleness in (0, 1):
    changes = {"sampling.slots": slots, "sampling.chunk": 2, "sampling.staleness": staleness}
    config = config_of("gtpo", **changes)
    counted.clear()
    collector, _ = collect(config, 3)
    settled = sum(counted)
    _, batches = collect(config, 12, collector=collector, first=3)
    needed[staleness] = (sum(counted) - settled) / 12
    if not staleness:
      groups = [[path_of(x) for x in group.completions] for b in batches for group in b.groups]
      simulated = simulation(groups, **changes)
  for staleness, steps in needed.items():
    assert simulated.run(staleness).draws == pytest.approx(steps, rel=0.15)


def test_lengths_are_read_or_drawn(tmp_path):
  (tmp_path / "lengths").write_text("3 4\n50")
  read = lengths_from(str(tmp_path / "lengths"), 20, G)
  assert {n for row in read for ((n, _),) in row} == {3, 4, 20} and len(read[0]) == G
  drawn = [n for row in lengths_from("lognormal:100,0.5", 10**6, G) for ((n, _),) in row]
  assert np.median(drawn) == pytest.approx(100, rel=0.1)
  assert np.log(drawn).std() == pytest.approx(0.5, rel=0.1)
  for bad in ("lognormal:100", "lognormal:a,b", "absent"):
    with pytest.raises(UserError, match="neither a file of numbers of tokens nor lognormal"):
      lengths_from(bad, 20, G)
  with pytest.raises(UserError, match="has a median below 1 token"):
    lengths_from("lognormal:0,1", 20, G)


def test_a_run_says_it_once(monkeypatch):
  config = config_of("gtpo", **PLAIN)
  worker, _ = random_worker(config)
  observer = Observer(config, worker.engine, 3)
  assert observer._counts is False  # a CPU without waits
  observer._counts = True
  _, batches = collect(config, 3)
  metrics = {"time/sample": 10.0, "time/update": 1.0}
  lines = [observer.observe(step, batches[step % 3].groups, metrics) for step in range(1, 12)]
  said = [(step, line) for step, line in enumerate(lines, 1) if line]
  assert len(said) <= 1
  assert all(step == 8 and "(lengths of steps 3 to 8)" in line for step, line in said)


@pytest.mark.slow
def test_a_run_with_a_long_tail_says_it(monkeypatch, capsys):
  """One completion of a batch is long. The observer is told to count although this is a CPU."""
  begin = Observer.__init__

  def one_is_long(engine, prompts, keys, *, original):
    limits = np.full(keys.shape[:2], 3)
    limits.flat[keys[..., 1].argmax()] = 96
    return original(engine, prompts, keys, limits)

  def counts(self, *args):
    begin(self, *args)
    self._counts = True  # although this is a CPU

  limited = functools.partialmethod(one_is_long, original=Engine.completions)
  monkeypatch.setattr(Engine, "completions", limited)
  monkeypatch.setattr(Observer, "__init__", counts)
  sizes = {"batch.prompts": 4, "batch.group": 4, "sampling.max_tokens": 96, "steps": 10}
  gtpo_jax.train(config_of("gtpo", **sizes))
  printed = capsys.readouterr().out
  assert printed.count("would make a step about") == 1
  assert "x faster (lengths of steps 3 to 8)" in printed
