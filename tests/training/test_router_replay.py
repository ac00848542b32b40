"""The trainer computes each token with the experts that the sampler recorded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TOY_EXPERTS
from update_cases import SGD_WITHOUT_DECAY

from gtpo_jax import algorithms
from gtpo_jax.arrays import Rewards, Signals
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.experts import module
from gtpo_jax.models.experts.routing import no_route, route
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.training.gradient import FrozenParams, Minibatch, balance_of, make_gradient
from gtpo_jax.training.log_probs import Reading, head_settings, score_with_routers
from gtpo_jax.training.packing import plan_rows
from gtpo_jax.training.state import init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update

CONFIG = TOY_EXPERTS
STOP, PAD, T, G = (7, 11, 13, 17, 23, 31), 3, 12, 4
PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]


def model_of(**changes):
  return Transformer(dataclasses.replace(CONFIG, **changes), single_device_mesh())


@functools.cache
def sampled(attention="xla"):
  """Parameters, an engine, and rollouts of them."""
  params = jax.tree.map(lambda x: 4 * x, init_params(model_of(), jax.random.key(0)))
  paged = {} if attention == "xla" else {"page_size": 16}
  config = EngineConfig(chunk=4, attention=attention, **paged)
  engine = Engine(ProgramSettings(model_of(), STOP, PAD, 6, T, config=config))
  rollouts = engine.sample(
    engine.layout(params), PROMPTS, jax.random.key(4), group=G, sampling_params=SamplingParams()
  )
  return params, engine, rollouts


def perturbed(params, noise=1e-2):
  """The parameters with noise on the routers' weights, whose deviation is 0.08."""

  def change(path, x):
    if "router" not in jax.tree_util.keystr(path):
      return x
    return x + noise * jax.random.normal(jax.random.key(9), x.shape)

  return jax.tree_util.tree_map_with_path(change, params)


@functools.partial(jax.jit, static_argnums=(0, 3))
def scored(model, params, rollouts, replays=True):
  reading = Reading.of(rollouts if replays else rollouts.replace(routes=None))
  return score_with_routers(model, params, reading, head_settings(model, 1.0, 64))


@pytest.mark.parametrize("attention", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_every_token_has_the_experts_that_the_trainer_chooses_too(attention):
  """In float32, sampler and trainer round so little that they agree."""
  params, _, rollouts = sampled(attention)
  recorded = lambda x: x[..., 0, 0] != no_route(x.dtype)
  np.testing.assert_array_equal(recorded(rollouts.routes), rollouts.present)
  np.testing.assert_array_equal(recorded(rollouts.prompts.routes), rollouts.prompts.mask)
  assert rollouts.routes.shape == (4, G, T, 2, 2) and rollouts.routes.dtype == np.uint8
  log_probs, _, router = scored(model_of(), params, rollouts)
  mask = np.asarray(rollouts.mask)
  assert not np.asarray(router.any_differs)[mask].any()
  np.testing.assert_allclose(log_probs[mask], rollouts.log_probs[mask], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_replayed_choices_decide_what_the_trainer_computes(monkeypatch):
  """Loss and gradient are those of routers that can choose only among the recorded experts."""
  params, _, rollouts = sampled()
  mask = np.asarray(rollouts.mask)
  other = perturbed(params)
  weights = jnp.where(mask, jax.random.normal(jax.random.key(1), mask.shape), 0)

  def scores(model):
    def loss(params):
      log_probs, _, router = scored(model, params, rollouts)
      return (weights * log_probs).sum(), (log_probs, router)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(other)

  (value, (replayed, router)), slope = scores(model_of())
  assert 0.05 < np.asarray(router.any_differs)[mask].mean() < 0.95
  own, _, compared = scored(model_of(router_replay=False), other, rollouts)
  unrecorded, _, _ = scored(model_of(), other, rollouts, False)
  np.testing.assert_array_equal(own, unrecorded)
  assert np.asarray(compared.any_differs)[mask].mean() > 0
  error = lambda x: np.abs(np.asarray(x) - rollouts.log_probs)[mask].mean()
  assert error(replayed) < error(own)

  def only_recorded(logits, mixture, recorded, shares, replay):
    chosen = jax.nn.one_hot(recorded, mixture.experts, dtype=bool).any(-2)
    limited = jnp.where(chosen | ~chosen.any(-1, keepdims=True), logits, -jnp.inf)
    return route(limited, mixture)  # the weights are normalised among the chosen

  monkeypatch.setattr(module, "route", only_recorded)
  (want_value, _), want = scores(model_of(context=CONFIG.context + 1))  # is traced anew
  np.testing.assert_allclose(value, want_value, rtol=1e-5)
  for g, w in zip(jax.tree.leaves(slope), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 + 2e-5 * np.abs(w).max())


@pytest.mark.slow
def test_packing_changes_no_choice():
  params, _, rollouts = sampled()
  short = np.arange(T) < np.asarray([1, 4, 2, 3])[:, None]  # of each group
  rollouts = rollouts.replace(mask=rollouts.mask & short, present=rollouts.present & short)
  packing = plan_rows(np.asarray(rollouts.lengths), T, 1)
  assert packing.source.shape[1] < G
  want = scored(model_of(), perturbed(params), rollouts)
  got = scored(model_of(), perturbed(params), rollouts.replace(packing=packing))
  mask = np.asarray(rollouts.mask)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(g)[mask], np.asarray(w)[mask], rtol=0, atol=2e-5)


def rewards_of(rollouts):
  correct = np.asarray(rollouts.tokens.sum(-1) % 2 == 0)
  correct[:, 0] = True
  correct[:, 1] = False
  return Rewards(correct, correct.astype(np.float32), np.zeros(correct.shape, np.float32))


def gradient(model, params, rollouts, micro_batches=1):
  algorithm = algorithms.make("gtpo")
  signals = Signals.of(rollouts, rewards_of(rollouts))
  signals = signals.replace(
    advantages=algorithm.advantages(signals), log_probs_old=rollouts.log_probs
  )
  signals = signals.replace(weights=algorithm.token_weights(signals.mask))
  settings = UpdateSettings(micro_batches=micro_batches, head_chunk=64)
  compute = jax.jit(make_gradient(model, algorithm, settings))
  key = jax.random.key(0)
  return compute(params, FrozenParams({}), Minibatch(rollouts, signals), key)


@pytest.mark.slow
def test_the_balance_loss_and_micro_batches():
  """Its gradient is that of the mean over tokens, whatever the number of micro-batches is."""
  params, _, rollouts = sampled()
  without, scores = gradient(model_of(), params, rollouts)
  assert not np.asarray(scores.router.balance).any()
  grads, scores = gradient(model_of(router_balance=0.1), params, rollouts)
  in_parts, _ = gradient(model_of(router_balance=0.1), params, rollouts, micro_batches=4)
  for g, w in zip(jax.tree.leaves(in_parts), jax.tree.leaves(grads), strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 + 3e-5 * np.abs(w).max())
  # The same by hand: the shares of the recorded choices of the inputs, and the mean probabilities.
  present = np.asarray(rollouts.present)
  first = np.broadcast_to(rollouts.prompts.routes[:, None, -1:], (4, G, 1, 2, 2))
  inputs = np.concatenate([first, rollouts.routes[:, :, :-1]], 2)[present]  # [tokens, layers, k]
  shares = np.stack([np.bincount(inputs[:, i].ravel(), minlength=5) for i in range(2)])
  shares = jnp.asarray(shares / shares.sum(1, keepdims=True), jnp.float32)

  def balance(params):
    reading = Reading.of(rollouts)._replace(shares=shares)
    _, _, router = score_with_routers(
      model_of(), params, reading, head_settings(model_of(), 1.0, 64)
    )
    return jnp.where(present, router.balance, 0).sum() / present.sum()

  value, slope = jax.jit(jax.value_and_grad(balance))(params)
  assert 1 < value < 5
  got = jax.tree.map(lambda x, y: x - y, grads, without)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(slope), strict=True):
    np.testing.assert_allclose(g, 0.1 * w, rtol=0, atol=2e-6 + 1e-4 * 0.1 * np.abs(w).max())
  assert np.abs(np.asarray(slope["layers"]["place_0"]["experts"]["router"]["kernel"])).max() > 1e-3


def test_the_balance_counts_the_prompt_at_the_start_of_every_conversation():
  _, _, rollouts = sampled()
  begins = np.tile(np.asarray([0, 3], np.int32), (4, G, 1))
  packing = plan_rows(np.asarray(rollouts.lengths), T, begins=begins)
  present = np.asarray(rollouts.present)
  assert present[..., 3].any()
  inputs = np.roll(rollouts.routes, 1, axis=2)
  inputs[:, :, [0, 3]] = rollouts.prompts.routes[:, None, -1:]
  counts = [np.bincount(inputs[present][:, i].ravel(), minlength=5) for i in range(2)]
  got = balance_of(model_of(router_balance=0.1), rollouts.replace(packing=packing)).shares
  np.testing.assert_allclose(got, counts / np.sum(counts, 1, keepdims=True), rtol=1e-6)


@pytest.mark.slow
def test_an_update_measures_routers():
  params, _, rollouts = sampled()
  optimizer = make_optimizer(SGD_WITHOUT_DECAY, 10)
  model = model_of(router_balance=0.1)
  update = make_update(model, algorithms.make("gtpo"), optimizer, UpdateSettings(head_chunk=64))
  other = perturbed(params)
  state = init_state(jax.tree.map(jnp.copy, other), optimizer, model)
  _, metrics = update(state, rollouts, rewards_of(rollouts))
  _, _, router = scored(model, other, rollouts)
  mask = np.asarray(rollouts.mask)
  differs = np.asarray(router.any_differs)[mask].mean()
  np.testing.assert_allclose(metrics["mismatch/router"], differs, rtol=1e-5)
  assert metrics["mismatch/router_layers"] <= metrics["mismatch/router"]
  entropy = np.asarray(router.entropy)[mask].mean()
  np.testing.assert_allclose(metrics["router/entropy"], entropy, rtol=1e-5)
  counts = [np.bincount(rollouts.routes[mask][:, i].ravel()) for i in range(2)]
  largest = max(count.max() / count.sum() for count in counts)
  np.testing.assert_allclose(metrics["router/largest_share"], largest, rtol=1e-6)
  assert 1 < metrics["router/balance"] < 5


@pytest.mark.slow
def test_completions_that_go_on_keep_their_choices_and_context_gets_those_of_its_reading():
  params, engine, want = sampled()
  keys = engine.completion_keys(jax.random.key(4), 4, G)
  rows = engine.completions(PROMPTS, keys)
  layout = engine.layout(params)
  steps = engine.generate(layout, rows, sampling_params=SamplingParams(), stream_interval=3)
  next(steps), next(steps)
  completions = [completion for row in rows for completion in row]
  assert not all(completion.ended for completion in completions)
  before = engine.rollouts(rows).routes
  turned = next(x for x in completions if x.finished and x.length < T - 3)
  turned.read([9, 5])
  for _ in engine.generate(layout, rows, sampling_params=SamplingParams()):
    pass
  was = before[..., :1, :1] != 255
  rollouts = engine.rollouts(rows)
  np.testing.assert_array_equal(np.where(was, rollouts.routes, 0), np.where(was, before, 0))
  recorded = rollouts.routes[..., 0, 0] != 255
  np.testing.assert_array_equal(recorded, rollouts.present)
  others = np.ones((4, G), bool)
  others[turned.group, turned.index] = False
  np.testing.assert_array_equal(rollouts.tokens[others], want.tokens[others])
  np.testing.assert_array_equal(rollouts.routes[others], want.routes[others])
  _, _, router = scored(model_of(), params, rollouts)
  assert not np.asarray(router.any_differs)[np.asarray(rollouts.present)].any()
