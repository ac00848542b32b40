"""The gated delta rule and the convolution against loops over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models.delta.layer import convolve
from gtpo_jax.models.delta.rule import CHUNK, chunked_delta_rule, delta_step

N, G, H, E, F = 2, 2, 3, 5, 4
TAPS = 4


def slow_rule(q, k, v, log_decay, beta, initial, begins):
  """The rule one token after another, and the memory at the end."""
  out = np.zeros(v.shape)
  final = np.zeros((*v.shape[:3], E, F))
  for i, j, head in np.ndindex(*v.shape[:3]):
    start = initial[i, j % initial.shape[1], head]
    memory = start
    for t in range(v.shape[3]):
      at = (i, j, head, t)
      if begins[i, j, t]:
        memory = start
      memory = np.exp(log_decay[at]) * memory
      error = v[at] - memory.T @ k[at]
      memory = memory + beta[at] * np.outer(k[at], error)
      out[at] = memory.T @ q[at]
    final[i, j, head] = memory
  return out, final


def arrays(s, shared=True, seed=0):
  rng = np.random.default_rng(seed)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  q, k = (unit(rng.normal(size=(N, G, H, s, E))) for _ in range(2))
  v = rng.normal(size=(N, G, H, s, F))
  log_decay = -rng.exponential(0.2, (N, G, H, s))
  beta = rng.uniform(0, 1, (N, G, H, s))
  return q, k, v, log_decay, beta, rng.normal(size=(N, 1 if shared else G, H, E, F))


def segments(s, seed=1):
  """Where segments begin: some within a chunk, at its borders, and next to each other."""
  begins = np.random.default_rng(seed).random((N, G, s)) < 0.04
  begins[:, 0, [place for place in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK) if place < s]] = 1
  return begins


def forms(case, s):
  """The initial memory and the beginnings of a case."""
  *_, initial = arrays(s, shared=case != "own")
  none = np.zeros((N, G, s), bool)
  return {
    "zero": (None, None, np.zeros_like(initial), none),
    "shared": (initial, None, initial, none),
    "own": (initial, None, initial, none),
    "segments": (initial, segments(s), initial, segments(s)),
    "segments from zero": (None, segments(s), np.zeros_like(initial), segments(s)),
  }[case]


CASES = ("zero", "shared", "own", "segments from zero", "segments")
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)


@pytest.mark.parametrize(
  "case", ["segments", *(pytest.param(x, marks=pytest.mark.slow) for x in CASES[:-1])]
)
def test_chunks_equal_a_loop_over_tokens(case):
  for s in LENGTHS:
    inputs = arrays(s)[:5]
    given, begins, start, at = forms(case, s)
    want = slow_rule(*inputs, start, at)
    got = jax.jit(chunked_delta_rule)(*map(jnp.float32, inputs), given, begins)
    for x, y in zip(got, want, strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=3e-6)


@pytest.mark.parametrize("s", [1, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("case", ["own", "segments"])
@pytest.mark.slow
def test_gradients_equal_those_of_a_loop_over_tokens(case, s):
  """The loop's gradient is a difference quotient in float64, along random directions."""
  inputs = arrays(s)[:5]
  _, begins, start, at = forms(case, s)
  rng = np.random.default_rng(2)
  weights = [rng.normal(size=x.shape) for x in slow_rule(*inputs, start, at)]

  def loss(*inputs):
    both = chunked_delta_rule(*inputs, begins=begins)
    return sum((x * w).sum() for x, w in zip(both, weights, strict=True))

  slow_loss = lambda *inputs: sum(
    (x * w).sum() for x, w in zip(slow_rule(*inputs, at), weights, strict=True)
  )
  every = (*inputs, start)
  gradients = jax.jit(jax.grad(loss, tuple(range(6))))(*map(jnp.float32, every))
  for i, gradient in enumerate(gradients):
    step = 1e-5 * rng.normal(size=every[i].shape)
    moved = lambda sign, i=i, step=step: (*every[:i], every[i] + sign * step, *every[i + 1 :])
    want = (slow_loss(*moved(1)) - slow_loss(*moved(-1))) / 2
    got = float((np.asarray(gradient, np.float64) * step).sum())
    norm = np.linalg.norm(gradient) * np.linalg.norm(step)
    assert abs(got - want) <= 1e-5 * norm, i


def test_steps_equal_chunks():
  s = CHUNK + 7
  inputs = [jnp.float32(x) for x in arrays(s)[:5]]
  initial = jnp.float32(arrays(s, shared=False)[5])
  want = chunked_delta_rule(*inputs, initial)
  move = lambda memory, x: delta_step(*x, memory)[::-1]
  memory, out = jax.lax.scan(move, initial, tuple(jnp.moveaxis(x, 3, 0) for x in inputs))
  np.testing.assert_allclose(jnp.moveaxis(out, 0, 3), want[0], rtol=0, atol=3e-6)
  np.testing.assert_allclose(memory, want[1], rtol=0, atol=3e-6)


def test_equal_keys_that_are_corrected_in_full_are_stable():
  """The inverse of this system has entries of 1, but powers of it have some of 1e18."""
  s = 2 * CHUNK
  k = jnp.full((1, 1, 1, s, E), E**-0.5)
  v = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, s, F)), jnp.float32)
  out, _ = chunked_delta_rule(k, k, v, jnp.zeros((1, 1, 1, s)), jnp.ones((1, 1, 1, s)))
  np.testing.assert_allclose(out, v, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_decays_to_nothing_are_finite():
  inputs = [jnp.float32(x) for x in arrays(CHUNK + 1)]
  initial = inputs.pop()
  inputs[3] = jnp.full_like(inputs[3], -1e4)
  begins = jnp.asarray(segments(CHUNK + 1))
  loss = lambda *inputs: sum(x.sum() for x in chunked_delta_rule(*inputs, begins=begins))
  for x in jax.grad(loss, tuple(range(6)))(*inputs, initial):
    assert jnp.isfinite(x).all()


def test_a_convolution_equals_a_loop_over_its_taps():
  rng = np.random.default_rng(0)
  s = 11
  x = rng.normal(size=(N, G, s, 2, 3))
  kernel = rng.normal(size=(2, 3, TAPS))
  before = rng.normal(size=(N, 1, TAPS - 1, 2, 3))
  first = np.zeros((N, G, s), int)
  first[0, 1] = [0, 0, 0, 0, 0, 5, 6, 6, 8, 8, 8]
  places = np.arange(s) - first
  want = np.zeros(x.shape)
  for i, j, t in np.ndindex(N, G, s):
    inputs = np.concatenate([before[i, 0], x[i, j, first[i, j, t] : t + 1]])[-TAPS:]
    want[i, j, t] = np.einsum("tkf,kft->kf", inputs, kernel)
  got = convolve(*map(jnp.float32, (x, kernel, before)), jnp.asarray(places))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  plain = convolve(*map(jnp.float32, (x[:1, :1], kernel, before[:1])))
  np.testing.assert_allclose(plain[0, 0], want[0, 0], rtol=0, atol=1e-5)
