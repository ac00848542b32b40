import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax import algorithms
from gtpo_jax.runtime.mesh import make_mesh, single_device_mesh
from gtpo_jax.training.head import log_probs_and_entropy, loss_and_log_probs

B = 3
T = 10
D = 8
V = 50


def inputs(seed=0, b=B, t=T, d=D, v=V, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((b, t, d))
  table = rng.standard_normal((v, d))
  return (
    jnp.asarray(hidden, dtype),
    jnp.asarray(table, dtype),
    jnp.asarray(rng.integers(0, v, (b, t)), jnp.int32),
  )


def naive(hidden, table, tokens, temperature):
  """The whole logits at once, in float32."""
  z = (
    jnp.einsum(
      "btd,vd->btv", hidden.astype(jnp.float32), table.astype(jnp.float32), precision="highest"
    )
    / temperature
  )
  log_p = jax.nn.log_softmax(z)
  return jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(
    -1
  )


def chunked(hidden, table, tokens, temperature, chunk):
  return log_probs_and_entropy(
    hidden, table, tokens, temperature, chunk, "highest", single_device_mesh()
  )


def gradient_and_values(function, hidden, table, tokens, *static):
  """The values, and the gradient of a sum of log-probs with uneven weights, which no mistake of order survives."""
  weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)

  def value(hidden, table):
    log_probs, entropy = function(hidden, table, tokens, *static)
    return (weights * log_probs).sum(), (log_probs, entropy)

  return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(hidden, table)


# All at once; parts that divide t; parts that do not; one position at a time; fewer tokens than rows.
@pytest.mark.parametrize("chunk", [1000, B * T, B * 5, B * 4, B * 3 + 1, B, 1])
def test_value_and_gradient_equal_the_whole_softmax(chunk):
  x = inputs()
  for temperature in (1.0, 0.6) if chunk == B * 4 else (0.6,):
    grads, values = gradient_and_values(chunked, *x, temperature, chunk)
    expected_grads, expected = whole_softmax(temperature)
    for a, b in zip(values, expected, strict=True):
      assert a.shape == (B, T) and a.dtype == jnp.float32
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("shape", "t"),
  [((2, 2, 2), 10), ((1, 1, 8), 10), ((1, 2, 4), 13), ((1, 8, 1), 5), ((1, 2, 2, None, 2), 13)],
)
def test_on_a_mesh_it_equals_the_whole_softmax(shape, t):
  """Rows over data and fsdp, words and positions over context and tensor, positions that divide and that do not."""
  mesh = make_mesh(*shape)
  x = inputs(5, 8, t, 16, 64)
  sharded = lambda *x: log_probs_and_entropy(*x, 0.6, 24, "highest", mesh)
  grads, values = gradient_and_values(sharded, *x)
  expected_grads, expected = gradient_and_values(naive, *x, 0.6)
  for got, want in zip((*values, *grads), (*expected, *expected_grads), strict=True):
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@functools.cache
def whole_softmax(temperature):
  return gradient_and_values(naive, *inputs(), temperature)


def test_against_float64():
  hidden, table, tokens = inputs(1)
  z = np.einsum("btd,vd->btv", *(np.asarray(x, np.float64) for x in (hidden, table))) / 1.7
  log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
  log_probs, entropy = chunked(hidden, table, tokens, 1.7, B * 4)
  np.testing.assert_allclose(
    log_probs,
    np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0],
    rtol=1e-5,
    atol=1e-6,
  )
  np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)


def test_no_gradient_flows_through_the_entropy():
  hidden, table, tokens = inputs(2)

  def grads(of):
    return jax.jit(
      jax.grad(
        lambda hidden, table: of(*chunked(hidden, table, tokens, 0.8, B * 4)), argnums=(0, 1)
      )
    )(hidden, table)

  assert not any(grad.any() for grad in grads(lambda log_probs, entropy: entropy.sum()))
  both = grads(lambda log_probs, entropy: (log_probs + 3 * entropy).sum())
  alone = grads(lambda log_probs, entropy: log_probs.sum())
  for a, b in zip(both, alone, strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.abs(b).max() > 0.1


def test_a_certain_token_has_log_prob_0_and_no_negative_entropy():
  hidden = jnp.full((1, 4, 2), 40.0)
  table = jnp.asarray([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
  log_probs, entropy = chunked(hidden, table, jnp.asarray([[0, 1, 2, 0]]), 1.0, 2)
  np.testing.assert_allclose(log_probs, [[0, -160, -80, 0]], rtol=1e-6)
  assert (entropy >= 0).all() and (entropy < 1e-5).all()


def test_bfloat16_stays_near_float32():
  hidden, table, tokens = inputs(3, dtype=jnp.bfloat16)
  plain = lambda *x: log_probs_and_entropy(*x, 1.0, B * 4, "default", single_device_mesh())
  grads, values = gradient_and_values(plain, hidden, table, tokens)
  expected_grads, expected = gradient_and_values(naive, hidden, table, tokens, 1.0)
  for a, b in zip(values, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.02)
  for a, b in zip(grads, expected_grads, strict=True):
    assert a.dtype == jnp.bfloat16
    a = np.asarray(a, np.float64)
    b = np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def signals(algorithm, log_probs, seed=0):
  """What the loss takes of tokens [b, t] whose ratios leave every range on both sides; padding holds large numbers."""
  rng = np.random.default_rng(seed)
  shape = log_probs.shape
  mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
  near = lambda scale: np.where(mask, log_probs + scale * rng.standard_normal(shape), 9e3).astype(
    np.float32
  )
  guided = (
    np.broadcast_to(np.arange(shape[0])[:, None] % 3 == 1, shape)
    if algorithm.settings.guide_completions
    else None
  )
  return {
    "logp_old": near(0.5),
    "logp_sampler": near(0.5),
    "logp_reference": near(0.3),
    "mask": mask,
    "guided": guided,
    "advantages": rng.standard_normal(shape, np.float32),
    "weights": rng.random(shape, np.float32) / mask.sum(),
  }


ONE = (1, 1, 1)
EIGHT = (2, 2, 2)
PER_TOKEN = [name for name in algorithms.RECIPES if algorithms.make(name).per_token]


@pytest.mark.parametrize(
  ("name", "shape", "t", "dtype"),
  [
    *((name, ONE, 10, "float32") for name in PER_TOKEN),
    ("dapo_mixed", EIGHT, 13, "float32"),
    ("gtpo", EIGHT, 10, "float32"),
    ("gtpo", EIGHT, 10, "bfloat16"),
  ],
)
def test_the_gradient_computed_beside_the_loss_is_the_one_computed_after_it(name, shape, t, dtype):
  """For every recipe whose loss is a sum over tokens, with positions that chunks and shards do not divide."""
  mesh = make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])
  hidden, table, tokens = inputs(6, 8, t, 16, 64, dtype)
  algorithm = algorithms.make(name, dual_clip=2.0, kl_weight=0.3, tis_cap=1.1)
  static = 0.7, 24, "highest", mesh
  given = signals(algorithm, np.asarray(log_probs_and_entropy(hidden, table, tokens, *static)[0]))

  def after(hidden, table):
    log_probs, _ = log_probs_and_entropy(hidden, table, tokens, *static)
    loss = algorithm.token_loss(log_probs, given)
    return 2 * loss, (loss, log_probs)

  def beside(hidden, table):
    loss, log_probs = loss_and_log_probs(
      algorithm.token_loss, hidden, table, tokens, given, *static
    )
    return 2 * loss + log_probs.sum(), (loss, log_probs)  # log-probs pass no gradient on

  gradient = lambda way: jax.jit(jax.grad(way, argnums=(0, 1), has_aux=True))(hidden, table)
  (grads, values) = gradient(beside)
  (expected_grads, expected) = gradient(after)
  for got, want in zip((*values, *grads), (*expected, *expected_grads), strict=True):
    assert got.dtype == want.dtype and got.shape == want.shape
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_the_program_never_holds_all_the_logits(what):
  b = 4
  t = 512
  d = 4
  v = 1000
  chunk = 64
  x = inputs(4, b, t, d, v)
  whole = b * t * v * 4  # bytes

  def temporary(function):
    program = function
    if what == "gradient":
      program = jax.grad(
        lambda hidden, table, tokens: function(hidden, table, tokens)[0].sum(), argnums=(0, 1)
      )
    return jax.jit(program).lower(*x).compile().memory_analysis().temp_size_in_bytes

  assert temporary(functools.partial(naive, temperature=0.9)) >= whole  # the measure can tell
  assert temporary(lambda *x: chunked(*x, 0.9, chunk)) < whole / 8


def test_what_it_holds_grows_with_the_chunk():
  b = 4
  t = 512
  d = 4
  v = 1000
  x = inputs(4, b, t, d, v)

  def temporary(chunk):
    program = jax.grad(
      lambda hidden, table, tokens: chunked(hidden, table, tokens, 0.9, chunk)[0].sum(),
      argnums=(0, 1),
    )
    return jax.jit(program).lower(*x).compile().memory_analysis().temp_size_in_bytes

  small = temporary(128)
  large = temporary(512)
  logits = v * 4  # bytes a token
  assert 384 * logits < large - small < 384 * 4 * logits
