"""The batch of a step: plain sampling, dynamic sampling, and leftovers."""

import numpy as np
import pytest
from experience_cases import (
  G,
  N,
  T,
  assert_equal,
  coins,  # noqa: F401 (an autouse fixture)
  collect,
  config_of,
  contrast,
  host,
  make_collector,
  random_worker,
)

from gtpo_jax.rollout.groups import leftovers_like
from gtpo_jax.runtime.signals import Stopped

# --- without dynamic sampling ---


def test_a_plain_batch_depends_only_on_its_step():
  config = config_of("gtpo")
  _, batches = collect(config, 3)
  _, params = random_worker(config)
  late = make_collector(config, steps=2).collect(params, 2, print)
  assert_equal(host(batches[2]), host(late))
  assert [problem.id for problem in late.problems] == [
    problem.id for problem in batches[2].problems
  ]
  assert batches[0].rollouts.stale is None and batches[0].metrics.keys() == {
    "time/sample",
    "time/reward",
    "reward/no_verdict",
    "sampling/slots_busy",
  }
  assert all(len(row) == G for row in batches[0].texts)


@pytest.mark.parametrize("name", ["gtpo", pytest.param("dapo", marks=pytest.mark.manual)])
def test_a_stopped_step_is_sampled_again(name):
  """Wherever sampling is stopped, the next call returns the batch of an undisturbed run."""
  config = config_of(name)
  _, params = random_worker(config)
  polls = 0

  def collect_until(collector, limit):
    """Stops at the `limit`th poll, or never if `limit` is 0."""
    nonlocal polls
    polls = 0

    def stopping():
      nonlocal polls
      polls += 1
      return polls == limit

    return collector.collect(params, 0, print, stopping)

  collector = make_collector(config)
  collect_until(collector, 0)
  before = collector.leftovers()
  undisturbed = make_collector(config)
  collect_until(undisturbed, 0)
  expected = host(collect_until(undisturbed, 0))
  last = polls  # after everything is sampled and scored
  assert last >= 2
  for limit in range(1, last + 1):
    with pytest.raises(Stopped):
      collect_until(collector, limit)
    assert_equal(collector.leftovers(), before)
  assert_equal(host(collect_until(collector, 0)), expected)


# --- dynamic sampling ---


def test_surplus_groups_come_first_in_the_next_step():
  config = config_of(**{"batch.max_gen_batches": 40})
  collector, batches = collect(config, 4)
  generated = drawn = 0
  for before, batch in zip([None, *batches], batches, strict=False):
    assert contrast(batch).all() and batch.rollouts.tokens.shape == (N, G, T)
    m = batch.metrics
    assert m["groups/short"] == 0 and m["groups/sampled"] % N == 0
    generated += m["groups/sampled"]
    drawn += m["groups/dropped"]
    stale = np.asarray(batch.rollouts.stale)
    kept = int(before.metrics["groups/kept"]) if before else 0
    assert stale[:kept].all() and not stale[kept:].any()
    # No group with contrast is lost.
    assert N + m["groups/kept"] == kept + m["groups/sampled"] - m["groups/dropped"]
  assert max(batch.metrics["groups/kept"] for batch in batches) > 0
  assert generated == collector.leftovers()["begun"]
  ids = [problem.id for batch in batches for problem in batch.problems]
  assert len(set(ids)) == len(ids)  # no group is trained on twice


def test_dynamic_sampling_keeps_the_data_order():
  """Each group of a filled batch equals, bit for bit, the one that plain sampling returns."""
  collector, (batch,) = collect(config_of(**{"batch.max_gen_batches": 40}), 1)
  _, plain = collect(config_of("gtpo"), int(collector.leftovers()["begun"]) // N)
  by_id = {
    problem.id: (b.rollouts.tokens[i], b.rollouts.log_probs[i], b.texts[i])
    for b in plain
    for i, problem in enumerate(b.problems)
  }
  for i, problem in enumerate(batch.problems):
    tokens, log_probs, texts = by_id[problem.id]
    np.testing.assert_array_equal(batch.rollouts.tokens[i], tokens)
    np.testing.assert_array_equal(batch.rollouts.log_probs[i], log_probs)
    assert batch.texts[i] == texts


def test_at_the_limit_a_step_trains_on_the_groups_it_has():
  said = []
  _, (batch,) = collect(config_of(**{"batch.max_gen_batches": 1}), 1, said=said)
  good = int(contrast(batch).sum())
  assert (
    0 < good < N and batch.metrics["groups/short"] == N - good == batch.metrics["groups/dropped"]
  )
  assert said == [
    f"dynamic sampling: batch.max_gen_batches = 1 reached; {N - good} of 8 sampled groups carry no "
    f"learning signal; training on {good} of 8 groups in this step"
  ]
  np.testing.assert_array_equal(np.asarray(batch.rewards.valid).all(1), contrast(batch))
  assert batch.metrics["groups/all_wrong"] + batch.metrics["groups/all_correct"] == (N - good) / N
  assert batch.metrics["reward/accuracy"] == pytest.approx(batch.correct.mean())
  # Everything sampled is in the batch, so its entropies are those of the metrics.
  mask = np.asarray(batch.rollouts.mask)
  entropy = np.asarray(batch.rollouts.entropy)
  assert batch.metrics["entropy/mean"] == pytest.approx(entropy[mask].mean(), rel=1e-5)
  incorrect = mask & ~batch.correct[..., None]
  assert batch.metrics["entropy/incorrect"] == pytest.approx(entropy[incorrect].mean(), rel=1e-5)
  assert batch.metrics["length/mean"] == pytest.approx(mask.sum(-1).mean())
  both = batch.add_metrics({"entropy/mean": 0.5, "loss": 0.1})
  assert both["kept/entropy/mean"] == 0.5 and both["loss"] == 0.1
  assert both["entropy/mean"] == batch.metrics["entropy/mean"] and "entropy/mean" in both


@pytest.mark.slow
def test_leftovers_can_be_saved_and_restored():
  config = config_of(**{"batch.max_gen_batches": 40})
  collector, _ = collect(config, 1)
  while not collector.leftovers()["count"]:
    collect(config, 1, collector=collector)
  leftovers = collector.leftovers()
  like = leftovers_like(config)
  assert leftovers.keys() == like.keys()
  assert all(
    leftovers[name].shape == x.shape and leftovers[name].dtype == x.dtype
    for name, x in like.items()
  )
  _, (expected,) = collect(config, 1, collector=collector)
  again = make_collector(config)
  again.restore(leftovers)
  _, (batch,) = collect(config, 1, collector=again)
  assert_equal(host(expected), host(batch))
  assert batch.texts == expected.texts and batch.problems == expected.problems
  assert {k: v for k, v in batch.metrics.items() if "time" not in k} == {
    k: v for k, v in expected.metrics.items() if "time" not in k
  }
