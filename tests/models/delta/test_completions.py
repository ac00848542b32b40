"""Completions of models with gated delta nets: after their prompts, packed, and on devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from toys import TOY, strong

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import Transformer
from gtpo_jax.models.kinds import DELTA, DeltaSizes, LayerKind
from gtpo_jax.models.params import abstract_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.training.packing import plan_rows

N, G, P, T = 2, 4, 9, 70
CONFIG = dataclasses.replace(
  TOY,
  model_type="qwen3_5_text",
  biases=(),
  rope_share=0.25,
  norm_eps=1e-2,
  kinds=(LayerKind(mixer=DELTA), LayerKind()),
  delta=DeltaSizes(key_heads=2, value_heads=6, key_dim=8, value_dim=5, taps=4),
)


@functools.cache
def built(mesh=None):
  """A model and its parameters, of the same values on every mesh."""
  return strong(CONFIG, mesh)


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  prompts = Prompts(jnp.asarray(rng.integers(0, 48, (N, P))), jnp.asarray([P, 3]))
  lengths = np.asarray([[60, 1, 22, 30], [50, 18, 2, 3]])
  return prompts, jnp.asarray(rng.integers(0, 48, (N, G, T))), lengths


def hidden(model, params, packing, t=T):
  prompts, completions, _ = inputs()
  out = model.apply({"params": params}, prompts, completions, packing, method="completion_hidden")
  if packing is not None:
    out = jax.vmap(packing.unpack, (-1, None), -1)(out, t)
  return out


def loss(params, model, packing, weights):
  return (hidden(model, params, packing) * weights).sum()


@functools.cache
def weights():
  """Weights f32[n, g, t, d] of the hidden states: 0 after the end of a completion."""
  lengths = inputs()[2]
  noise = np.random.default_rng(1).normal(size=(N, G, T, CONFIG.width))
  return jnp.float32(noise * (np.arange(T) < lengths[..., None])[..., None])


@pytest.mark.slow
def test_a_completion_is_what_follows_its_prompt():
  model, params = built()
  prompts, completions, _ = inputs()
  got = jax.jit(hidden, static_argnums=(0, 2))(model, params, None)
  for i, j in ((0, 1), (1, 2)):
    prompt = prompts.tokens[i, P - prompts.lengths[i] :]
    tokens = jnp.concatenate([prompt, completions[i, j, :-1]])
    one = lambda params, tokens: model.apply({"params": params}, tokens)
    want = jax.jit(one)(params, tokens[None])[0, len(prompt) - 1 :]
    logits = model.apply({"params": params}, got[i, j], method="logits")
    scale = np.abs(want).max()
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.slow
def test_packed_completions_have_the_same_states_and_gradients(begins):
  """Their segments begin within chunks of the rule, and with `begins` there are several of each."""
  model, params = built()
  lengths = inputs()[2]
  starts = None
  plain = None
  if begins:
    starts = np.minimum(np.asarray([[[0, 5, 21]] * G] * N), T)
    starts = np.where(starts < np.maximum(lengths, 1)[..., None], starts, T)
    plain = plan_rows(lengths, T, begins=starts, share=False)
  packing = plan_rows(lengths, T, begins=starts)
  assert packing.segment is not None and packing.source.shape[1] < G
  both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  want = both(params, model, plain, weights())
  got = both(params, model, packing, weights())
  compare = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
  jax.tree.map(compare, got, want)


@pytest.mark.devices
@pytest.mark.slow
def test_four_devices_compute_the_same_gradients():
  want = jax.jit(jax.grad(loss), static_argnums=1)(built()[1], built()[0], None, weights())
  model, params = built(mesh_of(1, 2, 1, 2))
  packing = plan_rows(inputs()[2], T)
  got = jax.jit(jax.grad(loss), static_argnums=1)(params, model, packing, weights())
  compare = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
  jax.tree.map(compare, got, want)


@pytest.mark.devices
def test_a_mesh_that_splits_positions_or_heads_in_parts_is_refused():
  with pytest.raises(UserError, match=r"mesh\.context = 2 divides the positions of a sequence"):
    abstract_params(Transformer(CONFIG, mesh_of(1, 1, 2, 1)))
  odd = dataclasses.replace(CONFIG, delta=DeltaSizes(3, 6, 8, 5, 4))
  with pytest.raises(UserError, match="heads axis of 3 does not divide over 2 shards"):
    abstract_params(Transformer(odd, mesh_of(1, 1, 1, 2)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"delta": None}, "the sizes of gated delta nets do not fit the layers"),
    ({"kinds": (LayerKind(),)}, "the sizes of gated delta nets do not fit the layers"),
    ({"kinds": (LayerKind(mixer=DELTA),)}, "a model needs a layer with attention"),
    ({"delta": DeltaSizes(2, 3, 8, 5, 4)}, "gated delta nets cannot have these sizes"),
    ({"rope_share": 0.1}, "must be even for rotary positions, got 8, of which 0.1 are rotated"),
    ({"model_type": "qwen3"}, "qwen3 models have no layers of such kinds"),
  ],
)
def test_what_no_model_has_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(CONFIG, **changes)
