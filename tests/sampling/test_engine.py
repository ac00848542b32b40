"""The engine, against the trainer's view of the same tokens and against its own promises."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, PAD, STOP, build

from gtpo_jax.reporting.compiles import compile_count
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.sampling.engine import lengths, pad_prompts
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import EngineConfig
from gtpo_jax.training.head import score

PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]


@pytest.fixture(scope="module")
def built():
  return build()


def drawn(built, prompts=PROMPTS, key=4, group=5, **settings):
  _, engine, layout = built
  return engine.sample(
    layout, prompts, jax.random.key(key), group=group, sampling_params=SamplingParams(**settings)
  )


@pytest.fixture(scope="module")
def sampled(built):
  return drawn(built)


def trainers_view(built, rollouts, temperature=1.0):
  params, engine, _ = built
  return score(
    engine.model,
    params,
    *shard_batch((rollouts.prompts, rollouts.tokens), engine.model.mesh),
    temperature,
    64,
  )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_equal_the_trainers(built, temperature):
  rollouts = drawn(built, key=0, group=6, temperature=temperature, top_k=20, top_p=0.95, min_p=0.01)
  log_probs, entropy = trainers_view(built, rollouts, temperature)
  mask = rollouts.mask
  assert mask.sum() > 100 and np.asarray(rollouts.entropy)[mask].min() >= 0
  assert np.abs(np.asarray(log_probs - rollouts.log_probs))[mask].max() <= 1e-4
  assert np.abs(np.asarray(entropy - rollouts.entropy))[mask].max() <= 1e-4


def test_a_completion_ends_with_its_stop_token(sampled):
  tokens, mask, finished = (np.asarray(x) for x in (sampled.tokens, sampled.mask, sampled.finished))
  assert finished.any() and not finished.all()
  for row, alive, done in zip(
    tokens.reshape(-1, 10), mask.reshape(-1, 10), finished.ravel(), strict=True
  ):
    length = alive.sum()
    assert alive[:length].all() and length >= 1
    assert not set(row[: length - 1]) & set(STOP)
    assert (row[length - 1] in STOP) == done  # the stop token is sampled, masked in and so trained
    assert done or length == 10
    assert (row[length:] == PAD).all()


def test_outside_the_mask_there_is_nothing(sampled):
  mask = np.asarray(sampled.mask)
  assert (np.asarray(sampled.log_probs)[~mask] == 0).all() and (
    np.asarray(sampled.entropy)[~mask] == 0
  ).all()


def test_a_completion_depends_on_its_key_and_prompt_alone(built, sampled):
  fewer = drawn(built, PROMPTS[:2], group=3)
  np.testing.assert_array_equal(fewer.tokens, sampled.tokens[:2, :3])
  other_neighbour = drawn(built, [PROMPTS[0], [17, 17, 17]], group=3)
  np.testing.assert_array_equal(other_neighbour.tokens[0], fewer.tokens[0])
  assert (other_neighbour.tokens[1] != fewer.tokens[1]).any()


def test_keys_differ_by_step_prompt_and_completion(built):
  draw = lambda key: drawn(built, [PROMPTS[0]] * 3, key, group=4).tokens
  first = draw(0)
  assert len({row.tobytes() for row in first.reshape(12, -1)}) > 9
  np.testing.assert_array_equal(first, draw(0))
  assert (first != draw(1)).any()


def test_greedy_is_the_argmax_of_a_full_forward_pass(built):
  params, engine, _ = built
  rollouts = drawn(built, group=1, temperature=0.0)
  for prompt, row, mask in zip(PROMPTS, rollouts.tokens[:, 0], rollouts.mask[:, 0], strict=True):
    text = [*prompt, *row[mask]]
    logits = np.asarray(engine.model.apply({"params": params}, jnp.asarray([text])))[0]
    np.testing.assert_array_equal(logits.argmax(-1)[len(prompt) - 1 : -1], row[mask])


# --- slots, seats, mesh ---

MANY = [[int(w) for w in np.random.default_rng(i).integers(12, 48, 1 + i % 6)] for i in range(11)]


@pytest.fixture(scope="module")
def many(built):
  """66 completions, all side by side."""
  rollouts = drawn(built, MANY, group=6)
  assert (
    rollouts.mask.sum(-1).min() == 1
    and rollouts.mask.sum(-1).max() == 10
    and 0.2 < rollouts.finished.mean() < 0.95
  )
  return rollouts


def assert_same(rollouts, want):
  np.testing.assert_array_equal(rollouts.tokens, want.tokens)
  np.testing.assert_array_equal(rollouts.mask, want.mask)
  np.testing.assert_array_equal(rollouts.finished, want.finished)
  np.testing.assert_allclose(rollouts.log_probs, want.log_probs, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(rollouts.entropy, want.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("slots", "chunk"), [(1, 4), (4, 4), (4, 1), (16, 3), (64, 10)])
def test_slots_and_chunks_do_not_matter(slots, chunk, many):
  """Refilled slots, queues of every length, chunks that end early: the same completions."""
  assert_same(
    drawn(build(engine_config=EngineConfig(slots=slots, chunk=chunk)), MANY, group=6), many
  )


@pytest.mark.parametrize(
  ("mesh", "slots"),
  [
    ((8, 1, 1), 16),
    ((2, 2, 2), 64),
    ((1, 4, 2), 4),
    ((1, 2, 2, None, 2), 16),
    ((1, 2, 1, None, 4), 16),
  ],
)
def test_the_mesh_does_not_matter(mesh, slots, many):
  assert_same(
    drawn(build(make_mesh(*mesh), engine_config=EngineConfig(slots=slots, chunk=4)), MANY, group=6),
    many,
  )


@pytest.mark.parametrize("slots", [3, 64])
def test_refilled_slots_and_shared_prompts_agree_with_the_trainer(slots):
  built = build(engine_config=EngineConfig(slots=slots, chunk=3))
  rollouts = drawn(built, MANY, group=6, temperature=0.8)
  log_probs, entropy = trainers_view(built, rollouts, 0.8)
  assert np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask].max() <= 1e-4
  assert np.abs(np.asarray(entropy) - rollouts.entropy)[rollouts.mask].max() <= 1e-4


def test_one_completion_alone_is_the_same(built, many):
  _, engine, layout = built
  alone = engine.sample(
    layout, MANY[:1], jax.random.key(4), group=1, sampling_params=SamplingParams()
  )
  np.testing.assert_array_equal(alone.tokens[0, 0], many.tokens[0, 0])


def test_long_completions_grow_their_cache_and_shed_slots():
  """Through every length that arrays are made for, and from many slots to few: against the trainer's full forward pass."""
  built = build(longest=300, stop=(7,), engine_config=EngineConfig(slots=8, chunk=16))
  rollouts = drawn(built, MANY[:3], group=4, key=1)
  found = rollouts.mask.sum(-1)
  assert found.max() > 140 and found.min() < 40
  log_probs, _ = trainers_view(built, rollouts)
  assert np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask].max() <= 1e-4


def test_nothing_compiles_after_the_warm_up():
  """Ragged prompts and completions, 20 batches of them, through every length and number of slots."""
  built = build(longest=150, stop=(7, 11), prompt=80, engine_config=EngineConfig(slots=8, chunk=16))
  _, engine, layout = built
  engine.warm_up(layout, 6, group=4, sampling_params=SamplingParams())
  drawn(built, MANY[:6], group=4)  # the keys
  before = compile_count()
  rng = np.random.default_rng(0)
  longest = 0
  for step in range(20):
    prompts = [rng.integers(12, 48, rng.integers(1, 81)).tolist() for _ in range(6)]
    longest = max(longest, drawn(built, prompts, key=step, group=4).mask.sum(-1).max())
  assert longest > 100 and compile_count() == before


@pytest.mark.parametrize(("mesh", "kept"), [((1, 1, 1), "float32"), ((2, 2, 2), "float32")])
def test_the_tpu_kernel_samples_the_same(mesh, kept, many):
  """Interpreted. Caches of two blocks, some of them empty."""
  devices = jax.devices()[: math.prod(mesh)]
  built = build(
    make_mesh(*mesh, devices),
    engine_config=EngineConfig(slots=16, chunk=4, kv_dtype=kept, attention="pallas"),
  )
  assert_same(drawn(built, MANY, group=6), many)


def test_the_gpu_kernel_agrees_with_the_trainer():
  """Interpreted."""
  built = build(
    config=dataclasses.replace(CONFIG, head_dim=16),
    engine_config=EngineConfig(slots=6, chunk=4, attention="triton"),
  )
  rollouts = drawn(built)
  log_probs, _ = trainers_view(built, rollouts)
  assert np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask].max() <= 1e-4


# --- what is kept of keys and values ---


@pytest.mark.parametrize(("kept", "most"), [("bfloat16", 0.02), ("int8", 0.04)])
def test_smaller_caches_are_near(kept, most):
  built = build(engine_config=EngineConfig(chunk=2, kv_dtype=kept))
  rollouts = drawn(built, MANY, group=6)
  log_probs, _ = trainers_view(built, rollouts)
  error = np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask]
  assert 1e-4 < error.mean() < most, error.mean()  # not exact, and not far


def test_bfloat16_compute_is_near():
  built = build(config=dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
  rollouts = drawn(built, MANY, group=6)
  log_probs, _ = trainers_view(built, rollouts)
  assert np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask].mean() < 0.05


# --- what else is reported, and the penalty ---


@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_log_probs_of_what_was_drawn_and_of_the_plain_model(penalty):
  """In slots that are refilled: a repetition penalty sees this prompt and this completion, and nothing else."""
  params, engine, layout = build(engine_config=EngineConfig(slots=3, chunk=4))
  sampling_params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=penalty)
  *_, (buffer, _) = engine.generate(
    layout, PROMPTS, jax.random.key(0), group=4, sampling_params=sampling_params
  )
  forward = jax.jit(lambda tokens: engine.model.apply({"params": params}, tokens))
  for i, prompt in enumerate(PROMPTS):
    for tokens, mask, drawn_, plain in zip(
      buffer.tokens[i],
      buffer.mask[i],
      buffer.drawn_log_probs[i],
      buffer.plain_log_probs[i],
      strict=True,
    ):
      words = tokens[mask]
      text = [*prompt, *tokens]
      logits = np.asarray(forward(jnp.asarray([text + [PAD] * (16 - len(text))])), np.float64)[
        0, len(prompt) - 1 :
      ]
      for at, word in enumerate(words):
        policy = np.exp(logits[at])
        shown = logits[at].copy()
        seen = [*prompt, *words[:at]]
        shown[seen] = np.where(shown[seen] > 0, shown[seen] / penalty, shown[seen] * penalty)
        kept = np.where(shown >= np.sort(shown)[-5], np.exp(shown / 0.7), 0)
        np.testing.assert_allclose(plain[at], np.log(policy[word] / policy.sum()), atol=1e-4)
        np.testing.assert_allclose(drawn_[at], np.log(kept[word] / kept.sum()), atol=1e-4)


# --- at the borders ---


def test_no_prompts_no_completions(built):
  rollouts = drawn(built, [], group=3)
  assert rollouts.tokens.shape == (0, 3, 10) and rollouts.prompts.tokens.shape == (0, 6)


def test_a_prompt_that_leaves_little_of_the_context_or_nothing():
  config = dataclasses.replace(CONFIG, context=8)
  built = build(config=config, stop=(), prompt=9)
  prompts = [[5] * 8, [5] * 7, [5] * 2, [5]]
  _, engine, layout = built
  parts = [
    ended
    for _, ended in engine.generate(
      layout, prompts, jax.random.key(0), group=2, sampling_params=SamplingParams()
    )
  ]
  assert parts[0] == [(0, 0), (0, 1)] and sorted(itertools.chain(*parts)) == [
    (i, j) for i in range(4) for j in range(2)
  ]
  rollouts = drawn(built, prompts, group=2)
  assert (
    rollouts.mask.sum(-1).tolist() == [[0, 0], [1, 1], [6, 6], [7, 7]]
    and not rollouts.finished.any()
  )
  with pytest.raises(UserError, match="a prompt has 9 tokens, over the model's context of 8"):
    drawn(built, [[5] * 9])


def test_completions_of_one_token(built):
  assert drawn(build(longest=1, stop=()), MANY, group=3).mask.sum(-1).tolist() == [[1] * 3] * 11
  _, engine, layout = build(stop=range(48))  # whatever is drawn first ends it
  rollouts = engine.sample(
    layout, MANY, jax.random.key(0), group=3, sampling_params=SamplingParams()
  )
  assert (rollouts.mask.sum(-1) == 1).all() and rollouts.finished.all()


def test_a_caller_that_raises_leaves_the_engine_whole(built, many):
  _, engine, layout = build(engine_config=EngineConfig(slots=4, chunk=2))
  with pytest.raises(ZeroDivisionError):
    for step, _ in enumerate(
      engine.generate(layout, MANY, jax.random.key(4), group=6, sampling_params=SamplingParams())
    ):
      1 / (3 - step)
  assert_same(
    engine.sample(layout, MANY, jax.random.key(4), group=6, sampling_params=SamplingParams()), many
  )


def test_lengths_that_arrays_are_made_for():
  assert (
    lengths(10) == [10]
    and lengths(64) == [64]
    and lengths(128) == [64, 128]
    and lengths(80) == [80]
  )
  assert lengths(600) == [64, 128, 256, 600] and lengths(1024) == [64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"slots": -1}, "slots"),
    ({"chunk": -2}, "chunk"),
    ({"kv_dtype": "int4"}, "'int4'"),
    ({"attention": "flash"}, "'flash'"),
  ],
)
def test_limits_that_cannot_be_are_refused(settings, words):
  with pytest.raises(UserError, match=words):
    EngineConfig(**settings)


def test_limits_by_the_machine():
  assert EngineConfig().on("cpu", 2) == EngineConfig(128, 16, "", "xla") and EngineConfig().on(
    "tpu", 4
  ) == EngineConfig(1024, 64, "", "pallas")
  assert (
    EngineConfig(8, 4, "int8", "xla").on("tpu", 4) == EngineConfig(8, 4, "int8", "xla")
    and EngineConfig().on("gpu", 1).attention == "xla"
  )
  with pytest.raises(UserError, match="a TPU kernel, and this is gpu"):
    EngineConfig(attention="pallas").on("gpu", 1)
  with pytest.raises(UserError, match="a GPU kernel, and this is tpu"):
    EngineConfig(attention="triton").on("tpu", 1)
  assert EngineConfig(attention="triton").on("gpu", 1).attention == "triton"
  with pytest.raises(UserError, match="a power of two from 16, not 8"):
    build(engine_config=EngineConfig(attention="triton"))


def test_frequencies_follow_the_distribution(built):
  params, engine, _ = built
  rollouts = drawn(
    build(longest=1, stop=(), engine_config=EngineConfig(slots=1000)),
    [PROMPTS[2]],
    group=4000,
    key=9,
    temperature=2.0,
  )
  want = np.asarray(
    jax.nn.softmax(engine.model.apply({"params": params}, jnp.asarray([PROMPTS[2]]))[0, -1] / 2.0)
  )
  got = np.bincount(np.asarray(rollouts.tokens).ravel(), minlength=48) / 4000
  assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / 4000)
  rows = want * 4000 > 5
  chi_square = (np.square(got - want)[rows] / want[rows]).sum() * 4000
  assert chi_square < rows.sum() + 4 * np.sqrt(2 * rows.sum())


def test_bad_prompts_are_refused():
  with pytest.raises(UserError, match="a prompt is empty"):
    pad_prompts([[1], []], 4, PAD)
  with pytest.raises(UserError, match="5 tokens, over the limit of 4"):
    pad_prompts([[1, 2, 3, 4, 5]], 4, PAD)
  padded = pad_prompts([[1, 2], [9]], 4, PAD)
  np.testing.assert_array_equal(padded.tokens, [[3, 3, 1, 2], [3, 3, 3, 9]])
  np.testing.assert_array_equal(
    padded.mask, [[False, False, True, True], [False, False, False, True]]
  )
