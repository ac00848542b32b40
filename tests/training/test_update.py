"""The compiled update: the same result however the batch is cut and wherever it lies."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.models.presets import Lora
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh, shard_batch, single_device_mesh
from gtpo_jax.training.head import score
from gtpo_jax.training.micro_batches import check_divides, check_positions
from gtpo_jax.training.state import (
  OptimizerConfig,
  abstract_state,
  init_state,
  learning_rate,
  make_optimizer,
)
from gtpo_jax.training.update import make_update

CONFIG = ModelConfig(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
N = 8
G = 4
T = 9
SGD_LIKE = OptimizerConfig(
  learning_rate=1e-2, eps=1.0, weight_decay=0.1, clip_norm=1e9
)  # a large eps keeps Adam near linear


@functools.cache
def batch(seed=0):
  """Rollouts of a policy near the learner's, with lengths, verdicts and penalties of every kind."""
  rng = np.random.default_rng(seed)
  model = Qwen2(CONFIG, single_device_mesh())
  prompts = Prompts(
    jnp.asarray(rng.integers(0, 48, (N, 5)), jnp.int32),
    jnp.asarray(rng.integers(1, 6, N), jnp.int32),
  )
  tokens = jnp.asarray(rng.integers(0, 48, (N, G, T)), jnp.int32)
  log_probs, entropy = score(model, params_on(model), prompts, tokens, 1.0, 64)
  mask = np.arange(T) < rng.integers(1, T + 1, (N, G, 1))
  noise = jnp.asarray(
    rng.normal(0, 0.2, (N, G, T)), jnp.float32
  )  # some ratios leave the clip range
  correct = rng.random((N, G)) < 0.5
  correct[0] = True  # two groups without contrast
  correct[1] = False
  correct[2:, 0] = True
  correct[2:, 1] = False
  rollouts = Rollouts(
    prompts,
    tokens,
    jnp.asarray(mask),
    jnp.where(mask, log_probs + noise, 0),
    jnp.where(mask, entropy, 0),
    jnp.asarray(mask.sum(-1) < T),
  )
  penalty = np.where(mask.sum(-1) > 6, -0.5, 0.0)
  return jax.device_get(
    (rollouts, Rewards(correct, correct.astype(np.float32), penalty.astype(np.float32)))
  )


@functools.cache
def full_batch():
  """The same with everything that only some runs know: a guide's completions, a stale group, other scorings, one not counted."""
  rollouts, verdicts = batch()
  rng = np.random.default_rng(1)
  guided = np.zeros((N, G), bool)
  stale = np.zeros((N, G), bool)
  valid = np.ones((N, G), bool)
  guided[:, 3] = True
  stale[4] = True
  valid[5, 2] = False
  verdicts = verdicts.replace(correct=verdicts.correct.copy(), valid=valid)
  verdicts.correct[1, 3] = True  # two groups saved by the guide
  verdicts.correct[6, :3] = False
  verdicts.correct[6, 3] = True
  near = lambda x: (x + np.where(rollouts.mask, rng.normal(0, 0.1, (N, G, T)), 0)).astype(
    np.float32
  )
  return rollouts.replace(
    guided=guided,
    stale=stale,
    rescored=near(rollouts.log_probs),
    reference=near(rollouts.log_probs),
  ), verdicts


FULL = {"kl_weight": 0.1, "tis_cap": 1.05, "dual_clip": 1.5}


@functools.cache
def random_params():
  return jax.device_get(init_params(Qwen2(CONFIG, single_device_mesh()), jax.random.key(0)))


def params_on(model):
  return jax.tree.map(
    lambda x, like: jax.device_put(x * 4, like.sharding), random_params(), abstract_params(model)
  )


def run(
  name,
  mesh=None,
  micro_batches=1,
  optimizer=SGD_LIKE,
  head_chunk=64,
  data=None,
  minibatches=1,
  epochs=1,
  **settings,
):
  model = Qwen2(CONFIG, mesh or single_device_mesh())
  optimizer = make_optimizer(optimizer, 10)
  update = make_update(
    model,
    algorithms.make(name, **settings),
    optimizer,
    minibatches=minibatches,
    epochs=epochs,
    micro_batches=micro_batches,
    head_chunk=head_chunk,
  )
  state, metrics = update(
    init_state(params_on(model), optimizer, model), *shard_batch(data or batch(), model.mesh)
  )
  return jax.device_get(state), {key: float(value) for key, value in metrics.items()}


def assert_same(a, b, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a[0], b[0])
  assert a[1].keys() == b[1].keys()
  for key in a[1]:
    assert a[1][key] == pytest.approx(b[1][key], rel=atol, abs=atol), key


@functools.cache
def plain(name):
  """The full batch on one device, at the published settings."""
  return run(name)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_micro_batches_equal_the_full_batch(name):
  assert plain(name)[1]["grad_norm"] > 1e-3
  assert_same(plain(name), run(name, micro_batches=4, head_chunk=7))


@pytest.mark.parametrize(
  ("name", "shape", "micro_batches"),
  [
    ("gtpo", (8, 1, 1), 1),
    ("gtpo", (2, 2, 2), 2),
    ("grpo_s", (2, 2, 2), 1),
    ("dapo", (1, 8, 1), 1),
    ("grpo", (4, 1, 2), 2),
  ],
)
def test_one_device_equals_eight(name, shape, micro_batches):
  assert_same(plain(name), run(name, make_mesh(*shape), micro_batches))


@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("dapo_mixed", {**FULL, "guide_completions": 1, "guide_cap": 1.1}),
    ("dapo_forking", FULL),
    ("gspo", FULL),
    ("dr_grpo", {"average": "group"}),
    ("gtpo_v2", {"kappa": 3.0, "scope": "batch", "compare": "sequence"}),
  ],
)
def test_everything_is_right_under_sharding_and_micro_batches(name, settings):
  data = full_batch()
  if name != "dapo_mixed":
    data = (data[0].replace(guided=None), data[1])
  whole = run(name, data=data, **settings)
  assert whole[1]["grad_norm"] > 1e-3
  assert_same(whole, run(name, make_mesh(2, 2, 2), micro_batches=2, data=data, **settings))


def test_what_only_some_runs_know_is_measured():
  rollouts, verdicts = full_batch()
  _, metrics = run("dapo_mixed", data=full_batch(), guide_completions=1, **FULL)
  mask = np.asarray(rollouts.mask)
  own = ~rollouts.guided
  assert metrics["guide/accuracy"] == pytest.approx(verdicts.correct[:, 3].mean())
  assert metrics["guide/rescued"] == pytest.approx(
    ((~verdicts.correct[:, :3]).all(1) & verdicts.correct[:, 3]).mean()
  )
  assert metrics["groups/stale"] == 1 / 8 and metrics["completions/not_counted"] == pytest.approx(
    1 / 32
  )
  assert metrics["reward/accuracy"] == pytest.approx(verdicts.correct[:, :3].mean())
  assert metrics["length/mean"] == pytest.approx(mask.sum(-1)[own].mean())
  assert metrics["entropy/mean"] == pytest.approx(
    np.asarray(rollouts.entropy)[mask & own[..., None]].mean(), abs=1e-5
  )
  fresh = mask & own[..., None] & ~rollouts.stale[..., None]
  assert metrics["mismatch/max_abs_logp"] == pytest.approx(
    np.abs(rollouts.rescored - rollouts.log_probs)[fresh].max(), abs=1e-5
  )
  assert metrics["kl/reference"] > 0 and 0 < metrics["mismatch/weight"] <= 1.05


def test_a_completion_that_is_not_counted_changes_nothing():
  rollouts, verdicts = full_batch()
  rollouts = rollouts.replace(guided=None)
  other = rollouts.replace(
    tokens=np.where(verdicts.valid[..., None], rollouts.tokens, 7),
    entropy=np.where(verdicts.valid[..., None], rollouts.entropy, 3.0).astype(np.float32),
  )
  a = run("gtpo", data=(rollouts, verdicts))
  b = run("gtpo", data=(other, verdicts))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a[0], b[0])
  assert a[1]["tokens/trained"] == b[1]["tokens/trained"]


def test_batch_scopes_are_right_under_sharding_and_micro_batches():
  settings = {"scope": "batch", "compare": "matrix", "norm_scope": "batch"}
  assert_same(run("gtpo", **settings), run("gtpo", make_mesh(2, 2, 2), micro_batches=2, **settings))


def test_groups_without_contrast_change_nothing():
  rollouts, verdicts = batch()
  kept = jax.tree.map(lambda x: x[2:], (rollouts, verdicts))
  whole = plain("gtpo")
  cut = run("gtpo", data=kept)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole[0], cut[0])
  assert whole[1]["groups/all_correct"] == whole[1]["groups/all_wrong"] == 1 / 8


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "dapo", "grpo"])
def test_no_gradient_through_entropy_advantages_or_rewards(name):
  """The loss as a function of everything it is made from: only the learner's log-probs move it."""
  rollouts, verdicts = batch()
  algorithm = algorithms.make(name)
  log_probs = rollouts.log_probs + 0.05

  def loss(log_probs, log_probs_old, entropy, reward, penalty):
    signals = {
      "entropy": entropy,
      "mask": rollouts.mask,
      "correct": verdicts.correct,
      "reward": reward,
      "penalty": penalty,
    }
    advantages = algorithm.advantages(**signals)
    mask = algorithm.loss_mask(**signals)
    return algorithm.loss(logp=log_probs, logp_old=log_probs_old, advantages=advantages, mask=mask)[
      0
    ]

  grads = jax.grad(loss, argnums=(0, 1, 2, 3, 4))(
    log_probs, rollouts.log_probs, rollouts.entropy, verdicts.reward, verdicts.penalty
  )
  assert np.abs(grads[0]).max() > 0
  for grad in grads[1:]:
    assert (np.asarray(grad) == 0).all()


def test_no_gradient_through_the_models_own_entropy():
  model = Qwen2(CONFIG, single_device_mesh())
  rollouts, _ = batch()
  through = lambda which: jax.grad(
    lambda p: score(model, p, rollouts.prompts, rollouts.tokens, 1.0, 64)[which].sum()
  )(params_on(model))
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(through(0))) > 0
  assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(through(1)))


def test_the_gradient_is_that_of_the_plain_loss():
  """Against the loss written with full logits and differentiated as a whole."""
  model = Qwen2(CONFIG, single_device_mesh())
  rollouts, verdicts = batch()
  algorithm = algorithms.make("gtpo")
  signals = {
    "entropy": rollouts.entropy,
    "mask": rollouts.mask,
    "correct": verdicts.correct,
    "reward": verdicts.reward,
    "penalty": verdicts.penalty,
  }
  advantages = algorithm.advantages(**signals)
  mask = algorithm.loss_mask(**signals)

  def loss(params):
    hidden = model.apply(
      {"params": params}, rollouts.prompts, rollouts.tokens, method="completion_hidden"
    )
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, hidden, method="logits"))
    log_probs = jnp.take_along_axis(log_probs, jnp.asarray(rollouts.tokens)[..., None], -1)[..., 0]
    ratio = jnp.exp(log_probs - rollouts.log_probs)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    return -jnp.where(mask, objective, 0).sum() / mask.sum()

  params = params_on(model)
  grads = jax.grad(loss)(params)
  norm = float(jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(grads))))
  _, metrics = plain("gtpo")
  assert metrics["loss"] == pytest.approx(float(loss(params)), abs=1e-6)
  assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
  assert metrics["clip/low"] > 0 and metrics["clip/high"] > 0


@pytest.mark.parametrize(
  ("name", "lora", "micro_batches", "products"),
  [("gtpo", Lora(), 1, 3), ("gspo", Lora(), 1, 4), ("gtpo", Lora(rank=2), 2, 2)],
)
def test_the_products_with_the_head(name, lora, micro_batches, products):
  """Logits, and the gradients in states and table; logits twice where the ratio is a completion's; none in a table that is frozen.

  The largest array of the program is the logits of one chunk: two positions of every row.
  """
  words = 1000
  model = Qwen2(
    dataclasses.replace(CONFIG, vocab_size=words, layers=1, lora=lora), single_device_mesh()
  )
  optimizer = make_optimizer(SGD_LIKE, 10)
  update = make_update(
    model,
    algorithms.make(name),
    optimizer,
    micro_batches=micro_batches,
    head_chunk=64 // micro_batches,
  )
  program = update.lower(abstract_state(model, optimizer), *batch()).compile().as_text()
  shape = dict(re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", program))
  has_words = lambda name: str(words) in shape.get(name, "").split(",")
  dots = [
    line
    for line in program.splitlines()
    if " dot(" in line and any(map(has_words, re.findall(r"%[\w.-]+", line)))
  ]
  assert len(dots) == products
  assert (
    max(math.prod(map(int, x.split(","))) for x in shape.values() if x)
    == 64 // micro_batches * words
    < N * G * T * words / 4
  )


def test_the_update_raises_the_probability_of_what_was_right():
  rollouts, verdicts = batch()
  mask = np.asarray(rollouts.mask)
  model = Qwen2(CONFIG, single_device_mesh())
  on_policy = score(model, params_on(model), rollouts.prompts, rollouts.tokens, 1.0, 64)[0]
  rollouts = rollouts.replace(log_probs=np.where(mask, on_policy, 0))
  state, metrics = run("gtpo", data=(rollouts, verdicts))
  after = score(model, state.params, rollouts.prompts, rollouts.tokens, 1.0, 64)[0]
  gain = np.where(mask, after - on_policy, 0)[2:]
  right = np.asarray(verdicts.correct)[2:]
  assert gain[right].sum() > 0 > gain[~right].sum()
  assert metrics["mismatch/max_abs_logp"] < 1e-5 and metrics["ratio/mean"] == pytest.approx(
    1, abs=1e-5
  )
  assert metrics["advantage/correct"] > 0 > metrics["advantage/incorrect"]


def test_metrics_of_the_batch():
  rollouts, verdicts = batch()
  _, metrics = plain("gtpo")
  mask = np.asarray(rollouts.mask)
  right = np.asarray(verdicts.correct)
  lengths = mask.sum(-1)
  assert (
    metrics["length/mean"] == pytest.approx(lengths.mean())
    and metrics["length/max"] == lengths.max()
  )
  assert metrics["length/cut_off"] == pytest.approx(1 - np.asarray(rollouts.finished).mean())
  assert metrics["reward/accuracy"] == pytest.approx(right.mean())
  assert metrics["reward/mean"] == pytest.approx(
    (verdicts.reward + verdicts.penalty).mean(), abs=1e-6
  )
  assert metrics["entropy/correct"] == pytest.approx(
    np.asarray(rollouts.entropy)[mask & right[..., None]].mean(), abs=1e-5
  )
  assert metrics["tokens/completion"] == mask.sum() and metrics["tokens/trained"] == mask[2:].sum()
  assert metrics["credit/conservation_residual"] < 1e-5


def test_a_batch_without_any_contrast_leaves_the_policy_to_weight_decay_alone():
  rollouts, verdicts = batch()
  verdicts = verdicts.replace(correct=np.zeros((N, G), bool))
  optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)
  state, metrics = run("gtpo", data=(rollouts, verdicts), optimizer=optimizer)
  assert metrics["loss"] == metrics["grad_norm"] == 0
  before = jax.device_get(params_on(Qwen2(CONFIG, single_device_mesh())))
  jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_the_state_is_laid_out_like_the_parameters():
  model = Qwen2(CONFIG, make_mesh(2, 2, 2))
  state = init_state(params_on(model), make_optimizer(SGD_LIKE, 5), model)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 32, 64)]
  assert len(moments) == 4 and all(
    x.sharding.spec == jax.sharding.PartitionSpec(None, ("fsdp", "context"), "tensor")
    for x in moments
  )
  like = abstract_state(model, make_optimizer(SGD_LIKE, 5))
  jax.tree.map(
    lambda x, y: (
      (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding) or pytest.fail(f"{x} {y}")
    ),
    state,
    like,
  )


def test_decay_spares_norms_and_biases():
  model = Qwen2(CONFIG, single_device_mesh())
  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 5)
  params = params_on(model)
  zeros = jax.tree.map(jnp.zeros_like, params)
  changes, _ = optimizer.update(zeros, optimizer.init(params), params)
  np.testing.assert_allclose(
    changes["layers"]["q"]["kernel"], -0.05 * params["layers"]["q"]["kernel"], rtol=1e-5
  )
  assert (
    not np.asarray(changes["norm"]["scale"]).any()
    and not np.asarray(changes["layers"]["q"]["bias"]).any()
  )


def test_schedules():
  rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule="linear"), 12)
  np.testing.assert_allclose(
    [rate(i) for i in (0, 2, 4, 8, 12)], [0.0, 1.0, 2.0, 1.0, 0.0], atol=1e-6
  )
  rate = learning_rate(OptimizerConfig(learning_rate=2.0, schedule="cosine"), 8)
  np.testing.assert_allclose([rate(i) for i in (0, 4, 8)], [2.0, 1.0, 0.0], atol=1e-6)
  rate = learning_rate(OptimizerConfig(learning_rate=2.0), 8)
  assert [float(rate(i)) for i in (0, 8)] == [2.0, 2.0]


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("learning_rate", 0.0, "above 0 and finite, got 0.0"),
    ("b2", 1.0, r"in \[0, 1\), got 1.0"),
    ("weight_decay", -1.0, "at least 0 and finite, got -1.0"),
    ("schedule", "step", "one of constant, cosine, linear; got 'step'"),
    ("clip_norm", -1.0, "above 0 and finite, got -1.0"),
    ("momentum_dtype", "float16", "float32, bfloat16, .*got 'float16'"),
  ],
)
def test_bad_optimizers_are_refused(field, value, message):
  with pytest.raises(UserError, match=message):
    OptimizerConfig(**{field: value})


def test_batches_that_do_not_divide_are_refused():
  model = Qwen2(CONFIG, make_mesh(2, 2, 2))
  check_divides("batch.prompts", 8, 2, model)
  with pytest.raises(
    UserError, match=r"batch.prompts = 12 does not divide into 2 .* 4 batch shard.*multiple of 8"
  ):
    check_divides("batch.prompts", 12, 2, model)
  check_positions(41, model)
  model = Qwen2(CONFIG, make_mesh(1, 1, 2, context=4))
  check_positions(40, model)
  with pytest.raises(
    UserError,
    match=r"sampling.max_tokens = 42 does not divide over mesh.context x mesh.tensor = 8; make it",
  ):
    check_positions(42, model)


# --- minibatches, epochs, moments ---


def slow_updates(minibatches, epochs, rate=1e-2, **settings):
  """Parameters and loss after gradient updates by hand: full logits, plain AdamW in float64, advantages made once."""
  model = Qwen2(CONFIG, single_device_mesh())
  algorithm = algorithms.make("gtpo", **settings)
  rollouts, verdicts = batch()
  signals = {
    "entropy": rollouts.entropy,
    "mask": rollouts.mask,
    "correct": verdicts.correct,
    "reward": verdicts.reward,
    "penalty": verdicts.penalty,
  }
  whole = rollouts, algorithm.advantages(**signals), algorithm.loss_mask(**signals)

  def loss(params, part):
    rollouts, advantages, mask = part
    hidden = model.apply(
      {"params": params}, rollouts.prompts, rollouts.tokens, method="completion_hidden"
    )
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, hidden, method="logits"))
    log_probs = jnp.take_along_axis(log_probs, rollouts.tokens[..., None], -1)[..., 0]
    ratio = jnp.exp(log_probs - rollouts.log_probs)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    return -jnp.where(mask, objective, 0).sum() / mask.sum()

  gradient = jax.jit(jax.value_and_grad(loss))
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params_on(model))
  first, second = (jax.tree.map(np.zeros_like, params) for _ in range(2))
  losses = []
  norms = []
  count = 0
  for _ in range(epochs):
    for part in range(minibatches):
      value, grads = gradient(
        jax.tree.map(np.float32, params), jax.tree.map(lambda x, i=part: x[i::minibatches], whole)
      )
      grads = jax.tree.map(lambda x: np.asarray(x, np.float64), grads)
      count = count + 1
      losses.append(float(value))
      norms.append(np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(grads))))
      first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
      second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, grads)
      moved = lambda p, m, v, c=count: (
        p - rate * (m / (1 - 0.9**c)) / (np.sqrt(v / (1 - 0.999**c)) + 1.0)
      )
      params = jax.tree.map(moved, params, first, second)
  return params, losses, norms


PLAIN = OptimizerConfig(learning_rate=1e-2, eps=1.0, weight_decay=0.0, clip_norm=1e9)


@pytest.mark.parametrize(("minibatches", "epochs"), [(4, 1), (2, 3), (1, 2)])
def test_minibatches_and_epochs_against_a_slow_loop(minibatches, epochs):
  params, losses, norms = slow_updates(minibatches, epochs)
  state, metrics = run("gtpo", minibatches=minibatches, epochs=epochs, optimizer=PLAIN)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), state.params, params)
  assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5) and metrics[
    "grad_norm"
  ] == pytest.approx(np.mean(norms), rel=1e-4)
  assert state.step == 1 and {int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0} == {
    minibatches * epochs
  }
  start = params_on(Qwen2(CONFIG, single_device_mesh()))
  assert (
    max(
      np.abs(x - y).max()
      for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(jax.device_get(start)), strict=True)
    )
    > 1e-3
  )


def test_minibatches_under_sharding_and_micro_batches():
  data = full_batch()
  settings = {**FULL, "guide_completions": 1, "guide_cap": 1.1}
  whole = run("dapo_mixed", data=data, minibatches=2, epochs=2, **settings)
  assert_same(
    whole,
    run(
      "dapo_mixed",
      make_mesh(2, 1, 2, jax.devices()[:4]),
      micro_batches=2,
      data=data,
      minibatches=2,
      epochs=2,
      **settings,
    ),
    atol=2e-5,
  )


def test_the_mismatch_is_of_tokens_that_nothing_was_learned_from():
  """The first minibatch is rows 0, 4: its distance to the sampler before any update, however many follow."""
  _, metrics = run("gtpo", minibatches=4, epochs=2)
  rollouts, _ = batch()
  model = Qwen2(CONFIG, single_device_mesh())
  learner = score(model, params_on(model), rollouts.prompts, rollouts.tokens, 1.0, 64)[0]
  gap = np.where(rollouts.mask, learner - rollouts.log_probs, 0)[::4]
  assert metrics["mismatch/max_abs_logp"] == pytest.approx(np.abs(gap).max(), abs=1e-5)


def test_the_schedule_counts_steps_not_gradient_updates():
  """Warm-up over two steps: the first learns at rate 0 in all its updates, the second at half the peak in all of them."""
  model = Qwen2(CONFIG, single_device_mesh())
  config = OptimizerConfig(learning_rate=0.5, warmup_steps=2, weight_decay=0.0, b1=0.0, b2=0.0)
  optimizer = make_optimizer(config, 10, updates=3)
  params = params_on(model)
  grads = jax.tree.map(jnp.ones_like, params)
  state = optimizer.init(params)
  rates = []
  for _ in range(9):
    changes, state = optimizer.update(grads, state, params)
    rates.append(
      round(-float(changes["norm"]["scale"][0]), 5)
    )  # with no memory Adam's change is the rate
  assert rates == [0.0] * 3 + [0.25] * 3 + [0.5] * 3


def test_a_bfloat16_momentum():
  """Half the bytes for the first moment alone; after one update the parameters are the same to bfloat16's rounding of it."""
  model = Qwen2(CONFIG, make_mesh(2, 2, 2))
  like = abstract_state(
    model, make_optimizer(OptimizerConfig(momentum_dtype="bfloat16"), 5)
  ).opt_state
  adam = next(
    x for x in jax.tree.leaves(like, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")
  )
  assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {jnp.dtype("bfloat16")}
  assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype("float32")}
  exact, rounded = (
    run("gtpo", minibatches=4, optimizer=dataclasses.replace(PLAIN, momentum_dtype=kind))[0]
    for kind in ("", "bfloat16")
  )
  moved = max(
    np.abs(x - y).max()
    for x, y in zip(
      jax.tree.leaves(exact.params), jax.tree.leaves(plain("gtpo")[0].params), strict=True
    )
  )
  apart = max(
    np.abs(x - y).max()
    for x, y in zip(jax.tree.leaves(exact.params), jax.tree.leaves(rounded.params), strict=True)
  )
  assert 0 < apart < moved / 50


def test_why_the_second_moment_is_not_bfloat16():
  """At b2 = 0.999 a second moment in bfloat16 never decays: each step is under half its spacing."""
  nu = jnp.bfloat16(1.5)
  for _ in range(1000):
    nu = (0.999 * nu.astype(jnp.float32)).astype(jnp.bfloat16)
  assert float(nu) == 1.5 and 1.5 * 0.999**1000 < 0.6


def test_offloaded_moments_change_nothing():
  kind = lambda state: {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
  model = Qwen2(CONFIG, make_mesh(1, 2, 1, jax.devices()[:2]))
  states = {}
  for offload in (False, True):
    optimizer = make_optimizer(dataclasses.replace(SGD_LIKE, offload=offload), 10)
    update = make_update(model, algorithms.make("gtpo"), optimizer, minibatches=2, head_chunk=64)
    state = init_state(params_on(model), optimizer, model)
    began = kind(state)
    state, _ = update(state, *shard_batch(batch(), model.mesh))
    assert began == kind(state) == kind(abstract_state(model, optimizer))
    assert ("pinned_host" in began) == offload and len(began) == 1
    state, _ = update(state, *shard_batch(batch(), model.mesh))
    assert kind(state) == began and "pinned_host" not in {
      x.sharding.memory_kind for x in jax.tree.leaves(state.params)
    }
    states[offload] = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, states[False], states[True])


def poisoned(kind):
  """The batch with one number that is not one, and the algorithm that meets it."""
  rollouts, verdicts = batch()
  if kind == "log_prob":
    log_probs = rollouts.log_probs.copy()
    log_probs[3, 0, 0] = np.nan
    return "gtpo", (rollouts.replace(log_probs=log_probs), verdicts)
  reward = verdicts.reward.copy()
  reward[3, 0] = 3e38  # a finite number, of which no two make a finite sum
  return "dr_grpo", (rollouts, verdicts.replace(reward=reward))


@pytest.mark.parametrize(
  ("kind", "shape", "micro_batches"),
  [("log_prob", (1, 1, 1), 1), ("log_prob", (2, 2, 2), 2), ("reward", (1, 1, 1), 1)],
)
def test_an_update_that_is_not_finite_is_skipped(kind, shape, micro_batches):
  name, data = poisoned(kind)
  mesh = make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
  model = Qwen2(CONFIG, mesh)
  optimizer = make_optimizer(SGD_LIKE, 10)
  update = make_update(
    model, algorithms.make(name), optimizer, micro_batches=micro_batches, head_chunk=64
  )
  moved, _ = update(init_state(params_on(model), optimizer, model), *shard_batch(batch(), mesh))
  before = jax.device_get(moved)  # moments that are not zero
  after, metrics = update(moved, *shard_batch(data, mesh))
  assert (
    not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
    and metrics["update/skipped"] == 1
  )
  after = jax.device_get(after)
  jax.tree.map(
    np.testing.assert_array_equal,
    (after.params, after.opt_state),
    (before.params, before.opt_state),
  )
  assert (before.step, after.step) == (1, 2)  # the data goes on
  placed = jax.device_put(
    after, jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  )
  again, metrics = update(placed, *shard_batch(batch(), mesh))
  assert (
    metrics["update/skipped"] == 0
    and np.abs(jax.device_get(again.params["embedding"]) - after.params["embedding"]).max() > 1e-6
  )
