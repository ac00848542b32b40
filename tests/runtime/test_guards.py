"""Guards: what is said of a run that goes wrong, when, and how it ends."""

import numpy as np
import pytest

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.data.records import Problem, user
from gtpo_jax.rollout.experience import Experience
from gtpo_jax.runtime.errors import RunError
from gtpo_jax.runtime.guards import DUMPS, Guards

GOOD = {
  "loss": 0.1,
  "grad_norm": 1.0,
  "update/skipped": 0.0,
  "entropy/mean": 1.0,
  "length/mean": 50.0,
  "mismatch/kl": 1e-4,
  "reward/accuracy": 0.5,
}
BAD = GOOD | {"loss": float("nan"), "update/skipped": 1.0}


@pytest.fixture
def batch():
  n = 2
  g = 3
  t = 4
  number = np.arange(n * g * t, dtype=np.float32).reshape(n, g, t)
  rollouts = Rollouts(
    None, number.astype(np.int32), number > 2, -number, number, np.ones((n, g), bool)
  )
  problems = [Problem(f"p{i}", user("1"), "1", "last_number") for i in range(n)]
  correct = number[..., 0] > 1
  return Experience(
    rollouts,
    Rewards(correct, number[..., 1], number[..., 2]),
    problems,
    [[""] * g] * n,
    correct,
    {},
  )


def guards(tmp_path, rows=(), limit=3):
  said = []
  return Guards(limit, tmp_path, rows, said.append), said


def feed(guard, batch, rows, first=1):
  for step, row in enumerate(rows, first):
    guard.check(step, row, batch.to_arrays)


def test_a_good_run_hears_nothing(tmp_path, batch):
  guard, said = guards(tmp_path)
  feed(guard, batch, [GOOD] * 30)
  assert said == [] and guard.skipped == 0 and not list(tmp_path.iterdir())


def test_skipped_updates_in_a_row_end_the_run_and_single_ones_do_not(tmp_path, batch):
  guard, said = guards(tmp_path)
  feed(guard, batch, [GOOD, BAD, BAD, GOOD, BAD, BAD])
  assert (
    guard.skipped == 2 and len(said) == 4 and all("the update is skipped" in line for line in said)
  )
  with pytest.raises(RunError, match=r"^updates were skipped in 3 steps in a row, to step 7, "):
    guard.check(7, BAD, batch.to_arrays)


def test_updates_that_are_skipped_in_part_are_told_as_such(tmp_path, batch):
  """Of several minibatches one may be skipped and the others made."""
  guard, said = guards(tmp_path)
  feed(guard, batch, [BAD | {"update/skipped": 0.25}])
  assert (
    "25% of its gradient updates are skipped, the others are made; its batch is in" in said[0]
    and "as before" not in said[0]
  )
  feed(guard, batch, [BAD], first=2)
  assert (
    "the update is skipped, parameters and optimizer are as before" in said[1]
    and guard.skipped == 2
  )


def test_the_row_goes_on_after_a_restart(tmp_path, batch):
  rows = (
    [{"step": 0}]
    + [{"step": i, **GOOD} for i in range(1, 9)]
    + [{"step": i, **BAD, "loss": None} for i in (9, 10)]
  )
  guard, _ = guards(tmp_path, rows)
  assert guard.skipped == 2
  with pytest.raises(RunError, match="skipped in 3 steps in a row"):
    guard.check(11, BAD, batch.to_arrays)


def test_the_batch_of_a_skipped_update_is_kept(tmp_path, batch):
  guard, said = guards(tmp_path, limit=100)
  feed(guard, batch, [GOOD] + [BAD] * (DUMPS + 4))
  assert len(list((tmp_path / "skipped").iterdir())) == DUMPS
  assert "step_2.npz" in said[0] and "npz" not in said[-1]
  with np.load(tmp_path / "skipped" / "step_2.npz") as dump:
    assert list(dump["problems"]) == ["p0", "p1"]
    np.testing.assert_array_equal(dump["rollouts.log_probs"], batch.rollouts.log_probs)
    np.testing.assert_array_equal(dump["verdicts.correct"], batch.verdicts.correct)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"entropy/mean": 0.09}, ["entropy fell from 1.000 to 0.090", "pass@k"]),
    ({"length/mean": 151.0}, ["completions grew from 50 to 151 tokens", "samples.jsonl"]),
    ({"mismatch/kl": 0.06}, ["sampler and trainer disagree by 0.060", "tis_cap"]),
    (
      {"reward/accuracy": 0.0},
      ["not one completion of the last 5 steps is right", "reward/no_verdict"],
    ),
  ],
)
def test_each_warning_comes_once_with_what_to_look_at(tmp_path, batch, change, words):
  guard, said = guards(tmp_path)
  feed(guard, batch, [GOOD] * 6 + [GOOD | change] * 12)
  assert (
    len(said) == 1 and said[0].startswith("warning: ") and all(word in said[0] for word in words)
  ), said


@pytest.mark.parametrize(
  "change", [{"entropy/mean": 0.11}, {"length/mean": 149.0}, {"mismatch/kl": 0.05}]
)
def test_no_warning_within_the_bounds(tmp_path, batch, change):
  guard, said = guards(tmp_path)
  feed(
    guard, batch, [GOOD] * 6 + [GOOD | change] * 12 + [GOOD | {"reward/accuracy": 0.0}] * 4 + [GOOD]
  )
  assert said == []


def test_numbers_that_are_missing_are_no_alarm(tmp_path, batch):
  guard, said = guards(tmp_path, [{"step": i, "entropy/mean": None} for i in range(1, 4)])
  feed(guard, batch, [{**GOOD, "mismatch/kl": None}] * 3, first=4)
  assert said == []


def test_memory_does_not_grow_with_the_steps(tmp_path, batch):
  guard, _ = guards(tmp_path)
  feed(guard, batch, [GOOD] * 1000)
  assert len(guard._last) + len(guard._first) <= 10
