"""The model against transformers on torch, and its forward passes against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import PRESETS, ModelConfig, Transformer, init_params
from gtpo_jax.models.attention.rope import rotate_new
from gtpo_jax.models.attention.sources import KV, MaskedKV, merge_partials, partial_attention
from gtpo_jax.models.attention.streams import ropes_at
from gtpo_jax.models.decode import decode_step, make_decode_params, next_logits, prefill
from gtpo_jax.models.layers import gated
from gtpo_jax.models.params import abstract_params, param_shardings
from gtpo_jax.models.transformer import ACTIVATIONS
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh

SMALL = ModelConfig(vocab_size=96, width=48, layers=3, heads=6, kv_heads=2, head_dim=8, mlp=64)


def small_model(**changes):
  return Transformer(dataclasses.replace(SMALL, **changes), single_device_mesh())


def strong_params(model, seed=0):
  """Random parameters, also of biases and norms, large enough that every part matters."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x * 2 + 0.1 * rng.standard_normal(x.shape, np.float32),
    jax.device_get(init_params(model, jax.random.key(seed))),
  )


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def apply(model, params, *inputs, method=None):
  """The compiled `model.apply`."""
  return model.apply({"params": params}, *inputs, method=method)


def test_completion_hidden_equals_a_plain_forward_pass():
  model = small_model()
  params = strong_params(model)
  rng = np.random.default_rng(1)
  prompt = rng.integers(0, 96, (2, 7))
  completions = rng.integers(0, 96, (2, 3, 5))
  lengths = np.array([7, 4])
  prompts = Prompts(prompt, lengths)
  hidden = apply(model, params, prompts, completions, method="completion_hidden")
  logits = apply(model, params, hidden, method="logits")
  for n in range(2):
    own_prompt = np.broadcast_to(prompt[n, 7 - lengths[n] :], (3, lengths[n]))
    rows = np.concatenate([own_prompt, completions[n]], axis=1)
    want = apply(model, params, rows)[:, lengths[n] - 1 : -1]
    np.testing.assert_allclose(logits[n], want, atol=2e-5)


def test_prefill_and_decode_equal_one_forward_pass():
  model = small_model()
  params = strong_params(model)
  rng = np.random.default_rng(2)
  prompts = Prompts(jnp.asarray(rng.integers(0, 96, (3, 6))), jnp.asarray([6, 2, 5]))
  completions = jnp.asarray(rng.integers(0, 96, (3, 2, 4)))
  want = apply(model, params, prompts, completions, method="completion_hidden")
  want = apply(model, params, want, method="logits")

  decode_params = jax.jit(make_decode_params, static_argnums=0)(model, params)
  hidden, prompt_kv, *_ = jax.jit(prefill, static_argnums=0)(model, decode_params, prompts)
  assert prompt_kv[0].k.shape == (3, 1, 2, 8, 6)  # once per prompt, not once per completion
  assert prompt_kv[0].v.shape == (3, 1, 2, 6, 8)

  @jax.jit
  def decode(params, hidden, prompt_kv):
    """The logits of each step, with the layouts of CPU and of other platforms."""
    hidden = jnp.broadcast_to(hidden, (3, 2, 1, 48))
    written = [[] for _ in range(3)]

    def attend(rope, layer, q, new):
      """Attends to the prompt and to a cache that is a list of keys and values."""
      q, new = rotate_new(q, new, rope, 0)
      written[layer].append(new)
      k, v = (
        jnp.concatenate([kv[part] for kv in written[layer]], axis)
        for part, axis in ((0, 4), (1, 3))
      )
      everything = jnp.ones((1, 1, 1, len(written[layer])), bool)
      sources = (
        MaskedKV(prompt_kv[layer], prompts.mask[:, None, None]),
        MaskedKV(KV(k, v), everything),
      )
      partials = [partial_attention(q, source) for source in sources]
      return merge_partials(partials).astype(q.dtype), None

    logits = []
    for i in range(4):
      logits.append(next_logits(model, params, hidden[:, :, 0]))
      positions = jnp.broadcast_to(prompts.lengths[:, None] + i, (3, 2))[..., None]
      (rope,) = ropes_at(positions, model.config).values()
      hidden, *_ = decode_step(model, params, completions[:, :, i], functools.partial(attend, rope))
    return logits

  for i, logits in enumerate(decode(decode_params, hidden, prompt_kv)):
    np.testing.assert_allclose(logits, want[:, :, i], atol=2e-5)


@pytest.mark.devices
@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 1, 4)])
@pytest.mark.some(0, slow=1)
def test_logits_are_the_same_on_eight_devices(shape):
  model = small_model(heads=8, kv_heads=2)
  wide = Transformer(dataclasses.replace(SMALL, heads=8, kv_heads=2), mesh_of(*shape))
  params = strong_params(model)
  placed = jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding), params, abstract_params(wide)
  )
  tokens = np.random.default_rng(3).integers(0, 96, (8, 9))
  want = apply(model, params, tokens)
  got = apply(wide, placed, tokens)
  np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


@pytest.mark.slow
def test_remat_changes_nothing():
  tokens = jnp.asarray(np.random.default_rng(4).integers(0, 96, (2, 9)))
  models = [small_model(remat=remat) for remat in ("none", "products", "attention", "full")]
  params = strong_params(models[0])
  kept, *again = [
    jax.jit(jax.grad(lambda p, m=m: jax.nn.logsumexp(m.apply({"params": p}, tokens)).sum()))(params)
    for m in models
  ]
  for grads in again:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, grads)


def test_decode_params_keep_norms_exact():
  """With bf16 compute, the sampler uses the same float32 norm scales as the trainer."""
  model = small_model(compute_dtype="bfloat16", tied=False)
  params = strong_params(model)
  decode_params = jax.jit(make_decode_params, static_argnums=0)(model, params)
  np.testing.assert_array_equal(decode_params.outer["norm"]["scale"], params["norm"]["scale"])
  np.testing.assert_array_equal(
    decode_params.layers[1]["mlp_norm"]["scale"], params["layers"]["mlp_norm"]["scale"][1]
  )
  assert (
    decode_params.layers[0]["q"]["kernel"].dtype
    == decode_params.outer["head"].dtype
    == jnp.bfloat16
  )


def test_number_formats():
  model = small_model(compute_dtype="bfloat16")
  params = strong_params(model)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  tokens = jnp.asarray(np.random.default_rng(5).integers(0, 96, (2, 9)))
  logits = apply(model, params, tokens)
  assert logits.dtype == jnp.float32
  exact = apply(small_model(), params, tokens)
  gap = np.abs(np.asarray(jax.nn.log_softmax(logits) - jax.nn.log_softmax(exact))).mean()
  assert 0 < gap < 0.1
  half = small_model(param_dtype="bfloat16")
  assert {x.dtype for x in jax.tree.leaves(init_params(half, jax.random.key(0)))} == {
    jnp.dtype("bfloat16")
  }


@pytest.mark.devices
def test_every_parameter_is_laid_out_by_its_axes():
  model = Transformer(PRESETS["tiny"], mesh_of(1, 2, 1, 4))
  specs = {
    jax.tree_util.keystr(path, simple=True, separator="/"): s.spec
    for path, s in jax.tree.leaves_with_path(param_shardings(model))
  }
  P = jax.sharding.PartitionSpec
  assert specs["embedding"] == P(("context", "tensor"), ("expert", "fsdp"))
  assert specs["layers/q/kernel"] == P(None, ("expert", "fsdp", "context"), "tensor", None)
  # Two heads do not divide over four shards, so they are replicated.
  assert specs["layers/k/kernel"] == P(None, ("expert", "fsdp", "context"), None, None)
  assert specs["layers/down/kernel"] == P(None, "tensor", ("expert", "fsdp", "context"))
  with pytest.raises(UserError, match="heads axis of 4 does not divide over 8"):
    param_shardings(Transformer(PRESETS["tiny"], mesh_of(1, 1, 1, 8)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"heads": 5}, "multiple of model.kv_heads, got 5 and 2"),
    ({"head_dim": 7}, "even for rotary positions, got 7"),
    ({"layers": 0}, "model.layers must be at least 1, got 0"),
    ({"compute_dtype": "float8"}, "one of .*'float8'"),
  ],
)
def test_impossible_architectures_are_rejected(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradients_of_a_gated_product_are_exact_and_keep_two_arrays(name, dtype):
  activation = ACTIVATIONS[name]
  gate, up, d_out = jax.random.normal(jax.random.key(0), (3, 4, 5), dtype) * 3
  plain, plain_gradients = jax.vjp(lambda gate, up: activation(gate) * up, gate, up)
  actual, gradients = jax.vjp(functools.partial(gated, activation), gate, up)
  np.testing.assert_array_equal(actual, plain)
  assert sum(x.size for x in jax.tree.leaves(gradients)) == gate.size + up.size
  for x, y in zip(gradients(d_out), plain_gradients(d_out), strict=True):
    np.testing.assert_array_equal(x, y)
