"""Guards: when a run warns, what it says, and when it ends."""

import numpy as np
import pytest
from completions import completion

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.data.records import Problem, user
from gtpo_jax.loop.guards import MAX_DUMPS, Guards
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.groups import Group, row_of
from gtpo_jax.runtime.errors import RunError

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
  values = np.arange(n * g * t, dtype=np.float32).reshape(n, g, t)
  rollouts = Rollouts(
    None, values.astype(np.int32), values > 2, values > 2, -values, values, np.ones((n, g), bool)
  )
  problems = [Problem(f"p{i}", user("1"), "1", "last_number") for i in range(n)]
  correct = values[..., 0] > 1
  rewards = Rewards(correct, values[..., 1], values[..., 2])
  scored = rewards.replace(scored=values[..., 0] > 2)
  groups = []
  for i, problem in enumerate(problems):
    completions = [completion((0, i), j, [1]) for j in range(g)]
    completions[0].text = "a"
    groups.append(Group((0, i), problem, 0, completions, row_of(scored, i)))
  return Batch(groups, rollouts, rewards, {}, [])


def test_the_first_completion_of_a_problem_and_its_verdict(batch):
  assert batch.first_completion(0) == ("1", "a", None)  # not scored
  assert batch.first_completion(1) == ("1", "a", True)


def make_guards(tmp_path, rows=(), limit=3):
  said = []
  return Guards(limit, tmp_path, rows, said.append), said


def feed(guards, batch, rows, first=1):
  for step, row in enumerate(rows, first):
    guards.check(step, row, batch.to_arrays)


def test_a_healthy_run_gets_no_message(tmp_path, batch):
  guards, said = make_guards(tmp_path)
  feed(guards, batch, [GOOD] * 30)
  assert said == [] and guards.skipped == 0 and not list(tmp_path.iterdir())


def test_only_consecutive_skipped_updates_end_the_run(tmp_path, batch):
  guards, said = make_guards(tmp_path)
  feed(guards, batch, [GOOD, BAD, BAD, GOOD, BAD, BAD])
  assert (
    guards.skipped == 2 and len(said) == 4 and all("skipped the update" in line for line in said)
  )
  with pytest.raises(
    RunError, match=r"^updates were skipped in 3 consecutive steps, up to step 7, "
  ):
    guards.check(7, BAD, batch.to_arrays)


def test_a_partly_skipped_step_says_so(tmp_path, batch):
  """With several minibatches, some gradient updates of a step can be skipped and others applied."""
  guards, said = make_guards(tmp_path)
  feed(guards, batch, [BAD | {"update/skipped": 0.25}])
  assert (
    "skipped 25% of the step's gradient updates, applied the rest; its batch is in" in said[0]
    and "unchanged" not in said[0]
  )
  feed(guards, batch, [BAD], first=2)
  assert (
    "skipped the update, parameters and optimizer are unchanged" in said[1] and guards.skipped == 2
  )


def test_the_count_of_skipped_updates_continues_after_a_restart(tmp_path, batch):
  rows = (
    [{"step": 0}]
    + [{"step": i, **GOOD} for i in range(1, 9)]
    + [{"step": i, **BAD, "loss": None} for i in (9, 10)]
  )
  guards, _ = make_guards(tmp_path, rows)
  assert guards.skipped == 2
  with pytest.raises(RunError, match="skipped in 3 consecutive steps"):
    guards.check(11, BAD, batch.to_arrays)


def test_the_batch_of_a_skipped_update_is_saved(tmp_path, batch):
  guards, said = make_guards(tmp_path, limit=100)
  feed(guards, batch, [GOOD] + [BAD] * (MAX_DUMPS + 4))
  assert len(list((tmp_path / "skipped").iterdir())) == MAX_DUMPS
  assert "step_2.npz" in said[0] and "npz" not in said[-1]
  with np.load(tmp_path / "skipped" / "step_2.npz") as dump:
    assert list(dump["problems"]) == ["p0", "p1"]
    np.testing.assert_array_equal(dump["rollouts.log_probs"], batch.rollouts.log_probs)
    np.testing.assert_array_equal(dump["rewards.correct"], batch.rewards.correct)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"entropy/mean": 0.09}, ["entropy fell from 1.000 to 0.090", "pass@k"]),
    ({"length/mean": 151.0}, ["completions grew from 50 to 151 tokens", "samples.jsonl"]),
    ({"mismatch/kl": 0.06}, ["sampler and trainer disagree by 0.060", "tis_cap"]),
    (
      {"reward/accuracy": 0.0},
      ["no completion of the last 5 steps is correct", "reward/no_verdict"],
    ),
  ],
)
def test_each_warning_appears_once_with_advice(tmp_path, batch, change, words):
  guards, said = make_guards(tmp_path)
  feed(guards, batch, [GOOD] * 6 + [GOOD | change] * 12)
  assert (
    len(said) == 1 and said[0].startswith("warning: ") and all(word in said[0] for word in words)
  ), said


@pytest.mark.parametrize(
  "change", [{"entropy/mean": 0.11}, {"length/mean": 149.0}, {"mismatch/kl": 0.05}]
)
def test_no_warning_within_the_bounds(tmp_path, batch, change):
  guards, said = make_guards(tmp_path)
  feed(
    guards,
    batch,
    [GOOD] * 6 + [GOOD | change] * 12 + [GOOD | {"reward/accuracy": 0.0}] * 4 + [GOOD],
  )
  assert said == []


def test_missing_values_cause_no_warning(tmp_path, batch):
  guards, said = make_guards(tmp_path, [{"step": i, "entropy/mean": None} for i in range(1, 4)])
  feed(guards, batch, [{**GOOD, "mismatch/kl": None}] * 3, first=4)
  assert said == []


def test_memory_does_not_grow_with_the_number_of_steps(tmp_path, batch):
  guards, _ = make_guards(tmp_path)
  feed(guards, batch, [GOOD] * 1000)
  assert len(guards._last) + len(guards._first) <= 10
