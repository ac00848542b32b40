"""The studies of credit: stored results, statistics, gradients of the arms, problems."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_arms import ARMS, BASELINE, ArmBatch
from credit_probe import REFERENCE_NAME, Gradients, leave_one_out_result, measure
from credit_tasks import HELD_OUT, TRAINING_PROBLEMS, two_words, write_problems
from study import Cells, compare
from toys import config_of

from gtpo_jax.arrays import Prompts, Rollouts, Signals
from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.probing.gradients import make_gradients
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.training.log_probs import Reading, head_settings, score

N, G, T, VOCAB = 4, 4, 6, 128


def test_results_are_computed_once_and_only_within_pattern_and_budget(tmp_path):
  now = [0.0]
  made = []

  def make():
    made.append(now[0])
    now[0] += 40.0
    return {"x": [1 / 3, float(len(made))]}

  cells = lambda **more: Cells(tmp_path / "out", tmp_path / "old", clock=lambda: now[0], **more)
  first = cells().compute("run-a", {"seed": 0}, make)
  assert first["x"] == [0.333333, 1.0] and first["settings"] == {"seed": 0}
  assert cells().compute("run-a", {"seed": 0}, make) == first and len(made) == 1
  with pytest.raises(UserError, match="other settings"):
    cells().compute("run-a", {"seed": 1}, make)

  some = cells(patterns=["run-b*"], budget_s=100.0)
  assert [some.compute(f"run-{name}", {}, make) is None for name in ("b1", "c", "b2", "b3")] == [
    False,
    True,
    False,
    True,  # 80 of 100 seconds are used, and a run takes 40
  ]
  assert some.left == ["run-c", "run-b3"]

  (tmp_path / "old").mkdir()
  (tmp_path / "old" / "run-d.json").write_text(json.dumps({"settings": {}, "x": 7}))
  assert cells().compute("run-d", {}, make)["x"] == 7 and len(made) == 3


def test_the_reference_of_a_batch_is_the_mean_of_the_others():
  rng = np.random.default_rng(0)
  names = ["arm", REFERENCE_NAME]
  values = rng.normal(1.0, 1.0, (5, 2, 8)).astype(np.float32)
  batches = [Gradients(names, values[i], {"accuracy": 0.1 * i}) for i in range(3)]
  batches += [Gradients([REFERENCE_NAME], values[i, 1:], {"accuracy": 0.1 * i}) for i in (3, 4)]
  found = leave_one_out_result(batches, 3)
  for i in range(3):
    other = sum(values[j, 1].astype(float) for j in range(5) if j != i) / 4
    own = values[i, 0].astype(float)
    expected = own @ other / np.sqrt((own @ own) * (other @ other))
    assert found["arms"]["arm"]["cosine"][i] == pytest.approx(expected, rel=1e-6)
  assert found["signals"]["accuracy"] == pytest.approx(0.2)


def test_two_words_need_the_topic_and_both_words(tmp_path):
  extra = {"topic": "whale", "first": "rope", "second": "lamp"}
  texts = (
    "The whale carried a rope and a lamp.",
    "The whale carried a rope and a coin.",
    "The ship carried a rope and a lamp.",
  )
  assert two_words(texts, texts, texts, [extra] * 3) == [True, False, False]
  write_problems(tmp_path)
  held_out, training = (
    [
      json.loads(line)["prompt"]
      for line in (tmp_path / f"words-{x}.jsonl").read_text().splitlines()
    ]
    for x in ("eval", "train")
  )
  assert len(set(held_out)) == HELD_OUT and len(set(training)) == TRAINING_PROBLEMS
  assert not set(held_out) & set(training)


@pytest.mark.slow
def test_a_difference_is_paired_over_problems_and_seeds():
  run = lambda *correct: {"samples": 4, "correct": list(correct)}
  better = {0: run(3, 1, 2, 4), 1: run(3, 3, 4, 4), 2: run(0, 0, 0, 0)}
  worse = {0: run(2, 0, 1, 3), 1: run(2, 2, 3, 3)}
  difference, low, high, p_value = compare(better, worse)  # seed 2 has no pair
  assert (difference, low, high) == pytest.approx((0.25, 0.25, 0.25))
  assert p_value < 1e-3
  assert compare(worse, worse)[:3] == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def case():
  """Returns a small model, its parameters and a batch with known truth."""
  config = ModelConfig(VOCAB, 32, 1, heads=2, kv_heads=1, head_dim=16, mlp=32)
  model = Transformer(config, make_mesh(devices=jax.devices()[:1]))
  params = init_params(model, jax.random.key(0))
  rng = np.random.default_rng(0)
  mask = np.arange(T) < rng.integers(2, T + 1, (N, G, 1))
  rollouts = Rollouts(
    prompts=Prompts(rng.integers(1, VOCAB, (N, 5), np.int32), np.full(N, 5, np.int32)),
    tokens=np.where(mask, rng.integers(1, VOCAB, (N, G, T), np.int32), 0),
    present=mask,
    mask=mask,
    log_probs=np.zeros((N, G, T), np.float32),
    entropy=np.where(mask, rng.gamma(1.0, 1.0, (N, G, T)), 0).astype(np.float32),
    finished=np.ones((N, G), bool),
  )
  log_probs, _ = score(model, params, Reading.of(rollouts), head_settings(model, 1.0, 0))
  rollouts = shard_batch(rollouts.replace(log_probs=log_probs), model.mesh)
  correct = rng.random((N, G)) < 0.5
  correct[:, :2] = [True, False]
  signals = Signals(
    entropy=np.asarray(rollouts.entropy),
    mask=mask,
    correct=correct,
    reward=correct.astype(np.float32),
    penalty=np.zeros((N, G), np.float32),
  )
  codes = np.where(mask, rng.choice(np.uint8([1, 2, 3, 4, 11, 12]), mask.shape), 0)
  return model, params, ArmBatch(rollouts, signals, codes, 0)


@pytest.mark.slow
def test_gradients_of_arms_are_those_of_their_losses(case):
  model, params, batch = case
  arm = ARMS["grpo_s, beta2 = 1"]
  gradients = make_gradients(config_of(**{"batch.micro_batches": 1}), model, params)
  found = measure(gradients, batch, {"uniform": ARMS[BASELINE], "grpo_s": arm}, {})

  def loss(params):
    rollouts = batch.rollouts
    log_probs, _ = score(model, params, Reading.of(rollouts), head_settings(model, 1.0, 0))
    return arm.algorithm.loss(
      log_probs=log_probs,
      log_probs_old=rollouts.log_probs,
      advantages=arm.advantages(batch),
      mask=arm.loss_mask(batch),
    )[0]

  leaves = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
  expected = jnp.concatenate([leaf.ravel() for leaf in leaves])
  np.testing.assert_allclose(found.of("grpo_s"), expected, atol=2e-6)
  assert not np.allclose(found.of("uniform"), found.of("grpo_s"), atol=1e-4)


@pytest.mark.slow
def test_the_oracle_pays_deciding_tokens_and_one_sided_arms_leave_the_other_side_uniform(case):
  *_, batch = case
  uniform = np.asarray(ARMS[BASELINE].advantages(batch))
  oracle = np.asarray(ARMS["oracle mask"].advantages(batch))
  decides = batch.codes % 8 >= 3
  np.testing.assert_array_equal(oracle[decides], uniform[decides])
  assert not oracle[~decides].any() and oracle[decides].any()

  correct = batch.signals.correct
  mask = batch.signals.mask
  spread = lambda x, i, j: np.ptp(x[i, j][mask[i, j]])
  advantages = np.asarray(ARMS["ours: 1/H in wrong ones, by completion"].advantages(batch))
  for i, j in np.ndindex(correct.shape):
    assert (spread(advantages, i, j) < 1e-5) == bool(correct[i, j])
  hesitant = np.asarray(ARMS["ours: hesitation, by completion"].advantages(batch))
  entropy = batch.signals.entropy
  for i, j in zip(*np.where(~correct), strict=True):
    tokens = mask[i, j]
    order = np.argsort(entropy[i, j][tokens])
    assert (np.diff(hesitant[i, j][tokens][order]) < 0).all()


@pytest.mark.slow
def test_shuffled_completions_exchange_the_credit_of_grpo_s_within_a_verdict(case):
  *_, batch = case
  correct = batch.signals.correct
  own, shuffled = (
    np.asarray(ARMS[name].advantages(batch)).max(2, where=batch.signals.mask, initial=-np.inf)
    for name in ("grpo_s, beta2 = 1", "grpo_s, entropies shuffled")
  )
  for i in range(len(correct)):
    for verdict in (False, True):
      of = correct[i] == verdict
      np.testing.assert_allclose(np.sort(shuffled[i, of]), np.sort(own[i, of]), atol=1e-5)
  assert not np.allclose(shuffled, own, atol=1e-2)


@pytest.mark.slow
def test_a_baseline_by_position_sums_to_zero_over_a_group(case):
  *_, batch = case
  advantages = np.asarray(ARMS["ours: baseline by position"].advantages(batch))
  np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-5)
