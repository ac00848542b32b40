"""The compiled sampling loop, against the trainer's view of the same tokens and against its own promises."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.errors import UserError
from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.parallel import make_mesh, single_device_mesh
from gtpo_jax.sampling.engine import Engine, pad_prompts
from gtpo_jax.sampling.filters import Sampler
from gtpo_jax.training.head import score

CONFIG = ModelConfig(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
STOP, PAD = (7, 11), 3
PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]


def build(mesh=None):
  model = Qwen2(CONFIG, mesh or single_device_mesh())
  params = init_params(Qwen2(CONFIG, single_device_mesh()), jax.random.key(0))
  params = jax.tree.map(lambda x, like: jax.device_put(x * 4, like.sharding), params, abstract_params(model))
  return model, params, Engine(model, STOP, PAD, max_prompt_tokens=6, max_tokens=10)


@pytest.fixture(scope="module")
def built():
  return build()


@pytest.fixture(scope="module")
def sampled(built):
  _, params, engine = built
  return engine.sample(engine.layout(params), PROMPTS, jax.random.key(4), group=5, sampler=Sampler())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_equal_the_trainers(built, temperature):
  model, params, engine = built
  rollouts = engine.sample(engine.layout(params), PROMPTS, jax.random.key(0), group=6,
                           sampler=Sampler(temperature=temperature, top_k=20, top_p=0.95, min_p=0.01))
  log_probs, entropy = score(model, params, rollouts.prompts, rollouts.tokens, temperature, 64)
  mask = np.asarray(rollouts.mask)
  assert mask.sum() > 100 and np.asarray(rollouts.entropy)[mask].min() >= 0
  assert np.abs(np.asarray(log_probs - rollouts.log_probs))[mask].max() <= 1e-4
  assert np.abs(np.asarray(entropy - rollouts.entropy))[mask].max() <= 1e-4


def test_a_completion_ends_with_its_stop_token(sampled):
  tokens, mask, finished = (np.asarray(x) for x in (sampled.tokens, sampled.mask, sampled.finished))
  assert finished.any() and not finished.all()
  for row, alive, done in zip(tokens.reshape(-1, 10), mask.reshape(-1, 10), finished.ravel(), strict=True):
    length = alive.sum()
    assert alive[:length].all() and length >= 1
    assert not set(row[:length - 1]) & set(STOP)
    assert (row[length - 1] in STOP) == done  # the stop token is sampled, masked in and so trained
    assert done or length == 10
    assert (row[length:] == PAD).all()


def test_outside_the_mask_there_is_nothing(sampled):
  mask = np.asarray(sampled.mask)
  assert (np.asarray(sampled.log_probs)[~mask] == 0).all() and (np.asarray(sampled.entropy)[~mask] == 0).all()


def test_a_completion_depends_on_its_key_and_prompt_alone(built, sampled):
  _, params, engine = built
  layout = engine.layout(params)
  fewer = engine.sample(layout, PROMPTS[:2], jax.random.key(4), group=3, sampler=Sampler())
  np.testing.assert_array_equal(fewer.tokens, sampled.tokens[:2, :3])
  other_neighbour = engine.sample(layout, [PROMPTS[0], [17, 17, 17]], jax.random.key(4), group=3, sampler=Sampler())
  np.testing.assert_array_equal(other_neighbour.tokens[0], fewer.tokens[0])
  assert (np.asarray(other_neighbour.tokens[1]) != np.asarray(fewer.tokens[1])).any()


def test_keys_differ_by_step_prompt_and_completion(built):
  _, params, engine = built
  layout = engine.layout(params)
  draw = lambda key: np.asarray(engine.sample(layout, [PROMPTS[0]] * 3, key, group=4, sampler=Sampler()).tokens)
  first = draw(jax.random.key(0))
  assert len({row.tobytes() for row in first.reshape(12, -1)}) > 9
  np.testing.assert_array_equal(first, draw(jax.random.key(0)))
  assert (first != draw(jax.random.key(1))).any()


def test_greedy_is_the_argmax_of_a_full_forward_pass(built):
  model, params, engine = built
  rollouts = engine.sample(engine.layout(params), PROMPTS, jax.random.key(0), group=1, sampler=Sampler(temperature=0.0))
  for prompt, row, mask in zip(PROMPTS, np.asarray(rollouts.tokens[:, 0]), np.asarray(rollouts.mask[:, 0]), strict=True):
    text = [*prompt, *row[mask]]
    logits = np.asarray(model.apply({"params": params}, jnp.asarray([text])))[0]
    np.testing.assert_array_equal(logits.argmax(-1)[len(prompt) - 1:-1], row[mask])


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_eight_devices_sample_the_same(sampled, shape):
  _, params, engine = build(make_mesh(*shape))
  rollouts = engine.sample(engine.layout(params), PROMPTS, jax.random.key(4), group=5, sampler=Sampler())  # 4 prompts on 8 or 4 shards
  np.testing.assert_array_equal(rollouts.tokens, sampled.tokens)
  np.testing.assert_allclose(rollouts.log_probs, sampled.log_probs, atol=1e-5)
  np.testing.assert_allclose(rollouts.entropy, sampled.entropy, atol=1e-5)


def test_frequencies_follow_the_distribution(built):
  model, params, engine = built
  engine = Engine(model, (), PAD, max_prompt_tokens=6, max_tokens=1)
  rollouts = engine.sample(engine.layout(params), [PROMPTS[2]], jax.random.key(9), group=4000, sampler=Sampler(temperature=2.0))
  want = np.asarray(jax.nn.softmax(model.apply({"params": params}, jnp.asarray([PROMPTS[2]]))[0, -1] / 2.0))
  got = np.bincount(np.asarray(rollouts.tokens).ravel(), minlength=48) / 4000
  assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / 4000)
  rows = (want * 4000 > 5)
  chi_square = (np.square(got - want)[rows] / want[rows]).sum() * 4000
  assert chi_square < rows.sum() + 4 * np.sqrt(2 * rows.sum())


def test_bad_prompts_are_refused():
  with pytest.raises(UserError, match="a prompt is empty"):
    pad_prompts([[1], []], 4, PAD)
  with pytest.raises(UserError, match="5 tokens, over the limit of 4"):
    pad_prompts([[1, 2, 3, 4, 5]], 4, PAD)
  padded = pad_prompts([[1, 2], [9]], 4, PAD)
  np.testing.assert_array_equal(padded.tokens, [[3, 3, 1, 2], [3, 3, 3, 9]])
  np.testing.assert_array_equal(padded.mask, [[False, False, True, True], [False, False, False, True]])
