"""Tokens that are present but not drawn: nothing of an update depends on their values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import slow_losses
import slow_reference
from update_cases import G, N, T, batch, full_batch, params_on, run, single_device_model

from gtpo_jax import algorithms
from gtpo_jax.arrays import Rollouts
from gtpo_jax.training.packing import plan_rows

OF_TOKENS = ("log_probs", "entropy", "rescored", "reference", "drawn_log_probs")
NEEDS = {  # the optional fields that an algorithm with these settings reads
  "tis_cap": ("rescored",),
  "kl_weight": ("reference",),
}
CASES = {  # the first runs by default
  "gtpo tis": {"tis_cap": 1.05, "kl_weight": 0.1, "mask_high": 1.5},
  "gtpo": {},
  "gtpo sequence": {"compare": "sequence"},
  "gtpo matrix": {"compare": "matrix", "scope": "batch"},
  "gtpo cispo": {"objective": "cispo"},
  "gtpo kl_cov": {"objective": "kl_cov", "selected_share": 0.2},
  "gtpo_v1": {},
  "gtpo_v2": {},
  "grpo_s": {},
  "grpo_s geometric": {"mean": "geometric", "ratio": "geometric"},
  "grpo": {"entropy_coef": 0.01},
  "dapo_forking": {"dynamic_sampling": False},
  "dr_grpo": {},
  "gspo": {},
  "gmpo": {},
  "stare": {"selected_share": 0.3, "entropy_gate": 9.0},
  "clip_cov": {"selected_share": 0.2, "cov_low": -9.0, "cov_high": 9.0},
  "entropy_advantage": {},
  "empg": {},
  "fipo": {"half_life": 3.0, "influence_low": 0.5, "influence_high": 9.0},
  "reinforce_pp": {},
}


def with_holes(seed=5) -> tuple[Rollouts, object]:
  """A batch in which about a third of the present tokens were not drawn, all kinds of places."""
  rollouts, rewards = full_batch()
  rng = np.random.default_rng(seed)
  drawn = rollouts.mask & (rng.random((N, G, T)) < 0.65)
  drawn[0, 0] = False  # a completion of context alone
  drawn[1, 0] = rollouts.mask[1, 0] & (np.arange(T) % 2 == 1)
  return rollouts.replace(mask=drawn), rewards


def data_for(settings, rollouts, rewards):
  """The batch with the optional fields that the settings read."""
  needed = {field for name in settings for field in NEEDS.get(name, ())}
  unused = {name: None for name in ("rescored", "reference") if name not in needed}
  return rollouts.replace(guided=None, stale=None, **unused), rewards


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a[0], b[0])
  for name, value in a[1].items():
    np.testing.assert_equal(b[1][name], value, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(1, slow=2)
def test_values_outside_the_mask_change_nothing(case):
  """Neither log-probs nor entropies of tokens that were not drawn reach parameters or metrics."""
  name = case.split()[0]
  rollouts, rewards = data_for(CASES[case], *with_holes())
  rng = np.random.default_rng(7)
  outside = ~rollouts.mask
  changed = {
    field: np.where(outside, rng.normal(-3, 2, (N, G, T)), values).astype(np.float32)
    for field in OF_TOKENS
    if (values := getattr(rollouts, field)) is not None
  }
  expected = run(name, data=(rollouts, rewards), **CASES[case])
  found = run(name, data=(rollouts.replace(**changed), rewards), **CASES[case])
  assert_equal(found, expected)


@pytest.mark.slow
def test_tokens_after_the_last_drawn_one_change_nothing():
  """No drawn token attends to them, so their content does not matter either."""
  rollouts, rewards = data_for({}, *with_holes())
  drawn = np.where(rollouts.mask, np.arange(T), -1).max(-1, keepdims=True)
  later = rollouts.present & (np.arange(T) > drawn)
  assert later.sum() > N
  tokens = np.where(later, (rollouts.tokens + 11) % 48, rollouts.tokens)
  expected = run("gtpo", data=(rollouts, rewards))
  found = run("gtpo", data=(rollouts.replace(tokens=tokens), rewards))
  assert_equal(found, expected)


@pytest.mark.slow
def test_earlier_context_is_attended_to():
  """Its content changes what the policy predicts, and thus the loss."""
  rollouts, rewards = data_for({}, *with_holes())
  drawn = np.where(rollouts.mask, np.arange(T), -1).max(-1, keepdims=True)
  earlier = rollouts.present & ~rollouts.mask & (np.arange(T) < drawn)
  tokens = np.where(earlier, (rollouts.tokens + 11) % 48, rollouts.tokens)
  expected = run("gtpo", data=(rollouts, rewards))
  found = run("gtpo", data=(rollouts.replace(tokens=tokens), rewards))
  assert found[1]["loss"] != expected[1]["loss"]


def test_metrics_count_what_was_drawn():
  rollouts, rewards = data_for({}, *with_holes())
  _, metrics = run("gtpo", data=(rollouts, rewards))
  assert metrics["tokens/completion"] == rollouts.mask.sum()
  assert metrics["length/mean"] == pytest.approx(rollouts.mask.sum(-1).mean())
  assert metrics["entropy/mean"] == pytest.approx(rollouts.entropy[rollouts.mask].mean(), rel=1e-5)
  positions = rollouts.prompts.tokens.size + rollouts.tokens.size
  used = rollouts.prompts.lengths.sum() + rollouts.present.sum()
  assert metrics["tokens/padding"] == pytest.approx(1 - used / positions, rel=1e-5)


@pytest.mark.slow
def test_packing_keeps_context_in_its_place():
  rollouts, rewards = data_for({}, *with_holes())
  short = np.arange(T) < np.where(np.arange(G) < 2, T, 4)[:, None]
  rollouts = rollouts.replace(present=rollouts.present & short, mask=rollouts.mask & short)
  packing = plan_rows(rollouts.lengths, T)
  assert packing is not None
  packed, metrics = run("gtpo", data=(rollouts.replace(packing=packing), rewards))
  expected, expected_metrics = run("gtpo", data=(rollouts, rewards))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), packed, expected)
  assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-5)


@pytest.mark.slow
def test_loss_and_gradient_equal_a_slow_loop_over_the_drawn_tokens():
  """The loop, in float64, gets the drawn tokens alone, as if nothing had been between them."""
  rollouts, rewards = batch()
  rng = np.random.default_rng(5)
  rollouts = rollouts.replace(mask=rollouts.mask & (rng.random((N, G, T)) < 0.65))
  order = np.argsort(~rollouts.mask, -1, kind="stable")  # drawn tokens first

  def drawn(x):
    return np.take_along_axis(np.asarray(x, np.float64), order, -1)

  model = single_device_model()

  def log_probs_of(params):
    hidden = model.apply(
      {"params": params}, rollouts.prompts, rollouts.tokens, method="completion_hidden"
    )
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, hidden, method="logits"))
    return jnp.take_along_axis(log_probs, jnp.asarray(rollouts.tokens)[..., None], -1)[..., 0]

  log_probs, pull_back = jax.vjp(jax.jit(log_probs_of), params_on(model))
  settings = dataclasses.asdict(algorithms.make("gtpo").settings)
  signals = {
    "mask": np.take_along_axis(rollouts.mask, order, -1),
    "entropy": drawn(rollouts.entropy),
    "correct": rewards.correct,
    "reward": rewards.reward,
    "penalty": rewards.penalty,
  }
  mask = slow_reference.loss_mask("gtpo", signals, settings)
  inputs = {
    "mask": mask,
    "advantages": slow_reference.advantages("gtpo", signals, settings),
    "weights": slow_losses.token_weights(mask, settings),
    "log_probs_old": drawn(rollouts.log_probs),
  }
  loss = lambda x: slow_losses.loss({**inputs, "log_probs": x}, settings)[0]
  new = drawn(log_probs)
  slopes = slow_losses.numeric_gradient(loss, new, list(zip(*np.nonzero(mask), strict=True)))
  of_tokens = np.zeros((N, G, T), np.float32)
  np.put_along_axis(of_tokens, order, slopes.astype(np.float32), -1)
  (expected,) = pull_back(jnp.asarray(of_tokens))

  state, metrics = run("gtpo", data=(rollouts, rewards))
  assert metrics["loss"] == pytest.approx(loss(new), abs=1e-6)
  first_moment = optax.tree_utils.tree_get(state.opt_state, "mu")
  assert max(np.abs(x).max() for x in jax.tree.leaves(first_moment)) > 1e-4
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x / 0.1, y, atol=1e-5), first_moment, expected
  )
