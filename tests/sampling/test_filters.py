import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.filters import SamplingParams, _invert
from gtpo_jax.sampling.filters import draw as plain_draw

VOCAB = 300  # not a multiple of 128
draw = jax.jit(plain_draw)
pick = jax.jit(SamplingParams.pick, static_argnums=0)
keep = jax.jit(SamplingParams.keep, static_argnums=0)


def keys(seed, *shape):
  return jax.random.split(jax.random.key(seed), shape)


def logits(seed, rows=5, vocab=VOCAB, spread=3.0):
  return (spread * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def softmax(z):
  """f64."""
  z = np.asarray(z, np.float64)
  p = np.exp(z - z.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


# --- what is reported of a drawn token ---


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}])
def test_log_prob_and_entropy_are_of_the_whole_distribution_at_the_temperature(
  temperature, filters
):
  z = logits(0)
  token, log_prob, entropy, drawn, plain = pick(
    SamplingParams(temperature, **filters), jnp.asarray(z), keys(0, 5)
  )
  p = softmax(np.asarray(z, np.float64) / temperature)
  np.testing.assert_allclose(log_prob, np.log(p[np.arange(5), token]), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
  assert (
    token.dtype == jnp.int32
    and log_prob.dtype == entropy.dtype == drawn.dtype == plain.dtype == jnp.float32
  )
  kept = np.stack([np.where(slow_keep(row, **filters), row, 0) for row in p])
  np.testing.assert_allclose(
    drawn, np.log((kept / kept.sum(-1, keepdims=True))[np.arange(5), token]), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(plain, np.log(softmax(z)[np.arange(5), token]), rtol=1e-5, atol=1e-6)


def test_greedy_takes_the_most_probable_and_reports_temperature_1():
  z = logits(1)
  token, log_prob, entropy, drawn, plain = pick(
    SamplingParams(temperature=0.0), jnp.asarray(z), keys(0, 5)
  )
  p = softmax(z)
  np.testing.assert_array_equal(plain, log_prob)
  assert not drawn.any()  # certain
  assert token.tolist() == z.argmax(-1).tolist()
  np.testing.assert_allclose(log_prob, np.log(p.max(-1)), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_every_leading_axis_is_a_row():
  z = logits(2, rows=6).reshape(2, 3, VOCAB)
  k = keys(3, 2, 3)
  got = pick(SamplingParams(), jnp.asarray(z), k)
  rows = pick(SamplingParams(), jnp.asarray(z.reshape(6, VOCAB)), k.reshape(6))
  for a, b in zip(got, rows, strict=True):
    assert a.shape == (2, 3)
    np.testing.assert_array_equal(a.ravel(), b)


def test_a_certain_token_has_entropy_0():
  z = np.full((1, VOCAB), -200.0, np.float32)
  z[0, 170] = 200.0
  token, log_prob, entropy, *_ = pick(SamplingParams(), jnp.asarray(z), keys(0, 1))
  assert (int(token[0]), float(log_prob[0]), float(entropy[0])) == (170, 0.0, 0.0)


# --- the filters ---


def slow_keep(p, top_k=0, top_p=1.0, min_p=0.0):
  """The sets by their definitions, one token at a time; tokens as probable as the last one kept are kept too."""
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
def test_filters_against_the_slow_sets(filters):
  p = softmax(logits(3, rows=8)).astype(np.float32)
  got = np.asarray(keep(SamplingParams(**filters), jnp.asarray(p)))
  expected = np.stack([slow_keep(row.astype(np.float64), **filters) for row in p])
  np.testing.assert_array_equal(got, np.where(expected, p, 0))


def test_filters_by_hand():
  p = jnp.asarray([[0.1, 0.4, 0.05, 0.3, 0.15]])
  kept = lambda **filters: np.flatnonzero(keep(SamplingParams(**filters), p)[0]).tolist()
  assert kept() == [0, 1, 2, 3, 4]
  assert kept(top_k=2) == [1, 3]
  assert kept(top_p=0.6) == [1, 3]
  assert kept(top_p=0.75) == [1, 3, 4]
  assert kept(top_p=0.1) == [1]
  assert kept(min_p=0.3) == [1, 3, 4]
  assert kept(top_k=3, top_p=0.8) == [1, 3]  # 0.7 of the 0.85 that top-k left


def test_ties_at_a_bound_are_kept():
  p = jnp.asarray([[0.25, 0.125, 0.25, 0.125, 0.125, 0.125]])
  kept = lambda **filters: np.flatnonzero(keep(SamplingParams(**filters), p)[0]).tolist()
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
def test_only_kept_tokens_are_drawn(filters):
  z = np.tile(logits(4, rows=1), (4000, 1))
  token, *_ = pick(SamplingParams(**filters), jnp.asarray(z), keys(5, 4000))
  kept = np.flatnonzero(slow_keep(softmax(z[0]), **filters))
  assert set(token.tolist()) <= set(kept.tolist())
  assert len(set(token.tolist())) > 1


def test_logits_of_minus_infinity_in_effect_take_no_part():
  z = logits(6)
  z[:, 40:] = -1e30
  for temperature in (1.0, 1e-9):
    token, log_prob, entropy, *_ = pick(SamplingParams(temperature), jnp.asarray(z), keys(0, 5))
    assert (
      (np.asarray(token) < 40).all() and np.isfinite(log_prob).all() and np.isfinite(entropy).all()
    )
    assert (np.asarray(entropy) >= 0).all()


# --- the repetition penalty ---


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_repetition_penalty_as_transformers_does_it(penalty, temperature):
  torch = pytest.importorskip("torch")
  from transformers import RepetitionPenaltyLogitsProcessor

  z = logits(8, rows=3)
  rng = np.random.default_rng(0)
  written = rng.integers(0, VOCAB, (3, 40))
  seen = np.zeros((3, VOCAB), bool)
  np.put_along_axis(seen, written, True, 1)
  want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(written), torch.tensor(z)).numpy()
  sampling_params = SamplingParams(temperature, repetition_penalty=penalty)
  many = lambda x: jnp.asarray(np.repeat(x, 3000, 0))
  token, log_prob, _, drawn, _ = (
    np.asarray(x).reshape(3, 3000)
    for x in pick(sampling_params, many(z), keys(7, 9000), many(seen))
  )
  for row in range(3):
    p = softmax(want[row] / temperature)
    policy = softmax(z[row].astype(np.float64) / temperature)
    assert p_value(token[row], p) > 1e-4 > p_value(token[row], policy)
    np.testing.assert_allclose(drawn[row], np.log(p[token[row]]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
      log_prob[row], np.log(policy[token[row]]), rtol=1e-4, atol=1e-5
    )  # the policy knows no penalty
  greedy, *_ = pick(
    SamplingParams(0.0, repetition_penalty=penalty), jnp.asarray(z), keys(0, 3), jnp.asarray(seen)
  )
  assert greedy.tolist() == want.argmax(-1).tolist()


# --- the draw ---


def p_value(tokens, p):
  """Of Pearson's chi-square test; words expected fewer than 10 times are pooled."""
  counts = np.bincount(tokens, minlength=len(p))
  expected = p * len(tokens)
  rare = expected < 10
  counts = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  if expected[-1] < 10:
    counts = np.append(counts[:-2], counts[-2:].sum())
    expected = np.append(expected[:-2], expected[-2:].sum())
  return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


DRAWS = 200_000
PEAKED = np.where(np.arange(VOCAB) == 211, 0.97, 0.03 * softmax(np.sin(np.arange(VOCAB)) * 3))
DISTRIBUTIONS = {
  "random": softmax(logits(6, rows=1, spread=1.5)[0]),
  "flat": np.full(VOCAB, 1 / VOCAB),
  "peaked": PEAKED / PEAKED.sum(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frequencies_of_the_draw(name):
  p = DISTRIBUTIONS[name]
  rows = jax.jit(jax.vmap(plain_draw, in_axes=(None, 0)))
  tokens = np.asarray(rows(jnp.asarray(p, jnp.float32), keys(7, DRAWS)))
  assert p_value(tokens, p) > 0.01
  other = np.roll(p, 1) if name != "flat" else p * np.linspace(0.9, 1.1, VOCAB)
  assert p_value(tokens, other / other.sum()) < 1e-6  # the test can tell


def test_weights_need_not_sum_to_1():
  p = DISTRIBUTIONS["random"]
  rows = jax.jit(jax.vmap(plain_draw, in_axes=(None, 0)))
  whole, part = (rows(jnp.asarray(scale * p, jnp.float32), keys(8, 2000)) for scale in (1, 2**-10))
  np.testing.assert_array_equal(whole, part)


@pytest.mark.parametrize("kind", ["half", "few", "one", "blocks", "last", "first"])
def test_a_word_of_probability_0_is_never_drawn(kind):
  rng = np.random.default_rng(9)
  p = rng.random((20_000, VOCAB)).astype(np.float32)
  word = np.arange(VOCAB)
  alive = {
    "half": rng.random(p.shape) < 0.5,
    "few": rng.random(p.shape) < 0.02,
    "one": word == rng.integers(0, VOCAB, (len(p), 1)),
    "blocks": (word // 128 == 1) & (rng.random(p.shape) < 0.5),
    "last": word == VOCAB - 1,
    "first": word == 0,
  }[kind]
  p = np.where(alive, p, 0)
  p[
    np.arange(len(p)),
    np.where(kind in ("half", "few"), rng.integers(0, VOCAB, len(p)), p.argmax(1)),
  ] += 0.1
  tokens = np.asarray(draw(jnp.asarray(p), keys(10, len(p))))
  assert (p[np.arange(len(p)), tokens] > 0).all()


@pytest.mark.parametrize(
  "length", [128, 1188]
)  # words in a block, and blocks of a vocabulary of 152064
def test_inverting_a_distribution_never_lands_on_a_weight_of_0(length):
  """Points on the very edges of the empty cells, where rounding of the running sums decides."""
  rng = np.random.default_rng(11)
  weights = (rng.random((50, length)) * (rng.random((50, length)) < 0.5)).astype(np.float32)
  weights[:, length // 2] = 0.5
  sums = np.asarray(jnp.cumsum(jnp.asarray(weights), -1))
  edges = (sums / sums[:, -1:]).astype(np.float32)
  for points in (
    edges,
    np.nextafter(edges, np.float32(0)),
    np.nextafter(edges, np.float32(1)),
    edges * np.float32(1 - 2**-23),
  ):
    points = np.clip(points, 0, np.float32(1 - 2**-24)).T  # f32[length, rows]
    index, rest = jax.jit(jax.vmap(_invert, in_axes=(None, 0)))(
      jnp.asarray(weights), jnp.asarray(points)
    )
    drawn = np.take_along_axis(weights, np.asarray(index).T, 1)
    assert (drawn > 0).all(), f"{(drawn == 0).sum()} of {drawn.size} points land on a weight of 0"
    assert (rest >= 0).all() and (rest < 1).all()


# --- refusals ---


@pytest.mark.parametrize(
  ("setting", "value", "bound"),
  [
    ("temperature", -0.1, "at least 0 and finite"),
    ("temperature", float("inf"), "at least 0 and finite"),
    ("temperature", float("nan"), "at least 0 and finite"),
    ("top_k", -1, "at least 0"),
    ("top_p", 0.0, "in (0, 1]"),
    ("top_p", 1.01, "in (0, 1]"),
    ("top_p", float("nan"), "in (0, 1]"),
    ("min_p", -0.01, "in [0, 1)"),
    ("min_p", 1.0, "in [0, 1)"),
    ("min_p", float("nan"), "in [0, 1)"),
  ],
)
def test_a_bad_value_is_refused_with_the_value_and_the_bound(setting, value, bound):
  with pytest.raises(UserError) as error:
    SamplingParams(**{setting: value})
  assert f"sampling.{setting} must be {bound}" in str(error.value)
  assert str(error.value).endswith(f"got {value}")
