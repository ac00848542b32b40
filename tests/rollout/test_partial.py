"""Partial rollouts: completions that are sampled over several steps."""

import jax
import numpy as np
import pytest
from experience_cases import (
  NONE,
  G,
  N,
  assert_equal,
  coins,  # noqa: F401
  collect,
  config_of,
  contrast,
  host,
  make_collector,
  random_worker,
)
from scores import jitted_score

from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.group_pool import choose
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped

SLOTS = {"sampling.slots": 5, "sampling.chunk": 3, "sampling.max_tokens": 24}
# An evaluation as large as the pool: whole batches and staleness 1 share a worker and its programs.
SLOTS |= {"eval.batch": 2 * N * G}
BY_DATA = {"mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1}


def stale_config(staleness=1, name="gtpo", **changes):
  return config_of(name, **{"sampling.staleness": staleness, **SLOTS, **changes})


# --- which groups are trained on ---


@pytest.mark.parametrize(
  ("begun", "complete", "version", "staleness", "expected"),
  [
    # the two oldest complete groups, whatever is unfinished
    ([0, 0, 0, 0], [0, 1, 0, 1], 0, 1, [1, 3]),
    ([0, 0, 0, 0], [1, 1, 1, 1], 0, 1, [0, 1]),
    ([0, 0, 0, 0], [0, 1, 0, 0], 0, 1, None),
    # a group that began before update 0 is due at update 1
    ([0, 1, 1], [0, 1, 1], 1, 1, None),
    ([0, 1, 1], [1, 0, 1], 1, 1, [0, 2]),
    ([0, 1, 1], [0, 1, 1], 1, 2, [1, 2]),
    # at most two of the four groups that began at update 0 may be left for update 2
    ([0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], 1, 2, None),
    ([0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 1, 1], 1, 2, None),
    ([0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1], 1, 2, [1, 3]),
    ([0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1], 1, 2, [1, 4]),
  ],
)
def test_the_choice(begun, complete, version, staleness, expected):
  assert choose(begun, complete, 2, version, staleness) == expected


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_the_choice_keeps_the_bound(staleness):
  """Whichever groups end first, there is always a choice, and none is trained on too late."""
  rng = np.random.default_rng(staleness)
  n = 3
  pool = []  # (begun, complete)
  trained = []
  for version in range(200):
    pool += [[version, False] for _ in range(n * (1 + staleness) - len(pool))]
    used = 0
    while True:
      chosen = choose([b for b, _ in pool], [c for _, c in pool], n, version, staleness)
      if chosen is not None:
        break
      unfinished = [i for i, (_, complete) in enumerate(pool) if not complete]
      i = unfinished[min(rng.geometric(0.3) - 1, len(unfinished) - 1)]  # the oldest are ahead
      pool[i][1] = True
      used = max(used, i)
    trained += [version - pool[i][0] for i in chosen]
    used = max([used, *chosen, *(i for i, (b, _) in enumerate(pool) if b < version)])
    pool = [pool[i] for i in range(used + 1) if i not in chosen]
  assert max(trained) == staleness and len(trained) == 200 * n


# --- what is sampled ---


def rows_by_problem(batches):
  """Returns each group's tokens, mask, log-probs and rewards by its problem's id."""
  rows = {}
  for batch in batches:
    rollouts, rewards = host(batch)
    for i, problem in enumerate(batch.problems):
      assert problem.id not in rows  # no group is trained on twice
      rows[problem.id] = jax.tree.map(
        lambda x, i=i: np.asarray(x)[i],
        (rollouts.tokens, rollouts.mask, rollouts.finished, rewards.correct, rewards.reward),
      )
  return rows


def assert_same_groups(rows, expected):
  """Compares groups completion by completion.

  One may differ: once its tokens have been read again, sums of probabilities are rounded
  differently, and a random number may fall on the other side of one.
  """
  different = 0
  for name, row in rows.items():
    same = (row[0] == expected[name][0]).all(-1)
    different += int((~same).sum())
    for x, y in zip(row, expected[name], strict=True):
      np.testing.assert_array_equal(x[same], y[same])
  assert rows and different <= 1


@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=pytest.mark.manual)])
def test_groups_are_those_of_whole_batches(staleness):
  """With parameters that do not change, each group equals the one of a run without staleness."""
  config = stale_config(staleness)
  collector, batches = collect(config, 5)
  _, whole = collect(stale_config(0), 5 + staleness)
  expected = rows_by_problem(whole)
  rows = rows_by_problem(batches)
  assert_same_groups(rows, expected)
  unfinished = 0
  for version, batch in enumerate(batches):
    rollouts = batch.rollouts
    assert rollouts.tokens.shape[:2] == (N, G)
    age = version - np.asarray(rollouts.versions)[np.asarray(rollouts.mask)]
    assert age.min() >= 0 and age.max() <= staleness
    assert batch.metrics["staleness/max"] == age.max()
    assert batch.metrics["staleness/mean"] == pytest.approx(age.mean())
    assert batch.metrics["staleness/tokens"] == pytest.approx((age > 0).mean())
    assert batch.metrics["groups/kept"] <= N * staleness
    unfinished += batch.metrics["groups/unfinished"]
  assert unfinished > 0 and any(batch.metrics["staleness/max"] for batch in batches)
  leftovers = collector.leftovers()
  # Groups are begun in order, and none is lost.
  assert leftovers["begun"] == 5 * N + leftovers["count"]
  first = [problem.id for batch in whole for problem in batch.problems][: int(leftovers["begun"])]
  assert set(rows) <= set(first)


@pytest.mark.slow
def test_every_token_keeps_the_log_prob_of_the_policy_that_drew_it():
  """The parameters change at each step; a token's ratio to its version's policy is 1.

  Log-probs between 4 and 8 have a resolution of 5e-7 in float32.
  """
  config = stale_config(2)
  collector = make_collector(config)
  worker, params = random_worker(config)
  policies = [jax.tree.map(lambda x, k=k: x * (1 + 0.03 * k), params) for k in range(5)]
  mixed = 0
  errors = []
  for version, policy in enumerate(policies):
    rollouts = collector.collect(policy, version, print).rollouts
    mask = np.asarray(rollouts.mask)
    versions = np.asarray(rollouts.versions)
    mixed += int(((versions < version) & mask).any(-1).sum())
    for drawn_at in np.unique(versions[mask]):
      log_probs, entropy = jitted_score(
        worker.model, policies[drawn_at], rollouts.prompts, rollouts.tokens, 1.0, 64
      )
      here = mask & (versions == drawn_at)
      errors.append(np.abs(np.exp(np.asarray(log_probs - rollouts.log_probs)[here]) - 1))
      assert np.abs(np.asarray(entropy - rollouts.entropy))[here].max() <= 1e-5
    # Versions only rise within a completion.
    assert (np.diff(versions, axis=-1)[mask[..., 1:]] >= 0).all()
  assert mixed > 5
  errors = np.concatenate(errors)
  assert np.quantile(errors, 0.99) <= 1e-6 and errors.max() <= 1e-5


def test_rewards_that_no_batch_needs_yet_are_not_awaited():
  """Groups beyond the batch are scored during the update, or after a resume; nothing changes."""
  config = stale_config(1, **{"sampling.slots": 2 * N * G})
  collector = make_collector(config)
  for step in range(10):
    collect(config, 1, collector=collector, first=step)
    if pending := [group for group in collector._kept if group.index in collector._pending]:
      break
  assert pending and all(group.rewards is None for group in pending)
  restored = make_collector(config)
  restored.restore({key: np.array(x) for key, x in collector.leftovers().items()})
  assert not any(group.index in restored._pending for group in restored._kept)
  (batch,), (other,) = (
    collect(config, 1, collector=x, first=step + 1)[1] for x in (collector, restored)
  )
  assert {group.index for group in pending} & {group.index for group in batch.groups}
  assert_equal(host(batch), host(other))
  for name in ("reward/no_verdict", "groups/kept", "groups/unfinished", "tokens/sampled"):
    assert batch.metrics[name] == other.metrics[name]


@pytest.mark.parametrize("name", ["gtpo", "dapo", "dapo_mixed"])
@pytest.mark.some(0, slow=1)
def test_a_restored_collector_goes_on_alike(name):
  config = stale_config(2, name, **{"batch.max_gen_batches": 10})
  worker, params = random_worker(config)
  frozen = NONE
  if name == "dapo_mixed":
    guide = worker.policy(jax.tree.map(lambda x: 1.1 * x, params))
    frozen = FrozenPolicies(guide, None, {}, {})
  collector, _ = collect(config, 3, frozen)
  restored = make_collector(config, frozen)
  saved = collector.leftovers()
  assert saved["count"] and not saved["complete"][: saved["count"]].all()
  restored.restore({key: np.array(x) for key, x in saved.items()})
  _, expected = collect(config, 3, frozen, collector, first=3)
  _, batches = collect(config, 3, frozen, restored, first=3)
  for batch, other in zip(batches, expected, strict=True):
    assert_equal(host(batch), host(other))
    assert batch.texts == other.texts
  assert_equal(restored.leftovers(), collector.leftovers())


@pytest.mark.slow
def test_a_stopped_step_is_sampled_again():
  config = stale_config(1)
  _, params = random_worker(config)
  collector, _ = collect(config, 2)
  before = collector.leftovers()
  for limit in (1, 2, 4):
    polls = iter([False] * (limit - 1) + [True])
    with pytest.raises(Stopped):
      collector.collect(params, 2, print, lambda polls=polls: next(polls))
    assert_equal(collector.leftovers(), before)
  (batch,) = collect(config, 1, collector=collector, first=2)[1]
  expected = collect(config, 3)[1][2]
  assert_equal(host(batch), host(expected))


@pytest.mark.devices
@pytest.mark.manual
def test_dynamic_sampling_has_the_same_pool():
  """Groups without contrast are dropped; the others are trained on once, within the bound."""
  config = stale_config(1, "dapo", **BY_DATA, **{"batch.max_gen_batches": 20})
  _, batches = collect(config, 5)
  rows_by_problem(batches)
  dropped = 0
  for version, batch in enumerate(batches):
    assert contrast(batch).all() and batch.metrics["groups/short"] == 0
    age = version - np.asarray(batch.rollouts.versions)[np.asarray(batch.rollouts.mask)]
    assert age.max() <= 1
    dropped += batch.metrics["groups/dropped"]
  assert dropped > 0 and any(batch.metrics["staleness/max"] for batch in batches)


@pytest.mark.manual
def test_a_guide_writes_its_completions_when_a_group_is_complete():
  config = stale_config(1, "dapo_mixed", **{"batch.max_gen_batches": 20})
  worker, params = random_worker(config)
  guide = worker.policy(jax.tree.map(lambda x: 1.1 * x, params))
  _, batches = collect(config, 4, FrozenPolicies(guide, None, {}, {}))
  whole_config = stale_config(0, "dapo_mixed", **{"batch.max_gen_batches": 40})
  _, whole = collect(whole_config, 6, FrozenPolicies(guide, None, {}, {}))
  expected = rows_by_problem(whole)
  rows = rows_by_problem(batches)
  common = rows.keys() & expected.keys()
  assert len(common) > N
  assert_same_groups({name: rows[name] for name in common}, expected)
  for batch in batches:
    assert np.asarray(batch.rollouts.guided).sum(1).tolist() == [1] * N


@pytest.mark.parametrize("staleness", [-1, 17])
def test_a_bound_that_makes_no_sense_is_refused(staleness):
  with pytest.raises(UserError, match=r"sampling.staleness must be from 0 .* got"):
    stale_config(staleness)


@pytest.mark.devices
@pytest.mark.slow
def test_tokens_are_carried_over_to_other_devices():
  """What has been begun on one mesh goes on on another."""
  config = stale_config(2, **BY_DATA)
  other = stale_config(2, **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
  collector, _ = collect(config, 2)
  moved = make_collector(other)
  moved.restore(collector.leftovers())
  _, expected = collect(config, 2, collector=collector, first=2)
  _, batches = collect(other, 2, collector=moved, first=2)
  assert_same_groups(rows_by_problem(batches), rows_by_problem(expected))
