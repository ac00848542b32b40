"""The engine against the trainer's scores of the same tokens, and the properties it documents."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
  CONFIG,
  PAD,
  PROMPTS,
  RAGGED_PROMPTS,
  STOP,
  assert_same,
  build,
  forward,
  log_prob_errors,
  places,
  sample,
  trainer_scores,
)

from gtpo_jax.logs.profile import compile_count
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.inventory import Workload, reachable, warm_up
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams


@pytest.fixture(scope="module")
def built():
  return build()


@pytest.fixture(scope="module")
def sampled(built):
  return sample(built)


# --- completions ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.some(1, slow=0)
def test_log_probs_and_entropy_equal_the_trainers(built, temperature):
  rollouts = sample(
    built, key=0, group=6, temperature=temperature, top_k=20, top_p=0.95, min_p=0.01
  )
  log_probs, entropy = trainer_scores(built, rollouts, temperature)
  mask = rollouts.mask
  assert mask.sum() > 100 and np.asarray(rollouts.entropy)[mask].min() >= 0
  assert np.abs(np.asarray(log_probs - rollouts.log_probs))[mask].max() <= 1e-4
  assert np.abs(np.asarray(entropy - rollouts.entropy))[mask].max() <= 1e-4


def test_a_completion_ends_with_its_stop_token(sampled):
  tokens, mask, finished = (np.asarray(x) for x in (sampled.tokens, sampled.mask, sampled.finished))
  assert finished.any() and not finished.all()
  rows = zip(tokens.reshape(-1, 10), mask.reshape(-1, 10), finished.ravel(), strict=True)
  for row, row_mask, stopped in rows:
    length = row_mask.sum()
    assert row_mask[:length].all() and length >= 1
    assert not set(row[: length - 1]) & set(STOP)
    assert (row[length - 1] in STOP) == stopped  # the stop token is in the mask, so it is trained
    assert stopped or length == 10
    assert (row[length:] == PAD).all()


def test_values_outside_the_mask_are_0(sampled):
  mask = np.asarray(sampled.mask)
  assert (np.asarray(sampled.log_probs)[~mask] == 0).all()
  assert (np.asarray(sampled.entropy)[~mask] == 0).all()


def test_a_completion_depends_only_on_its_key_and_prompt(built, sampled):
  fewer = sample(built, PROMPTS[:2], group=3)
  np.testing.assert_array_equal(fewer.tokens, sampled.tokens[:2, :3])
  other_neighbour = sample(built, [PROMPTS[0], [17, 17, 17]], group=3)
  np.testing.assert_array_equal(other_neighbour.tokens[0], fewer.tokens[0])
  assert (other_neighbour.tokens[1] != fewer.tokens[1]).any()


def test_keys_differ_by_step_prompt_and_completion(built):
  draw = lambda key: sample(built, [PROMPTS[0]] * 3, key, group=4).tokens
  first = draw(0)
  assert len({row.tobytes() for row in first.reshape(12, -1)}) > 9
  np.testing.assert_array_equal(first, draw(0))
  assert (first != draw(1)).any()


def test_greedy_is_the_argmax_of_a_full_forward_pass(built):
  params, engine, _ = built
  rollouts = sample(built, group=1, temperature=0.0)
  for prompt, row, mask in zip(PROMPTS, rollouts.tokens[:, 0], rollouts.mask[:, 0], strict=True):
    text = [*prompt, *row[mask]]
    padded = jnp.asarray([text + [PAD] * (16 - len(text))])
    logits = np.asarray(forward(engine.model, params, padded))[0, : len(text)]
    np.testing.assert_array_equal(logits.argmax(-1)[len(prompt) - 1 : -1], row[mask])


def test_frequencies_follow_the_distribution(built):
  params, engine, _ = built
  rollouts = sample(
    build(max_tokens=1, stop=(), engine_config=EngineConfig(slots=1000)),
    [PROMPTS[2]],
    group=4000,
    key=9,
    temperature=2.0,
  )
  prompt = PROMPTS[2]
  padded = jnp.asarray([prompt + [PAD] * (16 - len(prompt))])
  logits = forward(engine.model, params, padded)[0, len(prompt) - 1]
  expected = np.asarray(jax.nn.softmax(logits / 2.0))
  frequency = np.bincount(np.asarray(rollouts.tokens).ravel(), minlength=48) / 4000
  assert np.abs(frequency - expected).max() < 4 * np.sqrt(0.25 / 4000)
  common = expected * 4000 > 5
  chi_square = (np.square(frequency - expected)[common] / expected[common]).sum() * 4000
  assert chi_square < common.sum() + 4 * np.sqrt(2 * common.sum())


@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_drawn_and_plain_log_probs(penalty):
  """The penalty applies only to a slot's own prompt and completion, also in refilled slots."""
  params, engine, layout = build(engine_config=EngineConfig(slots=3, chunk=4))
  sampling_params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=penalty)
  rows = engine.completions(PROMPTS, engine.completion_keys(jax.random.key(0), len(PROMPTS), 4))
  for _ in engine.generate(layout, rows, sampling_params=sampling_params):
    pass
  for i, j in np.ndindex(len(PROMPTS), 4):
    arrays = rows[i][j].arrays()
    text = [*PROMPTS[i], *arrays["tokens"]]
    padded = jnp.asarray([text + [PAD] * (16 - len(text))])
    logits = np.asarray(forward(engine.model, params, padded), np.float64)[0]
    for step, token in enumerate(arrays["tokens"]):
      end = len(PROMPTS[i]) + step
      plain = np.exp(logits[end - 1])
      penalised = logits[end - 1].copy()
      seen = penalised[text[:end]]
      penalised[text[:end]] = np.where(seen > 0, seen / penalty, seen * penalty)
      kept = np.where(penalised >= np.sort(penalised)[-5], np.exp(penalised / 0.7), 0)
      np.testing.assert_allclose(
        arrays["plain_log_probs"][step], np.log(plain[token] / plain.sum()), atol=1e-4
      )
      np.testing.assert_allclose(
        arrays["drawn_log_probs"][step], np.log(kept[token] / kept.sum()), atol=1e-4
      )


# --- cache lengths and slot counts ---


@pytest.mark.slow
def test_long_completions_grow_their_caches_and_drop_idle_slots():
  """The caches grow through every length, and the number of slots shrinks."""
  built = build(max_tokens=300, stop=(7,), engine_config=EngineConfig(slots=8, chunk=16))
  rollouts = sample(built, RAGGED_PROMPTS[:3], group=4, key=1)
  lengths = rollouts.mask.sum(-1)
  assert lengths.max() > 140 and lengths.min() < 40
  assert log_prob_errors(built, rollouts).max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["xla", pytest.param("triton", marks=pytest.mark.manual)])
def test_nothing_compiles_after_the_warm_up(attention):
  """The warm-up compiles the inventory, and 20 batches of ragged lengths need nothing else."""
  jax.clear_caches()  # engines share the program that derives keys
  built = build(
    max_tokens=150,
    max_prompt_tokens=160,
    config=dataclasses.replace(CONFIG, head_dim=16),
    engine_config=EngineConfig(slots=8, chunk=16, attention=attention, page_size=32),
  )
  _, engine, layout = built
  ready = []
  workload = Workload(6, 4, SamplingParams())
  found = reachable(engine.programs, [workload])
  jax.random.key(0)  # what the test itself needs
  start = compile_count()
  warm_up(engine.programs, layout, [workload], lambda: ready.append(compile_count()))
  before = compile_count()
  assert before - start == len(found)
  assert len(ready) == len(found) and ready == sorted(ready)
  rng = np.random.default_rng(0)
  longest = 0
  for step in range(20):
    prompts = [rng.integers(12, 48, rng.integers(1, 161)).tolist() for _ in range(6)]
    longest = max(longest, sample(built, prompts, key=step, group=4).mask.sum(-1).max())
  assert longest > 100 and compile_count() == before
  if attention != "xla":  # other batches, also greedy ones, use the same programs
    sample(built, RAGGED_PROMPTS[:6], group=4, temperature=0.0)
    sample(built, RAGGED_PROMPTS[:6], group=4, temperature=0.3)
    assert compile_count() == before


# --- number formats ---


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kv_dtype", "bound"), [pytest.param("bfloat16", 0.02, marks=pytest.mark.manual), ("int8", 0.04)]
)
def test_smaller_caches_are_close(kv_dtype, bound):
  built = build(engine_config=EngineConfig(chunk=2, kv_dtype=kv_dtype))
  error = log_prob_errors(built, sample(built, RAGGED_PROMPTS, group=6)).mean()
  assert 1e-4 < error < bound  # close, but not exact


@pytest.mark.slow
def test_bfloat16_compute_is_close():
  built = build(config=dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
  assert log_prob_errors(built, sample(built, RAGGED_PROMPTS, group=6)).mean() < 0.05


# --- edge cases ---


def test_keys_do_not_depend_on_the_size_of_the_batch(built):
  engine = built[1]
  many = engine.completion_keys(jax.random.key(0), 30, 50)  # more than are derived at once
  np.testing.assert_array_equal(many[:3, :4], engine.completion_keys(jax.random.key(0), 3, 4))
  expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 29), 49)
  np.testing.assert_array_equal(many[29, 49], jax.random.key_data(expected))


def test_no_prompts_give_no_completions(built):
  rollouts = sample(built, [], group=3)
  assert rollouts.tokens.shape == (0, 0, 10) and rollouts.prompts.tokens.shape == (0, 6)


def test_prompts_that_nearly_fill_the_context():
  config = dataclasses.replace(CONFIG, context=8)
  built = build(config=config, stop=(), max_prompt_tokens=9)
  prompts = [[5] * 8, [5] * 7, [5] * 2, [5]]
  _, engine, layout = built
  rows = engine.completions(prompts, engine.completion_keys(jax.random.key(0), 4, 2))
  ended = [places(x) for x in engine.generate(layout, rows, sampling_params=SamplingParams())]
  assert ended[0] == [(0, 0), (0, 1)]
  assert sorted(itertools.chain(*ended)) == [(i, j) for i in range(4) for j in range(2)]
  rollouts = sample(built, prompts, group=2)
  assert rollouts.mask.sum(-1).tolist() == [[0, 0], [1, 1], [6, 6], [7, 7]]
  assert not rollouts.finished.any()
  with pytest.raises(UserError, match="a prompt has 9 tokens, over the model's context of 8"):
    sample(built, [[5] * 9])


def test_completions_of_one_token():
  cut_off = sample(build(max_tokens=1, stop=()), RAGGED_PROMPTS, group=3)
  assert cut_off.mask.sum(-1).tolist() == [[1] * 3] * 11
  every_token_stops = sample(build(stop=range(48)), RAGGED_PROMPTS, key=0, group=3)
  assert (every_token_stops.mask.sum(-1) == 1).all() and every_token_stops.finished.all()


def test_a_caller_that_raises_leaves_the_engine_usable(built):
  slow = build(engine_config=EngineConfig(slots=4, chunk=2))
  _, engine, layout = slow
  keys = engine.completion_keys(jax.random.key(4), len(RAGGED_PROMPTS), 6)
  stream = engine.generate(
    layout, engine.completions(RAGGED_PROMPTS, keys), sampling_params=SamplingParams()
  )
  with pytest.raises(ZeroDivisionError):
    for step, _ in enumerate(stream):
      1 / (3 - step)
  assert_same(sample(slow, RAGGED_PROMPTS, group=6), sample(built, RAGGED_PROMPTS, group=6))
