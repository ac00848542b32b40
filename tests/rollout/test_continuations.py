"""Values of prefixes from their continuations, and what segments gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experience_cases import (
  G,
  N,
  T,
  coins,  # noqa: F401
  collect,
  config_of,
  host,
  make_collector,
  random_worker,
)

from gtpo_jax.algorithms import make, segment_gains
from gtpo_jax.arrays import KeyStream
from gtpo_jax.rewards import VERIFIERS
from gtpo_jax.rollout.collector import group_keys
from gtpo_jax.rollout.continuations import ValueEstimator
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.settings import GREEDY

SPO = make("spo_chain").recipe.continuations
LINES = make("vineppo").recipe.continuations


def test_where_completions_are_cut():
  """After the end of a line, unless another one follows or the completion ends."""
  pieces = ["\n", "a", "b\n", "\n", "c", "d \n", "", "e", "\n"]
  assert LINES.cuts(np.zeros(9), pieces) == [1, 4]
  assert LINES.cuts(np.zeros(2), ["a", "b"]) == LINES.cuts(np.zeros(0), []) == []
  sure, unsure = np.log([0.95, 0.85])
  log_probs = np.array([sure, unsure, unsure, sure, unsure, unsure, sure, unsure, sure])
  of = lambda interval: make("spo_chain", cut_interval=interval).recipe.continuations
  assert of(2).cuts(log_probs, [""] * 9) == [4, 7]
  assert of(3).cuts(log_probs, [""] * 9) == [5]
  assert SPO.cuts(log_probs, [""] * 9) == [] and SPO.cuts(np.full(11, unsure), [""] * 11) == [5, 10]
  assert SPO.learned(log_probs).tolist() == [
    False,
    True,
    True,
    False,
    True,
    True,
    False,
    True,
    False,
  ]
  assert LINES.learned(log_probs).all()


def slow_gains(values, cuts, m):
  """Returns for each token the value after its segment minus the value before it."""
  ends = [*cuts, m]
  gains = []
  for token in range(m):
    segment = 0
    while ends[segment] <= token:
      segment += 1
    gains.append(values[segment + 1] - values[segment])
  return gains


def test_gains_of_segments():
  """They telescope to the reward minus the value of the prompt; an unknown value masks two."""
  rng = np.random.default_rng(0)
  for _ in range(20):
    m = int(rng.integers(1, 12))
    cuts = sorted(rng.permutation(np.arange(1, m))[: rng.integers(0, 4)].tolist())
    values = rng.random(len(cuts) + 2)
    got = segment_gains(values, cuts, m)
    np.testing.assert_allclose(got, slow_gains(values, cuts, m), rtol=1e-6)
    per_segment = [got[i] for i in [0, *cuts]]
    np.testing.assert_allclose(sum(per_segment), values[-1] - values[0], atol=1e-6)
  got = segment_gains([0.25, np.nan, 0.5, 1.0], [2, 3], 5)
  np.testing.assert_array_equal(got, np.float32([np.nan, np.nan, np.nan, 0.5, 0.5]))
  np.testing.assert_array_equal(segment_gains([0.25, 1.0], [], 3), np.float32([0.75] * 3))


def values_of(config, batch, cuts, count, sampling_params=None):
  worker, params = random_worker(config)
  policy = worker.policy(params)
  keys = group_keys(config, policy.engine, KeyStream.CONTINUE, batch.groups, G)
  params = sampling_params or config.sampling_params
  manager = RewardManager(config)
  return ValueEstimator(worker, manager, policy, params).values(batch.groups, cuts, count, keys)


def test_a_batch_and_its_repetition():
  """The gains are those of the values; they depend on the seed and the group alone."""
  config = config_of("spo_chain", **{"algorithm.continuations": 3})
  _, (first, second) = collect(config, 2)
  resumed = make_collector(config, steps=1)
  _, (again,) = collect(config, 1, collector=resumed, first=1)
  jax.tree.map(np.testing.assert_array_equal, host(again), host(second))
  for batch in (first, second):
    rollouts, rewards = host(batch)
    cuts = [
      [[0, *SPO.cuts(x.arrays()["log_probs"], x.tokens)] for x in y.completions]
      for y in batch.groups
    ]
    values = values_of(config, batch, cuts, 3)
    assert batch.metrics["continuations/tokens"] == values.tokens > 0
    assert (values.mean[:, :, 0] == values.mean[:, :1, 0]).all()  # of the prompt
    for i, j in np.ndindex(N, G):
      log_probs = rollouts.log_probs[i, j][rollouts.mask[i, j]]
      last = rewards.reward[i, j] + rewards.penalty[i, j]
      path = [*values.mean[i, j, : len(cuts[i][j])], last]
      gains = slow_gains(path, cuts[i][j][1:], len(log_probs))
      gains = np.where(np.exp(log_probs) < 0.9, gains, np.nan)
      np.testing.assert_allclose(rewards.value_gains[i, j, : len(gains)], gains, atol=1e-6)
      assert np.isnan(rewards.value_gains[i, j, len(gains) :]).all()
  assert 0.5 < first.metrics["continuations/cuts"] <= 2 and first.metrics["continuations/error"] > 0
  assert np.unique(host(first)[1].value_gains[~np.isnan(host(first)[1].value_gains)]).size > 3


def test_a_run_that_is_stopped_while_it_continues_completions():
  """The next one draws the same batch and the same continuations."""
  config = config_of("spo_chain", **{"algorithm.continuations": 3})
  _, params = random_worker(config)
  polls = []
  collector = make_collector(config)
  whole = collector.collect(params, 0, print, lambda: bool(polls.append(len(polls))))
  plain = []
  make_collector(config_of("grpo")).collect(params, 0, print, lambda: bool(plain.append(0)))
  assert len(polls) > len(plain) + 3
  for last in (len(plain) + 1, len(polls) - 1):
    polls.clear()
    stopped = make_collector(config)
    with pytest.raises(Stopped):
      stopped.collect(params, 0, print, lambda last=last: polls.append(0) or len(polls) >= last)
    again = stopped.collect(params, 0, print)
    jax.tree.map(np.testing.assert_array_equal, host(again), host(whole))


def test_a_completion_without_cuts_has_the_baseline_of_its_prompt():
  config = config_of("spo_chain", **{"algorithm.cut_interval": T, "algorithm.continuations": 2})
  _, (batch,) = collect(config, 1)
  rollouts, rewards = host(batch)
  value = values_of(config, batch, [[[0]] * G] * N, 2).mean
  expected = (rewards.reward + rewards.penalty)[..., None] - value
  learned = rollouts.mask & (np.exp(rollouts.log_probs) < 0.9)
  np.testing.assert_allclose(
    rewards.value_gains[learned], np.broadcast_to(expected, learned.shape)[learned]
  )
  assert batch.metrics["continuations/cuts"] == 0


def test_deterministic_continuations_agree(monkeypatch):
  """All are one; without a verdict there is no value."""
  config = config_of("grpo")
  _, (batch,) = collect(config, 1)
  cuts = [
    [[0, x.length // 2] if x.length > 1 else [0] for x in y.completions] for y in batch.groups
  ]
  values = values_of(config, batch, cuts, 3, GREEDY)
  known = ~np.isnan(values.mean)
  assert set(values.mean[known].tolist()) <= {0.0, 1.0} and not values.error[known].any()
  monkeypatch.setitem(
    VERIFIERS, "last_number", lambda texts, *_: [None if len(x) % 2 else True for x in texts]
  )
  drawn = values_of(config, batch, cuts, 5)
  assert np.isfinite(drawn.mean[:, :, 0]).any() and np.nanmean(drawn.mean) < 1


STARTS = []


def unknown_after(prompts, completions, answers, extras):
  """A part of the reward without a value for texts with the first start and not the second."""
  unknown = lambda x: STARTS and x.startswith(STARTS[0]) and not x.startswith(STARTS[1])
  return [None if unknown(text) else 0.0 for text in completions]


def test_a_prefix_without_a_verdict_masks_the_segments_beside_it(monkeypatch):
  parts = f"correct,{__name__}:unknown_after"
  config = config_of("spo_chain", **{"algorithm.continuations": 2, "reward.parts": parts})
  worker, params = random_worker(config)
  _, (batch,) = collect(config, 1)
  completion = batch.groups[0].completions[0]
  before, after = SPO.cuts(completion.arrays()["log_probs"], completion.tokens)
  starts = worker.decode([completion.tokens[:before], completion.tokens[:after]])
  monkeypatch.setattr(f"{__name__}.STARTS", starts)
  policy = worker.policy(params)
  keys = group_keys(config, policy.engine, KeyStream.CONTINUE, batch.groups, G)
  manager = RewardManager(config)
  estimator = ValueEstimator(worker, manager, policy, config.sampling_params)
  part = config.resolved_algorithm.recipe.continuations
  gains, _ = estimator.gains(part, batch.groups, keys, T)
  plain = host(batch)[1].value_gains
  learned = ~np.isnan(plain)
  assert learned[0, 0, :after].any() and learned[0, 0, after:].any()
  learned[0, 0, :after] = False
  np.testing.assert_array_equal(~np.isnan(gains), learned)
  np.testing.assert_array_equal(gains[learned], plain[learned])


@pytest.mark.slow
def test_many_continuations_agree_with_the_enumerated_value():
  """Two tokens before the limit: all next tokens, and after each of them the stop tokens."""
  config = config_of("grpo", **{"batch.prompts": 2})
  worker, params = random_worker(config)
  _, (batch,) = collect(config, 1)
  long = [
    (i, j)
    for i, group in enumerate(batch.groups)
    for j, x in enumerate(group.completions)
    if x.length == T
  ]
  assert len(long) > 3
  cuts = [[[T - 2] if (i, j) in long else [] for j in range(G)] for i in range(2)]
  count = 600
  values = values_of(config, batch, cuts, count)
  stop = np.asarray(sorted(worker.chat.stop))
  apply = jax.jit(
    lambda params, tokens: jax.nn.softmax(worker.model.apply({"params": params}, tokens)[:, -1])
  )
  even = lambda tokens: len(worker.decode([tokens])[0]) % 2 == 0
  for i, j in long[:4]:
    completion = batch.groups[i].completions[j]
    prefix = completion.tokens[: T - 2].tolist()
    whole = [*completion.prompt.tokens, *prefix]
    vocabulary = worker.model.config.vocab_size
    first = np.asarray(apply(params, jnp.asarray([whole])))[0]
    sequences = np.asarray([[*whole, v] for v in range(vocabulary)])
    ends = np.asarray(apply(params, jnp.asarray(sequences)))[:, stop].sum(1)
    value = 0.0
    for v in range(vocabulary):
      if v in stop:
        value += first[v] * even([*prefix, v])
      else:
        value += first[v] * ends[v] * even([*prefix, v, int(stop[0])])
    error = np.sqrt(value * (1 - value) / count)
    assert abs(values.mean[i, j, 0] - value) < 3 * error + 1e-9
    np.testing.assert_allclose(values.error[i, j, 0], error, rtol=0.5)


def test_what_does_not_go_with_continuations():
  for changes, message in (
    ({"sampling.staleness": 1}, "does not work with sampling.staleness = 1, because several"),
    ({"env.make": "m:Cls"}, "does not work with episodes"),
    ({"algorithm.length_penalty": "group_relative", "algorithm.gamma": 0.8}, "use 'overlong'"),
    ({"algorithm.cut_interval": 2}, "has no setting 'cut_interval'"),
  ):
    with pytest.raises(UserError, match=message):
      config_of("vineppo", **changes)
  with pytest.raises(UserError, match="has no setting 'continuations'"):
    make("grpo", continuations=3)
  for settings in ({"continuations": 0}, {"cut_interval": 0}, {"cut_probability": 1.5}):
    with pytest.raises(UserError, match=next(iter(settings))):
      make("spo_chain", **settings)
