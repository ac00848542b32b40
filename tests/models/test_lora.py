"""Fresh adapters do not change the outputs, and merging adapters does not change them either."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import ALPHA, RANK, SOME, adapted, base, is_adapter, on_mesh_of, with_lora
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import our_greedy, our_logits, padded_batch
from meshes import mesh_of

from gtpo_jax.models import Transformer, abstract_params, init_params, lora
from gtpo_jax.models.config import LORA_TARGETS, Lora
from gtpo_jax.models.lora import add_lora, combine, partition, without_lora
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh

merge_lora = jax.jit(lora.merge_lora, static_argnums=0)


def test_fresh_adapters_change_nothing_and_keep_the_base():
  plain, params = base()
  model = with_lora(plain)
  fresh = add_lora(model, params, jax.random.key(1))
  trained, frozen = partition(model, fresh)
  jax.tree.map(np.testing.assert_array_equal, frozen, params)
  flat = flatten_dict(trained)
  assert len(flat) == 14 and all(is_adapter(path) for path in flat)
  for path, x in flat.items():
    assert x.dtype == jnp.float32 and np.any(np.asarray(x)) == (path[-1] == "lora_a"), path
  assert flat["layers", "o", "lora_a"].shape == (2, 4, 8, RANK) and flat[
    "layers", "o", "lora_b"
  ].shape == (2, RANK, 32)
  assert flat["layers", "k", "lora_b"].shape == (2, RANK, 2, 8)
  tokens, mask = padded_batch()
  np.testing.assert_allclose(
    our_logits(model, fresh, tokens, mask), our_logits(plain, params, tokens, mask), atol=1e-6
  )


@pytest.mark.devices
@pytest.mark.slow
def test_the_same_key_gives_the_same_adapters_on_every_mesh():
  plain, params = base()
  wide = with_lora(plain, mesh_of(2, 2, 1, 2))
  one = add_lora(with_lora(plain), params, jax.random.key(1))
  eight = add_lora(wide, on_mesh_of(params, without_lora(wide)), jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(eight))
  jax.tree.map(
    lambda x, like: x.sharding == like.sharding or pytest.fail(f"{x.sharding} {like.sharding}"),
    eight,
    abstract_params(wide),
  )


def test_rank_zero_has_nothing_to_add_split_or_merge():
  plain, params = base()
  assert add_lora(plain, params, jax.random.key(0)) is params
  assert lora.merge_lora(plain, params) is params
  assert partition(plain, params) == (params, {}) and combine(params, {}) is params
  assert not any(map(is_adapter, flatten_dict(abstract_params(plain))))


@pytest.mark.parametrize("targets", [LORA_TARGETS, SOME, ("k", "o", "gate")])
@pytest.mark.some(1, slow=0)
def test_merged_matrices_compute_the_same_as_adapters(targets):
  model, params = adapted(targets)
  tokens, mask = padded_batch()
  with_adapters = our_logits(model, params, tokens, mask)
  merged = merge_lora(model, params)
  assert jax.tree.structure(merged) == jax.tree.structure(base()[1])
  np.testing.assert_allclose(
    our_logits(without_lora(model), merged, tokens, mask)[mask],
    with_adapters[mask],
    rtol=1e-5,
    atol=1e-5,
  )
  assert np.abs(with_adapters - our_logits(*base(), tokens, mask))[mask].max() > 0.5
  changed = {
    path[1]
    for path, x in flatten_dict(merged).items()
    if np.any(np.asarray(x != flatten_dict(base()[1])[path]))
  }
  assert changed == set(targets)


def test_merging_by_hand():
  model, params = adapted()
  layer = jax.device_get(params["layers"]["o"])
  want = (
    layer["kernel"][1].reshape(32, 32)
    + ALPHA / RANK * layer["lora_a"][1].reshape(32, RANK) @ layer["lora_b"][1]
  )
  np.testing.assert_allclose(
    merge_lora(model, params)["layers"]["o"]["kernel"][1].reshape(32, 32),
    want,
    rtol=1e-5,
    atol=1e-6,
  )


def test_merging_in_half_precision_rounds_once():
  model, params = adapted()
  half = with_lora(base()[0], param_dtype="bfloat16", compute_dtype="bfloat16")
  low = unflatten_dict(
    {
      path: x if is_adapter(path) else x.astype(jnp.bfloat16)
      for path, x in flatten_dict(params).items()
    }
  )
  exact = merge_lora(model, jax.tree.map(lambda x: x.astype(jnp.float32), low))
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(
      np.asarray(x, "float32"), np.asarray(y.astype(jnp.bfloat16), "float32")
    ),
    merge_lora(half, low),
    exact,
  )


def test_sampling_merges_the_adapters():
  model, params = adapted()
  prompts = [[5, 9, 1], [2]]
  merged = our_greedy(without_lora(model), merge_lora(model, params), prompts, 12)
  np.testing.assert_array_equal(our_greedy(model, params, prompts, 12), merged)
  assert (merged != our_greedy(*base(), prompts, 12)).any()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"rank": -1}, "model.lora_rank must be at least 0, got -1"),
    ({"rank": 4, "alpha": 0.0}, "model.lora_alpha must be above 0"),
    ({"rank": 4, "alpha": float("nan")}, "above 0 and finite, got nan"),
    ({"rank": 4, "alpha": float("inf")}, "above 0 and finite"),
    ({"rank": 4, "targets": ()}, "model.lora_targets is empty"),
    ({"rank": 4, "targets": ("q", "dwn")}, "'dwn', did you mean 'down'"),
    ({"rank": 4, "targets": ("q_proj",)}, "names 'q_proj'"),
  ],
)
def test_bad_values_are_rejected(settings, message):
  with pytest.raises(UserError, match=message):
    Lora(**settings)


def test_adapters_from_scratch_add_zero():
  model = with_lora(base()[0])
  params = init_params(model, jax.random.key(0))
  assert not any(
    np.any(np.asarray(x)) for path, x in flatten_dict(params).items() if path[-1] == "lora_b"
  )
  bound = 1 / np.sqrt(32)
  a = np.asarray(params["layers"]["o"]["lora_a"])
  assert bound * 0.9 < np.abs(a).max() <= bound  # fan in: heads x head_dim
  assert without_lora(Transformer(model.config, single_device_mesh())).config.lora.rank == 0
