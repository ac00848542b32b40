"""Mixtures of experts: every form of the products against a loop over tokens, and the router."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models import ModelConfig, Transformer, init_params, save_adapter
from gtpo_jax.models.config import Lora
from gtpo_jax.models.experts import module, products
from gtpo_jax.models.experts.products import experts_output, plan_rows
from gtpo_jax.models.experts.routing import (
  RouteShape,
  expert_shares,
  no_route,
  route,
  routes_of_inputs,
)
from gtpo_jax.models.kinds import LayerKind, Mixture
from gtpo_jax.models.layers import Matrix
from gtpo_jax.models.params import quantize_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh

D, F, EXPERTS, K = 8, 6, 5, 2
SIZES = {"vocab_size": 48, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
# Tokens, platform, and the blocks that are multiplied at a time.
FORMS = {
  "gathered": (2, "gpu", 64),
  "blocks": (41, "cpu", 64),
  "blocks in parts": (42, "cpu", 5),
  "grouped": (41, "tpu", 64),
  "grouped in parts": (42, "tpu", 5),
}


def cases(t):
  """Choices i32[t, 2] of five experts: random ones, all of the same two, and those in order."""
  rng = np.random.default_rng(0)
  random = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(t)])
  in_order = np.arange(t)[:, None] * EXPERTS // t
  return [random, np.tile([3, 1], (t, 1)), np.concatenate([in_order, (in_order + 1) % 5], 1)]


def matrices(experts, rank=0):
  rng = np.random.default_rng(1)
  normal = lambda *shape: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

  def matrix(inputs, outputs):
    adapter = (normal(experts, inputs, rank), normal(experts, rank, outputs)) if rank else ()
    return Matrix(normal(experts, inputs, outputs), None, *adapter)

  return matrix(D, F), matrix(D, F), matrix(F, D)


def slow(x, weights, ids, kernels):
  """The weighted sum of the outputs of the chosen experts, token by token, in float64."""
  gate, up, down = (np.asarray(kernel, np.float64) for kernel in kernels)
  out = np.zeros(x.shape, np.float64)
  for t, chosen in enumerate(ids):
    for j, e in enumerate(chosen):
      if 0 <= e < len(gate):
        h = x[t].astype(np.float64) @ gate[e]
        out[t] += weights[t, j] * ((h / (1 + np.exp(-h)) * (x[t] @ up[e])) @ down[e])
  return out


@functools.partial(jax.jit, static_argnums=(0, 5))
def computed(platform, x, weights, ids, kernels, lora_scale=0.0):
  rows = plan_rows(ids, len(kernels[0].kernel), platform)
  return experts_output(x, weights, rows, kernels, nn.silu, "highest", lora_scale)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_equals_a_loop_over_tokens(form, monkeypatch):
  t, platform, at_a_time = FORMS[form]
  monkeypatch.setattr(products, "BLOCKS_AT_A_TIME", at_a_time)
  kernels = matrices(EXPERTS)
  rng = np.random.default_rng(2)
  x = rng.normal(size=(t, D)).astype(np.float32)
  weights = rng.random((t, K)).astype(np.float32)
  for ids in cases(t):
    rows = plan_rows(jnp.asarray(ids), EXPERTS, platform)
    assert (rows.sizes is not None) == (platform == "tpu")
    want = slow(x, weights, ids, [matrix.kernel for matrix in kernels])
    got = computed(platform, x, weights, ids, kernels)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    # Two devices with three and two experts add what the experts of each of them contribute.
    shard = lambda cut: [Matrix(matrix.kernel[cut]) for matrix in kernels]
    parts = [
      computed(platform, x, weights, ids - first, shard(slice(first, end)))
      for first, end in ((0, 3), (3, 5))
    ]
    np.testing.assert_allclose(parts[0] + parts[1], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_gradient_of_all_experts_with_zero_weights(form, monkeypatch):
  """With weights for all experts, 0 for those that were not chosen, nothing has to be moved."""
  t, platform, at_a_time = FORMS[form]
  monkeypatch.setattr(products, "BLOCKS_AT_A_TIME", at_a_time)
  kernels = matrices(EXPERTS, rank=3)
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(t, D)), jnp.float32)
  weights = jnp.asarray(rng.random((t, K)), jnp.float32)
  ids = jnp.asarray(cases(t)[0])
  probe = jnp.asarray(rng.normal(size=(t, D)), jnp.float32)

  def dense(x, weights, kernels):
    full = jnp.zeros((t, EXPERTS)).at[jnp.arange(t)[:, None], ids].add(weights)
    merged = [m.kernel + 0.5 * m.lora_a @ m.lora_b for m in kernels]
    product = functools.partial(jnp.einsum, precision="highest")
    hidden = nn.silu(product("td,edf->tef", x, merged[0])) * product("td,edf->tef", x, merged[1])
    return product("te,tef,efd->td", full, hidden, merged[2])

  loss = lambda f: lambda *arguments: (probe * f(*arguments)).sum()
  ours = lambda x, weights, kernels: computed(platform, x, weights, ids, kernels, 0.5)
  want = jax.jit(jax.grad(loss(dense), (0, 1, 2)))(x, weights, kernels)
  got = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(x, weights, kernels)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=3e-5 * np.abs(w).max())


def test_parts_of_tokens_change_neither_outputs_nor_gradients(monkeypatch):
  settings = {"mlp": 48, "model_type": "qwen2_moe", "kinds": (LayerKind(mlp="experts"),)}
  config = ModelConfig(**SIZES | {"layers": 1}, **settings, mixture=Mixture(5, 2, 24, True))
  model = Transformer(config, single_device_mesh())
  params = init_params(model, jax.random.key(0))
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (3, 11)))
  loss = lambda p: jnp.square(model.apply({"params": p}, tokens)).sum()
  outputs = lambda: jax.jit(jax.value_and_grad(loss))(params)
  want = outputs()
  monkeypatch.setattr(module, "PART_BYTES", 8 * 2 * 32 * 4)  # eight tokens, so five parts of seven
  for g, w in zip(jax.tree.leaves(outputs()), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * np.abs(w).max())


def test_a_cpu_computes_about_as_many_rows_as_there_are_choices():
  """`ragged_dot` computes every row with every matrix there; blocks are padded by a quarter."""
  rows = plan_rows(jnp.zeros((600, 2), jnp.int32), 8, "cpu")
  assert 1200 <= rows.to_rows.size <= 1500
  assert len(rows.blocks.experts) <= 64  # so all of them are multiplied at once
  flops = lambda platform: (
    computed.lower(platform, *jax.tree.map(jnp.asarray, inputs)).compile().cost_analysis()["flops"]
  )
  inputs = (np.zeros((600, D), np.float32), np.ones((600, 2), np.float32))
  inputs += (np.zeros((600, 2), np.int32), matrices(8))
  assert flops("tpu") > 4 * flops("cpu")


def test_the_router_chooses_the_largest_and_replays_what_was_recorded():
  logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
  mixture = Mixture(4, 2, 8)
  own = route(logits, mixture)
  assert own.ids.tolist() == [[0, 1], [3, 2]]
  np.testing.assert_allclose(own.weights, [[0.5, 0.3], [0.4, 0.3]], rtol=1e-6)
  entropy = -sum(p * np.log(p) for p in (0.5, 0.3, 0.15, 0.05))
  np.testing.assert_allclose(own.statistics.entropy[0], entropy, rtol=1e-6)
  recorded = jnp.asarray([[1, 2], [255, 255]], jnp.uint8)  # nothing was recorded of the second
  replayed = route(logits, mixture, recorded)
  assert replayed.ids.tolist() == [[1, 2], [3, 2]]
  np.testing.assert_allclose(replayed.weights, [[0.3, 0.15], [0.4, 0.3]], rtol=1e-6)
  assert replayed.statistics.differs.tolist() == [1.0, 0.0]
  other_order = route(logits, mixture, jnp.asarray([[1, 0], [2, 3]], jnp.uint8))
  assert other_order.statistics.differs.tolist() == [0.0, 0.0]
  compared = route(logits, mixture, recorded, replay=False)
  assert (compared.ids.tolist(), compared.statistics.differs.tolist()) == (
    own.ids.tolist(),
    [1.0, 0.0],
  )
  weights = route(logits, Mixture(4, 2, 8, normalised=True), recorded).weights
  np.testing.assert_allclose(weights, [[2 / 3, 1 / 3], [4 / 7, 3 / 7]], rtol=1e-6)


def test_the_balance_is_one_for_equal_shares_and_its_gradient_is_that_of_the_probabilities():
  ids = jnp.asarray([[[[[0, 1]], [[2, 3]], [[255, 255]]]]], jnp.uint8)  # [n, g, t, layers, k]
  mask = jnp.asarray([[[True, True, True]]])
  equal = expert_shares(ids, mask, 4)
  assert equal.tolist() == [[0.25] * 4]
  assert expert_shares(ids, mask.at[0, 0, 1].set(False), 4).tolist() == [[0.5, 0.5, 0, 0]]
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
  mixture = Mixture(4, 2, 8)
  balance = lambda logits, shares: route(logits, mixture, shares=shares).statistics.balance
  np.testing.assert_allclose(balance(logits, equal[0]), 1.0, rtol=1e-6)
  shares = jnp.asarray([0.7, 0.1, 0.1, 0.1])
  p = np.asarray(jax.nn.softmax(logits, -1), np.float64)
  np.testing.assert_allclose(balance(logits, shares), 4 * p @ np.asarray(shares), rtol=1e-5)
  got = jax.grad(lambda x: balance(x, shares).mean())(logits)
  mean = (p * np.asarray(shares)).sum(-1, keepdims=True)
  np.testing.assert_allclose(got, 4 * p * (np.asarray(shares) - mean) / 7, rtol=0, atol=1e-7)


def test_the_inputs_of_completions_are_those_of_the_tokens_before_them():
  prompt = jnp.asarray([[[[9]], [[5]]]], jnp.uint8)  # [n, p, layers, k]
  routes = jnp.asarray([[[[[1]], [[2]], [[3]], [[4]]]]], jnp.uint8)  # [n, g, t, layers, k]
  assert routes_of_inputs(prompt, routes).ravel().tolist() == [5, 1, 2, 3]
  places = jnp.asarray([[[0, 1, 0, 1]]])
  assert routes_of_inputs(prompt, routes, places).ravel().tolist() == [5, 1, 5, 3]


def test_choices_are_stored_in_the_fewest_bytes_that_also_say_none():
  dtypes = [RouteShape(3, 2, experts).dtype for experts in (8, 255, 256, 60000)]
  assert [dtype.name for dtype in dtypes] == ["uint8"] * 2 + ["uint16"] * 2
  assert [no_route(dtype) for dtype in dtypes] == [255, 255, 65535, 65535]
  assert RouteShape(3, 2, 8).empty(1).tolist() == [[[255, 255]] * 3]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixture": None}, "layers with experts need a mixture"),
    ({"model_type": "qwen3", "biases": ()}, "qwen3 models have no layers of such kinds"),
    ({"model_type": "olmoe", "biases": (), "kinds": (LayerKind(), LayerKind(mlp="experts"))}, "no"),
    ({"clip_qkv": 1.0}, "qwen2_moe models have no clip_qkv, got 1.0"),
    ({"lora": Lora(4, targets=("gate",)), "mixture": Mixture(5, 2, 8)}, "add experts"),
  ],
)
def test_a_mixture_that_no_model_has_is_refused(changes, message):
  settings = {"model_type": "qwen2_moe", "kinds": (LayerKind(mlp="experts"),)}
  settings |= {"mixture": Mixture(5, 2, 8, shared=4)}
  with pytest.raises(UserError, match=message):
    ModelConfig(**SIZES, mlp=48, **settings | changes)


def test_the_sizes_of_a_mixture_are_checked():
  for sizes, message in (
    ((4, 5, 8), "computed by 5 experts, but there are only 4"),
    ((0, 1, 8), "mixture.experts must be at least 1, got 0"),
    ((2**16, 1, 8), "at most 65535 experts, got 65536"),
    ((4, 2, 8, False, -1), "mixture.shared must be at least 0, got -1"),
  ):
    with pytest.raises(UserError, match=message):
      Mixture(*sizes)
  with pytest.raises(UserError, match="the mlp of a layer must be dense or experts, got 'moe'"):
    LayerKind(mlp="moe")
  with pytest.raises(UserError, match="lora_targets names experts, but the model has none"):
    ModelConfig(**SIZES, mlp=48, lora=Lora(4, targets=("q", "experts")))


@pytest.mark.slow
def test_int8_experts_are_near_and_the_router_is_not_quantised():
  config = ModelConfig(
    **SIZES,
    mlp=48,
    model_type="qwen2_moe",
    kinds=(LayerKind(mlp="experts"),),
    mixture=Mixture(5, 2, 24, True, 16),
  )
  model = Transformer(config, single_device_mesh())
  params = jax.tree.map(lambda x: 4 * x, init_params(model, jax.random.key(0)))
  int8 = Transformer(dataclasses.replace(config, quantize="int8"), single_device_mesh())
  base = jax.jit(functools.partial(quantize_params, int8))(params)
  experts = base["layers"]["experts"]
  assert experts["gate"]["kernel"].dtype == experts["shared_up"]["kernel"].dtype == jnp.int8
  assert experts["gate"]["kernel_scale"].shape == (2, EXPERTS, 1, 24)  # layers, experts, groups
  assert experts["router"]["kernel"].dtype == jnp.float32
  for length in (1, 9):  # gathered, and in blocks
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (1, length)))
    want = np.asarray(jax.jit(model.apply)({"params": params}, tokens))
    got = np.asarray(jax.jit(int8.apply)({"params": base}, tokens))
    assert 0 < np.abs(got - want).mean() < 0.05 * np.abs(want).mean()


def test_adapters_of_experts_beside_a_shared_one_are_not_saved_for_peft(tmp_path):
  config = ModelConfig(
    **SIZES,
    mlp=48,
    model_type="qwen2_moe",
    kinds=(LayerKind(mlp="experts"),),
    mixture=Mixture(5, 2, 24, True, 16),
    lora=Lora(2, targets=("q", "experts")),
  )
  model = Transformer(config, single_device_mesh())
  with pytest.raises(UserError, match="PEFT would apply the adapters of the experts too"):
    save_adapter(model, {}, tmp_path / "out", "base")
