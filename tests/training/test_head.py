"""The chunked output head against the full softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of

from gtpo_jax import algorithms
from gtpo_jax.arrays import Signals
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.training.head import (
  HeadSettings,
  log_probs_and_entropy,
  loss_and_log_probs,
  score_norms,
)
from gtpo_jax.training.head_logits import _in_one_pass, _in_two_passes

B = 3
T = 10
D = 8
V = 50


def inputs(seed=0, b=B, t=T, d=D, v=V, dtype=jnp.float32):
  """Random hidden states, table and tokens."""
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((b, t, d))
  table = rng.standard_normal((v, d))
  tokens = rng.integers(0, v, (b, t))
  return jnp.asarray(hidden, dtype), jnp.asarray(table, dtype), jnp.asarray(tokens, jnp.int32)


def naive(hidden, table, tokens, temperature):
  """Log-probs and entropy from all logits at once, in float32."""
  hidden = hidden.astype(jnp.float32)
  table = table.astype(jnp.float32)
  logits = jnp.einsum("btd,vd->btv", hidden, table, precision="highest") / temperature
  log_p = jax.nn.log_softmax(logits)
  log_probs = jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
  return log_probs, -(jnp.exp(log_p) * log_p).sum(-1)


def chunked(hidden, table, tokens, temperature, chunk):
  settings = HeadSettings(single_device_mesh(), temperature, chunk, "highest")
  return log_probs_and_entropy(hidden, table, tokens, settings)


def gradient_and_values(function, hidden, table, tokens, *static):
  """The outputs, and the gradient of a sum of log-probs with uneven weights.

  The weights expose any mistake in the order of tokens.
  """
  weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)

  def value(hidden, table):
    log_probs, entropy = function(hidden, table, tokens, *static)
    return (weights * log_probs).sum(), (log_probs, entropy)

  return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(hidden, table)


@functools.cache
def full_softmax(temperature):
  return gradient_and_values(naive, *inputs(), temperature)


def relative_error(got, want):
  got = np.asarray(got, np.float64)
  want = np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


# Chunks of more than all positions, all of them, a divisor of t, not a divisor of t (twice), one
# position, and fewer tokens than there are rows.
@pytest.mark.parametrize(
  "chunk",
  [
    1000,
    pytest.param(B * T, marks=pytest.mark.slow),
    pytest.param(B * 5, marks=pytest.mark.slow),
    B * 4,
    B * 3 + 1,
    pytest.param(B, marks=pytest.mark.slow),
    1,
  ],
)
def test_value_and_gradient_equal_the_full_softmax(chunk):
  for temperature in (1.0, 0.6) if chunk == B * 4 else (0.6,):
    grads, values = gradient_and_values(chunked, *inputs(), temperature, chunk)
    expected_grads, expected = full_softmax(temperature)
    for a, b in zip(values, expected, strict=True):
      assert a.shape == (B, T)
      assert a.dtype == jnp.float32
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize(
  ("shape", "t"),
  [
    ((2, 2, 1, 2), 10),
    pytest.param((1, 1, 1, 8), 10, marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 4), 13, marks=pytest.mark.slow),
    pytest.param((1, 8, 1, 1), 5, marks=pytest.mark.slow),
    ((1, 2, 2, 2), 13),
  ],
)
def test_on_a_mesh_it_equals_the_full_softmax(shape, t):
  """Vocabulary and positions are split over context and tensor, evenly or not."""
  mesh = mesh_of(*shape)
  arrays = inputs(5, 8, t, 16, 64)
  settings = HeadSettings(mesh, 0.6, 24, "highest")
  sharded = lambda *arrays: log_probs_and_entropy(*arrays, settings)
  grads, values = gradient_and_values(sharded, *arrays)
  expected_grads, expected = gradient_and_values(naive, *arrays, 0.6)
  for got, want in zip((*values, *grads), (*expected, *expected_grads), strict=True):
    assert got.shape == want.shape
    assert relative_error(got, want) < 1e-5


def test_against_float64():
  hidden, table, tokens = inputs(1)
  logits = np.einsum("btd,vd->btv", *(np.asarray(x, np.float64) for x in (hidden, table))) / 1.7
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0]
  log_probs, entropy = chunked(hidden, table, tokens, 1.7, B * 4)
  np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("sums", [_in_one_pass, _in_two_passes])
def test_sums_over_logits_against_float64(sums):
  """Among the rows: equal logits, one that is never sampled, and one far above all others."""
  logits = np.random.default_rng(0).normal(0, 8, (2, 3, 1000)).astype(np.float32)
  logits[0, 0] = 3.0
  logits[0, 1, :500] = -1e9
  logits[0, 2, 7] = 1e4
  exact = logits.astype(np.float64)
  shifted = exact - exact.max(-1, keepdims=True)
  expected = (exact.max(-1), np.exp(shifted).sum(-1), (np.exp(shifted) * shifted).sum(-1))
  got = jax.jit(functools.partial(sums, squares=True))(logits)
  for actual, value in zip(got, (*expected, np.exp(2 * shifted).sum(-1)), strict=True):
    np.testing.assert_allclose(actual, value, rtol=2e-6, atol=1e-6)
  for actual, value in zip(jax.jit(sums)(logits), got, strict=True):
    assert actual is None or (actual == value).all()


@pytest.mark.parametrize("shape", [None, pytest.param((1, 2, 1, 4), marks=pytest.mark.devices)])
def test_the_norm_of_a_score_against_the_gradient_of_the_log_prob(shape):
  """On one device and with the vocabulary split."""
  hidden, table, tokens = inputs(6, 8, 13, 16, 64)
  mesh = mesh_of(*shape) if shape else single_device_mesh()
  settings = HeadSettings(mesh, 0.7, 24, "highest")
  got = jax.jit(lambda *arrays: score_norms(*arrays, settings))(hidden, table, tokens)
  logits = jnp.einsum("btd,vd->btv", hidden, table, precision="highest") / 0.7
  log_prob = lambda z, token: jax.nn.log_softmax(z)[token]
  gradients = jax.vmap(jax.vmap(jax.grad(log_prob)))(logits, tokens)
  np.testing.assert_allclose(got, jnp.square(gradients).sum(-1), rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_the_entropy():
  hidden, table, tokens = inputs(2)

  def gradient(objective):
    value = lambda hidden, table: objective(*chunked(hidden, table, tokens, 0.8, B * 4))
    return jax.jit(jax.grad(value, argnums=(0, 1)))(hidden, table)

  assert not any(grad.any() for grad in gradient(lambda log_probs, entropy: entropy.sum()))
  both = gradient(lambda log_probs, entropy: (log_probs + 3 * entropy).sum())
  log_probs_only = gradient(lambda log_probs, entropy: log_probs.sum())
  for a, b in zip(both, log_probs_only, strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.abs(b).max() > 0.1


@pytest.mark.parametrize(
  ("shape", "chunk"),
  [
    ((1, 1, 1, 1), 1000),
    ((1, 1, 1, 1), 8 * 3),
    pytest.param((2, 2, 1, 2), 24, marks=pytest.mark.devices),
  ],
)
def test_the_gradient_of_the_entropy_equals_the_full_softmax(shape, chunk):
  mesh = mesh_of(*shape)
  hidden, table, tokens = inputs(4, 8, 10, 16, 64)
  weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)

  def gradient(function):
    def value(hidden, table):
      log_probs, entropy = function(hidden, table, tokens, 0.6)
      return (weights * entropy).sum() + 0.1 * log_probs.sum()

    return jax.jit(jax.grad(value, argnums=(0, 1)))(hidden, table)

  def chunked(hidden, table, tokens, temperature):
    settings = HeadSettings(mesh, temperature, chunk, "highest", entropy_gradient=True)
    return log_probs_and_entropy(hidden, table, tokens, settings)

  for got, want in zip(gradient(chunked), gradient(naive), strict=True):
    assert relative_error(got, want) < 1e-5


def test_a_certain_token_has_log_prob_0_and_no_negative_entropy():
  hidden = jnp.full((1, 4, 2), 40.0)
  table = jnp.asarray([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
  log_probs, entropy = chunked(hidden, table, jnp.asarray([[0, 1, 2, 0]]), 1.0, 2)
  np.testing.assert_allclose(log_probs, [[0, -160, -80, 0]], rtol=1e-6)
  assert (entropy >= 0).all()
  assert (entropy < 1e-5).all()


def test_bfloat16_is_close_to_float32():
  arrays = inputs(3, dtype=jnp.bfloat16)
  settings = HeadSettings(single_device_mesh(), 1.0, B * 4, "default")
  bfloat16 = lambda *x: log_probs_and_entropy(*x, settings)
  grads, values = gradient_and_values(bfloat16, *arrays)
  expected_grads, expected = gradient_and_values(naive, *arrays, 1.0)
  for a, b in zip(values, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.02)
  for a, b in zip(grads, expected_grads, strict=True):
    assert a.dtype == jnp.bfloat16
    assert relative_error(a, b) < 0.01


def loss_signals(algorithm, log_probs, seed=0):
  """The inputs of the loss for tokens [b, t].

  The ratios leave every clip range at both ends, and the padding holds large values.
  """
  rng = np.random.default_rng(seed)
  shape = log_probs.shape
  mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))

  def near(scale):
    noisy = log_probs + scale * rng.standard_normal(shape)
    return np.where(mask, noisy, 9e3).astype(np.float32)

  guided = None
  if algorithm.settings.guide_completions:
    guided = np.broadcast_to(np.arange(shape[0])[:, None] % 3 == 1, shape)
  return Signals(
    log_probs_old=near(0.5),
    log_probs_sampler=near(0.5),
    log_probs_reference=near(0.3),
    mask=mask,
    guided=guided,
    advantages=rng.standard_normal(shape, np.float32),
    weights=rng.random(shape, np.float32) / mask.sum(),
    selected=rng.random(shape) < 0.3 if algorithm.recipe.selects else None,
  )


ONE_DEVICE = (1, 1, 1, 1)
EIGHT_DEVICES = (2, 2, 1, 2)
# With the cases below, one recipe for each per-token objective, and one with a guide.
MORE_PER_TOKEN = ["clip_cov", "cispo", "sapo", "dppo", "kl_cov", "stare", "dapo_mixed"]


@pytest.mark.parametrize(
  ("name", "shape", "t", "dtype", "coef"),
  [
    ("gtpo", ONE_DEVICE, 10, "float32", 0.0),
    *(
      pytest.param(name, ONE_DEVICE, 10, "float32", 0.0, marks=pytest.mark.slow)
      for name in MORE_PER_TOKEN
    ),
    pytest.param("dapo", ONE_DEVICE, 10, "float32", 0.1, marks=pytest.mark.slow),
    pytest.param("dapo_mixed", EIGHT_DEVICES, 13, "float32", 0.1, marks=pytest.mark.devices),
    pytest.param(
      "gtpo", EIGHT_DEVICES, 10, "bfloat16", 0.0, marks=[pytest.mark.slow, pytest.mark.devices]
    ),
  ],
)
def test_the_forward_and_the_backward_pass_compute_the_same_gradient(name, shape, t, dtype, coef):
  """The gradient of a per-token loss can be computed in either pass.

  The positions are not a multiple of those of a chunk, and 13 are not a multiple of the shards.
  """
  mesh = mesh_of(*shape)
  hidden, table, tokens = inputs(6, 8, t, 16, 64, dtype)
  settings = {"dual_clip": 2.0, "kl_weight": 0.3, "tis_cap": 1.1, "entropy_coef": coef}
  read = algorithms.RECIPES[name].settings
  algorithm = algorithms.make(name, **{key: settings[key] for key in settings if key in read})
  bonus = bool(algorithm.recipe.entropy_bonus)
  rows_per_device = 8 // (shape[0] * shape[1])
  settings = HeadSettings(mesh, 0.7, 3 * rows_per_device, "highest", bonus)
  score = lambda hidden, table: log_probs_and_entropy(hidden, table, tokens, settings)
  log_probs, _ = jax.jit(score)(hidden, table)
  signals = loss_signals(algorithm, np.asarray(log_probs))

  def in_backward_pass(hidden, table):
    log_probs, entropy = log_probs_and_entropy(hidden, table, tokens, settings)
    loss = algorithm.token_loss(log_probs, entropy, signals)
    return 2 * loss, (loss, log_probs, entropy)

  def with_the_loss(hidden, table):
    loss, log_probs, entropy, _ = loss_and_log_probs(
      algorithm.token_loss, hidden, table, tokens, signals, settings
    )
    # No gradient flows through the log-probs and entropies.
    return 2 * loss + log_probs.sum() + entropy.sum(), (loss, log_probs, entropy)

  gradient = lambda way: jax.jit(jax.grad(way, argnums=(0, 1), has_aux=True))(hidden, table)
  grads, values = gradient(with_the_loss)
  expected_grads, expected = gradient(in_backward_pass)
  for got, want in zip((*values, *grads), (*expected, *expected_grads), strict=True):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert relative_error(got, want) < 1e-5


def temporary_bytes(function, arrays):
  program = jax.jit(function).lower(*arrays).compile()
  return program.memory_analysis().temp_size_in_bytes


def gradient_of_sum(function):
  total = lambda hidden, table, tokens: function(hidden, table, tokens)[0].sum()
  return jax.grad(total, argnums=(0, 1))


@pytest.mark.parametrize("transform", [lambda x: x, gradient_of_sum], ids=["value", "gradient"])
def test_the_program_never_holds_all_logits(transform):
  b = 4
  t = 512
  v = 1000
  arrays = inputs(4, b, t, 4, v)
  all_logits = b * t * v * 4  # bytes
  all_at_once = functools.partial(naive, temperature=0.9)
  in_chunks = functools.partial(chunked, temperature=0.9, chunk=64)
  # The measurement does see the logits in the program of the naive function.
  assert temporary_bytes(transform(all_at_once), arrays) >= all_logits
  assert temporary_bytes(transform(in_chunks), arrays) < all_logits / 8


def test_memory_grows_with_the_chunk():
  v = 1000
  arrays = inputs(4, 4, 512, 4, v)

  def gradient_bytes(chunk):
    in_chunks = functools.partial(chunked, temperature=0.9, chunk=chunk)
    return temporary_bytes(gradient_of_sum(in_chunks), arrays)

  growth = gradient_bytes(512) - gradient_bytes(128)
  logits = v * 4  # bytes per token
  assert 384 * logits < growth < 384 * 4 * logits
