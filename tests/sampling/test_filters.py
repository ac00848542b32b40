"""Sampling one token from logits, against slow implementations of the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.runtime.fields import LARGEST, LARGEST_INTEGER, SMALLEST
from gtpo_jax.sampling import filters as token_filters
from gtpo_jax.sampling.settings import LOWEST_TEMPERATURE, SamplingParams

VOCAB = 300  # not a multiple of 128
draw = jax.jit(token_filters.draw)
draw_token = jax.jit(token_filters.sample_token, static_argnums=0)
draw_static = jax.jit(token_filters.sample_token, static_argnums=(0, 1))
apply_filters = jax.jit(token_filters.apply_filters, static_argnums=0)


def sample_token(params, *arrays):
  """The same with the temperature as a number and as a value of the program."""
  sampled = draw_static(params.filters, params.temperature, *arrays)
  other = draw_token(params.filters, np.float32(params.temperature), *arrays)
  np.testing.assert_array_equal(sampled.token, other.token)
  for values, others in zip(sampled[1:], other[1:], strict=True):
    np.testing.assert_allclose(values, others, rtol=1e-5, atol=1e-5)
  return sampled


draw_many = jax.jit(jax.vmap(token_filters.draw, in_axes=(None, 0)))
invert_cdf = jax.jit(jax.vmap(token_filters._invert_cdf, in_axes=(None, 0)))


def keys(seed, *shape):
  return jax.random.split(jax.random.key(seed), shape)


def logits(seed, rows=5, vocab=VOCAB, spread=3.0):
  return (spread * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def softmax(z):
  """The softmax over the last axis, in float64."""
  z = np.asarray(z, np.float64)
  p = np.exp(z - z.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


# --- the values reported with a sampled token ---


@pytest.mark.parametrize(
  ("temperature", "filters"),
  [(1.0, {}), (0.7, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}), (2.5, {})],
)
def test_log_prob_and_entropy_are_of_the_unfiltered_distribution(temperature, filters):
  z = logits(0)
  token, log_prob, entropy, drawn, plain = sample_token(
    SamplingParams(temperature, **filters), jnp.asarray(z), keys(0, 5)
  )
  p = softmax(np.asarray(z, np.float64) / temperature)
  np.testing.assert_allclose(log_prob, np.log(p[np.arange(5), token]), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
  assert token.dtype == jnp.int32
  assert {x.dtype for x in (log_prob, entropy, drawn, plain)} == {jnp.dtype(jnp.float32)}
  kept = np.stack([np.where(slow_filter(row, **filters), row, 0) for row in p])
  filtered = kept / kept.sum(-1, keepdims=True)
  np.testing.assert_allclose(drawn, np.log(filtered[np.arange(5), token]), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(plain, np.log(softmax(z)[np.arange(5), token]), rtol=1e-5, atol=1e-6)


def test_greedy_sampling_reports_log_probs_at_temperature_1():
  z = logits(1)
  token, log_prob, entropy, drawn, plain = sample_token(
    SamplingParams(temperature=0.0), jnp.asarray(z), keys(0, 5)
  )
  p = softmax(z)
  np.testing.assert_array_equal(plain, log_prob)
  assert not drawn.any()  # the greedy token has probability 1
  assert token.tolist() == z.argmax(-1).tolist()
  np.testing.assert_allclose(log_prob, np.log(p.max(-1)), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_most_probable_is_the_first_largest_logit():
  logits = np.random.default_rng(0).integers(0, 9, (64, 150)).astype(np.float32)
  logits[3] = -np.inf
  token = token_filters.most_probable(jnp.asarray(logits))
  assert token.dtype == jnp.int32 and token.tolist() == logits.argmax(-1).tolist()
  assert 0 <= int(token_filters.most_probable(jnp.full((150,), jnp.nan))) < 150


def test_all_leading_axes_are_batch_axes():
  z = logits(2, rows=6).reshape(2, 3, VOCAB)
  k = keys(3, 2, 3)
  nested = sample_token(SamplingParams(), jnp.asarray(z), k)
  flat = sample_token(SamplingParams(), jnp.asarray(z.reshape(6, VOCAB)), k.reshape(6))
  for a, b in zip(nested, flat, strict=True):
    assert a.shape == (2, 3)
    np.testing.assert_array_equal(a.ravel(), b)


def test_a_certain_token_has_entropy_0():
  z = np.full((1, VOCAB), -200.0, np.float32)
  z[0, 170] = 200.0
  token, log_prob, entropy, *_ = sample_token(SamplingParams(), jnp.asarray(z), keys(0, 1))
  assert (int(token[0]), float(log_prob[0]), float(entropy[0])) == (170, 0.0, 0.0)


# --- the filters ---


def slow_filter(p, top_k=0, top_p=1.0, min_p=0.0):
  """The kept tokens bool[v], found one at a time. Ties with the last kept token are kept."""
  kept = set(range(len(p)))
  order = sorted(kept, key=lambda i: -p[i])
  if top_k:
    kept = {i for i in kept if p[i] >= p[order[min(top_k, len(p)) - 1]]}
  if top_p < 1:
    order = [i for i in order if i in kept]
    total = sum(p[i] for i in kept)
    mass = 0.0
    for last in order:
      mass += p[last]
      if mass >= top_p * total:
        break
    kept = {i for i in kept if p[i] >= p[last]}
  if min_p:
    kept = {i for i in kept if p[i] >= min_p * max(p)}
  return np.array([i in kept for i in range(len(p))])


@pytest.mark.parametrize(
  "filters",
  [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 299},
    {"top_k": 300},
    {"top_k": 5000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"min_p": 0.01},
    {"min_p": 0.4},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
  ],
  ids=str,
)
@pytest.mark.some(9)
def test_filters_equal_the_slow_ones(filters):
  p = softmax(logits(3, rows=8)).astype(np.float32)
  filtered = np.asarray(apply_filters(SamplingParams(**filters), jnp.asarray(p)))
  expected = np.stack([slow_filter(row.astype(np.float64), **filters) for row in p])
  np.testing.assert_array_equal(filtered, np.where(expected, p, 0))


def test_filters_by_hand():
  p = jnp.asarray([[0.1, 0.4, 0.05, 0.3, 0.15]])
  kept = lambda **filters: np.flatnonzero(apply_filters(SamplingParams(**filters), p)[0]).tolist()
  assert kept() == [0, 1, 2, 3, 4]
  assert kept(top_k=2) == [1, 3]
  assert kept(top_p=0.6) == [1, 3]
  assert kept(top_p=0.75) == [1, 3, 4]
  assert kept(top_p=0.1) == [1]
  assert kept(min_p=0.3) == [1, 3, 4]
  assert kept(top_k=3, top_p=0.8) == [1, 3]  # 0.7 / 0.85 > 0.8


def test_ties_at_a_bound_are_kept():
  p = jnp.asarray([[0.25, 0.125, 0.25, 0.125, 0.125, 0.125]])
  kept = lambda **filters: np.flatnonzero(apply_filters(SamplingParams(**filters), p)[0]).tolist()
  assert kept(top_k=1) == [0, 2]
  assert kept(top_k=3) == [0, 1, 2, 3, 4, 5]
  assert kept(top_p=0.2) == [0, 2]
  assert kept(top_p=0.5) == [0, 2]
  assert kept(top_p=0.51) == [0, 1, 2, 3, 4, 5]
  assert kept(min_p=0.5) == [0, 1, 2, 3, 4, 5]
  assert kept(min_p=0.51) == [0, 2]


@pytest.mark.parametrize(
  "filters", [{"top_p": 0.6}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}], ids=str
)
@pytest.mark.some(1)
def test_only_kept_tokens_are_drawn(filters):
  z = np.tile(logits(4, rows=1), (4000, 1))
  token, *_ = sample_token(SamplingParams(**filters), jnp.asarray(z), keys(5, 4000))
  kept = np.flatnonzero(slow_filter(softmax(z[0]), **filters))
  assert set(token.tolist()) <= set(kept.tolist())
  assert len(set(token.tolist())) > 1


@pytest.mark.slow
def test_the_extremes_of_the_bounds_have_their_meaning():
  """Nothing is infinite, and the lowest temperature and the smallest top_p are greedy."""
  z = logits(3, spread=10.0)
  seen = jnp.zeros(z.shape, bool).at[:, ::2].set(True)
  for settings in (
    {"temperature": LOWEST_TEMPERATURE},
    {"temperature": LARGEST},
    {"top_k": LARGEST_INTEGER},
    {"top_p": SMALLEST},
    {"min_p": SMALLEST},
    {"repetition_penalty": SMALLEST, "temperature": LOWEST_TEMPERATURE},
    {"repetition_penalty": LARGEST},
  ):
    sampled = sample_token(SamplingParams(**settings), z, keys(4, 5), seen)
    assert all(np.isfinite(values).all() for values in sampled), settings
    if settings in ({"temperature": LOWEST_TEMPERATURE}, {"top_p": SMALLEST}):
      np.testing.assert_array_equal(sampled.token, z.argmax(-1))


def test_masked_logits_are_never_drawn():
  z = logits(6)
  z[:, 40:] = -1e30
  for temperature in (1.0, 2**-20):
    sampled = sample_token(SamplingParams(temperature), jnp.asarray(z), keys(0, 5))
    assert (np.asarray(sampled.token) < 40).all()
    assert np.isfinite(sampled.log_prob).all() and np.isfinite(sampled.entropy).all()
    assert (np.asarray(sampled.entropy) >= 0).all()


# --- the repetition penalty ---


@pytest.mark.parametrize(
  ("penalty", "temperature"),
  [
    (1.3, 0.6),
    pytest.param(0.7, 1.0, marks=pytest.mark.slow),
    pytest.param(1.3, 1.0, marks=pytest.mark.slow),
    pytest.param(0.7, 0.6, marks=pytest.mark.slow),
  ],
)
def test_repetition_penalty_equals_transformers(penalty, temperature):
  torch = pytest.importorskip("torch")
  from transformers import RepetitionPenaltyLogitsProcessor

  z = logits(8, rows=3)
  rng = np.random.default_rng(0)
  earlier = rng.integers(0, VOCAB, (3, 40))
  seen = np.zeros((3, VOCAB), bool)
  np.put_along_axis(seen, earlier, True, 1)
  penalise = RepetitionPenaltyLogitsProcessor(penalty)
  expected = penalise(torch.tensor(earlier), torch.tensor(z)).numpy()
  sampling_params = SamplingParams(temperature, repetition_penalty=penalty)
  repeat = lambda x: jnp.asarray(np.repeat(x, 3000, 0))
  sampled = sample_token(sampling_params, repeat(z), keys(7, 9000), repeat(seen))
  token, log_prob, _, drawn, _ = (np.asarray(x).reshape(3, 3000) for x in sampled)
  for row in range(3):
    p = softmax(expected[row] / temperature)
    policy = softmax(z[row].astype(np.float64) / temperature)
    assert p_value(token[row], p) > 1e-4 > p_value(token[row], policy)
    np.testing.assert_allclose(drawn[row], np.log(p[token[row]]), rtol=1e-4, atol=1e-5)
    # The policy is the distribution without the penalty.
    np.testing.assert_allclose(log_prob[row], np.log(policy[token[row]]), rtol=1e-4, atol=1e-5)
  greedy, *_ = sample_token(
    SamplingParams(0.0, repetition_penalty=penalty), jnp.asarray(z), keys(0, 3), jnp.asarray(seen)
  )
  assert greedy.tolist() == expected.argmax(-1).tolist()


# --- the draw ---


def p_value(tokens, p):
  """The p-value of Pearson's chi-square test. Tokens expected fewer than 10 times are pooled."""
  counts = np.bincount(tokens, minlength=len(p))
  expected = p * len(tokens)
  rare = expected < 10
  counts = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  if expected[-1] < 10:
    counts = np.append(counts[:-2], counts[-2:].sum())
    expected = np.append(expected[:-2], expected[-2:].sum())
  from scipy import stats  # takes a second

  return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


DRAWS = 200_000
PEAKED = np.where(np.arange(VOCAB) == 211, 0.97, 0.03 * softmax(np.sin(np.arange(VOCAB)) * 3))
DISTRIBUTIONS = {
  "random": softmax(logits(6, rows=1, spread=1.5)[0]),
  "flat": np.full(VOCAB, 1 / VOCAB),
  "peaked": PEAKED / PEAKED.sum(),
}


@pytest.mark.parametrize(
  "name", ["random", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flat", "peaked"))]
)
@pytest.mark.some(1)
def test_frequencies_of_the_draw(name):
  p = DISTRIBUTIONS[name]
  tokens = np.asarray(draw_many(jnp.asarray(p, jnp.float32), keys(7, DRAWS)))
  assert p_value(tokens, p) > 0.01
  other = np.roll(p, 1) if name != "flat" else p * np.linspace(0.9, 1.1, VOCAB)
  assert p_value(tokens, other / other.sum()) < 1e-6  # the test has the power to reject


def test_weights_need_not_sum_to_1():
  p = DISTRIBUTIONS["random"]
  normalised = draw_many(jnp.asarray(p, jnp.float32), keys(8, 2000))
  scaled = draw_many(jnp.asarray(2**-10 * p, jnp.float32), keys(8, 2000))
  np.testing.assert_array_equal(normalised, scaled)


@pytest.mark.parametrize("kind", ["half", "few", "one", "blocks", "last", "first"])
def test_a_token_of_probability_0_is_never_drawn(kind):
  rng = np.random.default_rng(9)
  p = rng.random((4000, VOCAB)).astype(np.float32)
  token = np.arange(VOCAB)
  possible = {
    "half": rng.random(p.shape) < 0.5,
    "few": rng.random(p.shape) < 0.02,
    "one": token == rng.integers(0, VOCAB, (len(p), 1)),
    "blocks": (token // 128 == 1) & (rng.random(p.shape) < 0.5),
    "last": token == VOCAB - 1,
    "first": token == 0,
  }[kind]
  p = np.where(possible, p, 0)
  likely = rng.integers(0, VOCAB, len(p)) if kind in ("half", "few") else p.argmax(1)
  p[np.arange(len(p)), likely] += 0.1
  tokens = np.asarray(draw(jnp.asarray(p), keys(10, len(p))))
  assert (p[np.arange(len(p)), tokens] > 0).all()


# 128 tokens in a block, and 1188 blocks in a vocabulary of 152064.
@pytest.mark.parametrize("length", [128, pytest.param(1188, marks=pytest.mark.slow)])
def test_inverting_the_cdf_never_selects_a_weight_of_0(length):
  """The targets are at the edges of weights of 0, where rounding of the running sums decides."""
  rng = np.random.default_rng(11)
  weights = (rng.random((50, length)) * (rng.random((50, length)) < 0.5)).astype(np.float32)
  weights[:, length // 2] = 0.5
  sums = np.asarray(jnp.cumsum(jnp.asarray(weights), -1))
  edges = (sums / sums[:, -1:]).astype(np.float32)
  for uniform in (
    edges,
    np.nextafter(edges, np.float32(0)),
    np.nextafter(edges, np.float32(1)),
    edges * np.float32(1 - 2**-23),
  ):
    uniform = np.clip(uniform, 0, np.float32(1 - 2**-24)).T  # f32[length, rows]
    index, fraction = invert_cdf(jnp.asarray(weights), jnp.asarray(uniform))
    drawn = np.take_along_axis(weights, np.asarray(index).T, 1)
    zeros = (drawn == 0).sum()
    assert zeros == 0, f"{zeros} of {drawn.size} targets select a weight of 0"
    assert (fraction >= 0).all() and (fraction < 1).all()
