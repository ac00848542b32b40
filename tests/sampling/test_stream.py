"""Completions as they are written: prefixes of what `sample` gives for the same key."""
import jax
import numpy as np
import pytest

from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.parallel import make_mesh, single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import Sampler

CONFIG = ModelConfig(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
STOP, PAD, LONGEST = (7, 11, 13), 3, 10
PROMPT = [5, 9, 1]


def build(mesh):
  model = Qwen2(CONFIG, mesh)
  params = init_params(Qwen2(CONFIG, single_device_mesh()), jax.random.key(0))
  params = jax.tree.map(lambda x, like: jax.device_put(x * 4, like.sharding), params, abstract_params(model))
  engine = Engine(model, STOP, PAD, max_prompt_tokens=6, max_tokens=LONGEST)
  return engine, engine.layout(params)


@pytest.fixture(scope="module")
def built():
  return build(single_device_mesh())


def both(built, *, key=4, group=3, chunk=4, **settings):
  engine, layout = built
  sampler, key = Sampler(**settings), jax.random.key(key)
  whole = jax.device_get(engine.sample(layout, [PROMPT], key, group=group, sampler=sampler))
  return whole, [jax.device_get(part) for part in engine.stream(layout, PROMPT, key, group=group, sampler=sampler, chunk=chunk)]


def assert_prefix(part, whole, until):
  """What is written before `until` is that of the whole; behind it there is nothing yet."""
  np.testing.assert_array_equal(part.tokens[..., :until], whole.tokens[..., :until])
  np.testing.assert_array_equal(part.mask[..., :until], whole.mask[..., :until])
  np.testing.assert_allclose(part.log_probs[..., :until], whole.log_probs[..., :until], atol=1e-5)
  np.testing.assert_allclose(part.entropy[..., :until], whole.entropy[..., :until], atol=1e-5)
  assert not part.mask[..., until:].any() and (part.tokens[..., until:] == PAD).all()
  assert not part.log_probs[..., until:].any() and not part.entropy[..., until:].any()
  ended = whole.finished & (whole.mask.sum(-1) <= until)
  np.testing.assert_array_equal(part.finished, ended)


@pytest.mark.parametrize("chunk", [1, 3, 99])
def test_each_part_is_a_prefix_of_the_whole(chunk, built):
  whole, parts = both(built, chunk=chunk)
  assert whole.tokens.shape == (1, 3, LONGEST) and len({row.tobytes() for row in whole.tokens[0]}) == 3
  for i, part in enumerate(parts):
    assert_prefix(part, whole, min((i + 1) * chunk, LONGEST))
  np.testing.assert_array_equal(parts[-1].tokens, whole.tokens)
  np.testing.assert_array_equal(parts[-1].finished, whole.finished)


@pytest.mark.parametrize(("group", "settings"), [(1, {"temperature": 0.0}), (5, {"temperature": 0.7, "top_k": 8, "top_p": 0.9})])
def test_other_groups_and_samplers(group, settings, built):
  whole, parts = both(built, group=group, **settings)
  for i, part in enumerate(parts):
    assert_prefix(part, whole, min((i + 1) * 4, LONGEST))
  np.testing.assert_array_equal(parts[-1].tokens, whole.tokens)


def test_it_stops_when_all_are_done(built):
  """Nothing is yielded after the last completion has ended."""
  engine, layout = built
  draw = lambda key: engine.sample(layout, [PROMPT], jax.random.key(key), group=1, sampler=Sampler())
  lengths = {key: int(draw(key).mask.sum()) for key in range(30)}
  early, late = min(lengths, key=lengths.get), max(lengths, key=lengths.get)
  assert lengths[early] < 5 and lengths[late] == LONGEST
  whole, parts = both(built, key=early, group=1, chunk=2)
  assert len(parts) == -(-int(whole.mask.sum()) // 2) < LONGEST // 2
  assert parts[-1].finished.all() and not any(part.finished.any() for part in parts[:-1])
  _, parts = both(built, key=late, group=1, chunk=2)
  assert len(parts) == LONGEST // 2


def test_eight_devices_stream_the_same(built):
  whole, _ = both(built)
  engine, layout = build(make_mesh(2, 2, 2))
  for i, part in enumerate(engine.stream(layout, PROMPT, jax.random.key(4), group=3, sampler=Sampler())):
    assert part.tokens.shape == whole.tokens.shape
    assert_prefix(jax.device_get(part), whole, min((i + 1) * 4, LONGEST))


def test_what_was_yielded_stays_readable(built):
  """The loop's buffers are given away to the next part; what the caller holds must not be among them."""
  engine, layout = built
  parts = list(engine.stream(layout, PROMPT, jax.random.key(4), group=3, sampler=Sampler(), chunk=1))
  assert len(parts) > 2
  for part in parts:
    jax.tree.map(np.asarray, part)
