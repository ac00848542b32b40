"""The compiled update: its result depends neither on micro-batches nor on the mesh."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from meshes import mesh_of
from update_cases import (
  CONFIG,
  EVERY_LOSS_TERM,
  SGD_LIKE,
  SGD_WITHOUT_DECAY,
  G,
  N,
  T,
  assert_same,
  batch,
  full_batch,
  jitted_score,
  largest_difference,
  params_on,
  plain,
  run,
  single_device_model,
)

from gtpo_jax import algorithms
from gtpo_jax.models import Transformer
from gtpo_jax.models.config import Lora
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.training.state import abstract_state, init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update


@pytest.mark.parametrize("name", ["gtpo", pytest.param("grpo_s", marks=pytest.mark.manual)])
def test_micro_batches_equal_the_full_batch(name):
  assert plain(name)[1]["grad_norm"] > 1e-3
  assert_same(plain(name), run(name, micro_batches=4, head_chunk=7))


@pytest.mark.parametrize("micro_batches", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_micro_batches_of_parts_of_groups_equal_the_full_batch(micro_batches):
  """Of 8 groups of 4 completions, with credit within groups."""
  assert_same(plain("gtpo"), run("gtpo", micro_batches=micro_batches, head_chunk=7))


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo_mixed", "gspo", "clip_cov"])
def test_parts_of_groups_on_several_devices(name):
  rollouts, rewards = full_batch()
  settings = (
    {**EVERY_LOSS_TERM, "guide_completions": 1} if name == "dapo_mixed" else EVERY_LOSS_TERM
  )
  if name != "dapo_mixed":
    rollouts = rollouts.replace(guided=None)
  data = (rollouts, rewards)
  divided = run(name, mesh_of(2, 2, 1, 2), micro_batches=4, data=data, **settings)
  assert_same(run(name, data=data, **settings), divided)


def test_a_minibatch_without_a_signal_changes_nothing():
  """Otherwise weight decay and momentum would move the parameters."""
  rollouts, rewards = batch()
  wrong = np.zeros_like(rewards.correct)
  wrong[0] = True  # one group is all correct, the others are all wrong
  reward = wrong.astype(np.float32)
  rewards = rewards.replace(correct=wrong, reward=reward, penalty=0 * reward)
  state, metrics = run("gtpo", data=(rollouts, rewards))
  start = jax.device_get(params_on(single_device_model()))
  jax.tree.map(np.testing.assert_array_equal, state.params, start)
  assert metrics["update/empty"] == 1 and np.isnan(metrics["grad_norm"])
  assert metrics["update/skipped"] == 0 and int(state.step) == 1
  assert plain("gtpo")[1]["update/empty"] == 0


def batch_with_nan_log_prob():
  rollouts, rewards = batch()
  log_probs = rollouts.log_probs.copy()
  log_probs[3, 0, 0] = np.nan
  return rollouts.replace(log_probs=log_probs), rewards


def batch_with_overflowing_reward():
  rollouts, rewards = batch()
  reward = rewards.reward.copy()
  reward[3, 0] = 3e38  # finite, but the sum of two such rewards is not
  return rollouts, rewards.replace(reward=reward)


@pytest.mark.parametrize(
  ("name", "bad_batch", "shape", "micro_batches"),
  [
    ("gtpo", batch_with_nan_log_prob, (1, 1, 1, 1), 1),
    pytest.param(
      "gtpo",
      batch_with_nan_log_prob,
      (2, 2, 1, 2),
      2,
      marks=[pytest.mark.manual, pytest.mark.devices],
    ),
    pytest.param("dr_grpo", batch_with_overflowing_reward, (1, 1, 1, 1), 1, marks=pytest.mark.slow),
  ],
)
def test_an_update_that_is_not_finite_is_skipped(name, bad_batch, shape, micro_batches):
  mesh = mesh_of(*shape)
  model = Transformer(CONFIG, mesh)
  optimizer = make_optimizer(SGD_LIKE, 10)
  update = make_update(
    model,
    algorithms.make(name),
    optimizer,
    UpdateSettings(micro_batches=micro_batches, head_chunk=64),
  )
  good = shard_batch(batch(), mesh)
  state, _ = update(init_state(params_on(model), optimizer, model), *good)
  before = jax.device_get(state)  # the moments of its optimizer state are not zero

  state, metrics = update(state, *shard_batch(bad_batch(), mesh))
  assert not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
  assert metrics["update/skipped"] == 1
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
  assert before.step == 1
  assert after.step == 2  # the step counts, so that the next batch is another one

  state, metrics = update(state, *good)
  assert metrics["update/skipped"] == 0
  assert largest_difference(jax.device_get(state.params), after.params) > 1e-6


@pytest.mark.devices
@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("dapo_mixed", {**EVERY_LOSS_TERM, "guide_completions": 1, "guide_cap": 1.1}),
    ("dapo_forking", EVERY_LOSS_TERM),
    ("gspo", EVERY_LOSS_TERM),
    ("dr_grpo", {"loss_aggregation": "group"}),
    ("gtpo", {"objective": "kl_cov", "selected_share": 0.2, "entropy_coef": 0.1}),
    ("gmpo", {"eps_low": 0.1, "eps_high": 0.1}),
    ("gtpo", {"ratio": "gspo_token"}),
    ("grpo_s", {"objective": "cispo"}),
    ("clip_cov", {"selected_share": 0.2, "cov_low": 0.01, **EVERY_LOSS_TERM}),
    ("stare", {"selected_share": 0.3, "surprise_weight": 3.0, "entropy_gate": 9.0}),
    ("reinforce_pp", {"objective": "sapo"}),
    ("empg", {"step": "token", **EVERY_LOSS_TERM}),
    ("fipo", {"half_life": 3.0, "influence_low": 0.5, "influence_high": 9.0}),
    ("entropy_advantage", {"objective": "dppo"}),
    ("gtpo_v2", {"kappa": 3.0, "scope": "batch", "compare": "sequence"}),
    ("gtpo", {"scope": "batch", "compare": "matrix", "norm_scope": "batch"}),
    ("gtpo", {"tis_cap": 2.0, "mask_low": 0.9, "mask_high": 1.05}),
  ],
)
@pytest.mark.some(0, slow=3)
def test_every_loss_is_the_same_with_sharding_and_micro_batches(name, settings):
  rollouts, rewards = full_batch()
  if name != "dapo_mixed":
    rollouts = rollouts.replace(guided=None)
  data = (rollouts, rewards)
  one_device = run(name, data=data, **settings)
  assert one_device[1]["grad_norm"] > 1e-3
  sharded = run(name, mesh_of(2, 2, 1, 2), micro_batches=2, data=data, **settings)
  assert_same(one_device, sharded)


def test_the_entropy_coefficient_is_part_of_the_state():
  """The entropy is below the target in both updates of the step, so the coefficient rises twice."""
  algorithm = algorithms.make("gtpo", entropy_target=100.0, entropy_coef=0.01)
  model = single_device_model()
  optimizer = make_optimizer(SGD_WITHOUT_DECAY, 10, 2, algorithm.recipe.entropy_bonus.initial_coef)
  state = init_state(params_on(model), optimizer, model)
  assert float(state.entropy_coef) == np.float32(0.01)
  update = make_update(model, algorithm, optimizer, UpdateSettings(minibatches=2, head_chunk=64))
  state, metrics = update(state, *shard_batch(batch(), model.mesh))
  np.testing.assert_allclose(state.entropy_coef, 0.02, rtol=1e-6)
  np.testing.assert_allclose(metrics["entropy/coef"], 0.0125, rtol=1e-6)  # mean of 0.01 and 0.015


@pytest.mark.slow
def test_an_entropy_bonus_raises_the_entropy():
  rollouts, _ = batch()
  model = single_device_model()
  entropy = {}
  for coef in (0.0, 1.0):
    state, _ = run("gtpo", optimizer=SGD_WITHOUT_DECAY, entropy_coef=coef)
    _, values = jitted_score(model, state.params, rollouts.prompts, rollouts.tokens, 1.0, 64)
    entropy[coef] = float(values[rollouts.mask].mean())
  assert entropy[1.0] > entropy[0.0] + 1e-4


def test_an_invalid_completion_changes_nothing():
  rollouts, rewards = full_batch()
  rollouts = rollouts.replace(guided=None)
  valid = rewards.valid[..., None]
  other = rollouts.replace(
    tokens=np.where(valid, rollouts.tokens, 7),
    entropy=np.where(valid, rollouts.entropy, 3.0).astype(np.float32),
  )
  a_state, a_metrics = run("gtpo", data=(rollouts, rewards))
  b_state, b_metrics = run("gtpo", data=(other, rewards))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a_state, b_state)
  assert a_metrics["tokens/trained"] == b_metrics["tokens/trained"]


def test_groups_that_are_all_correct_or_all_wrong_change_nothing():
  mixed_groups = jax.tree.map(lambda x: x[2:], batch())
  state, metrics = plain("gtpo")
  expected, _ = run("gtpo", data=mixed_groups)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state, expected)
  assert metrics["groups/all_correct"] == metrics["groups/all_wrong"] == 1 / 8


@pytest.mark.parametrize(
  ("name", "lora", "micro_batches", "products"),
  [("gtpo", Lora(), 1, 3), ("gspo", Lora(), 1, 4), ("gtpo", Lora(rank=2), 2, 2)],
)
@pytest.mark.slow
def test_the_number_of_products_with_the_head(name, lora, micro_batches, products):
  """One product computes the logits, one the gradient of the hidden states, one that of the table.

  The logits are computed twice if the ratio is per completion, and a frozen table has no gradient.
  The largest array of the program is the logits of one chunk, which is two positions of every row.
  """
  vocab = 1000
  config = dataclasses.replace(CONFIG, vocab_size=vocab, layers=1, lora=lora)
  model = Transformer(config, single_device_mesh())
  optimizer = make_optimizer(SGD_LIKE, 10)
  chunk = 64 // micro_batches
  update = make_update(
    model,
    algorithms.make(name),
    optimizer,
    UpdateSettings(micro_batches=micro_batches, head_chunk=chunk),
  )
  program = update.lower(abstract_state(model, optimizer), *batch()).compile().as_text()
  shapes = dict(re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", program))
  has_vocab = lambda name: str(vocab) in shapes.get(name, "").split(",")
  dots = [line for line in program.splitlines() if " dot(" in line]
  head_dots = [line for line in dots if any(map(has_vocab, re.findall(r"%[\w.-]+", line)))]
  assert len(head_dots) == products
  largest = max(math.prod(map(int, dims.split(","))) for dims in shapes.values() if dims)
  assert largest == chunk * vocab
  assert largest < N * G * T * vocab / 4


@pytest.mark.slow
def test_the_update_raises_the_probability_of_correct_completions():
  rollouts, rewards = batch()
  model = single_device_model()
  inputs = rollouts.prompts, rollouts.tokens, 1.0, 64
  log_probs = lambda params: jitted_score(model, params, *inputs)[0]
  on_policy = log_probs(params_on(model))
  rollouts = rollouts.replace(log_probs=np.where(rollouts.mask, on_policy, 0))
  state, metrics = run("gtpo", data=(rollouts, rewards))
  gain = np.where(rollouts.mask, log_probs(state.params) - on_policy, 0)[2:]
  correct = rewards.correct[2:]
  assert gain[correct].sum() > 0 > gain[~correct].sum()
  assert metrics["mismatch/max_abs_logp"] < 1e-5
  assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
  assert metrics["advantage/correct"] > 0 > metrics["advantage/incorrect"]
