"""Adapters: nothing at first, trained alone, merged exactly, and read by PEFT."""

import dataclasses
import functools
import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import hf_folder, our_greedy, our_logits, padded_batch, raw_tensors, torch_logits

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import Qwen2, init_params, load, save, save_adapter
from gtpo_jax.models.lora import add_lora, combine, merge_lora, partition, without_lora
from gtpo_jax.models.presets import LORA_TARGETS, Lora
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh, shard_batch, single_device_mesh
from gtpo_jax.training.head import score
from gtpo_jax.training.state import OptimizerConfig, abstract_state, init_state, make_optimizer
from gtpo_jax.training.update import make_update

RANK, ALPHA = 3, 7.5
SOME = ("q", "down")
N = 8
G = 4
T = 6
OPTIMIZER = OptimizerConfig(
  learning_rate=1e-2, eps=1.0, weight_decay=0.1, clip_norm=1e9
)  # a large eps keeps Adam near linear


def with_lora(model, mesh=None, targets=LORA_TARGETS, **changes):
  return Qwen2(
    dataclasses.replace(model.config, lora=Lora(RANK, ALPHA, targets), **changes),
    mesh or model.mesh,
  )


@functools.cache
def base():
  """The plain model and its parameters, from a folder of transformers."""
  return load(hf_folder()[0], "float32")


@functools.cache
def adapted(targets=LORA_TARGETS):
  """With adapters that are random on both sides."""
  model = with_lora(base()[0], targets=targets)
  flat = flatten_dict(add_lora(model, base()[1], jax.random.key(1)))
  keys = dict(zip(flat, jax.random.split(jax.random.key(2), len(flat)), strict=True))
  return model, unflatten_dict(
    {
      path: 0.2 * jax.random.normal(keys[path], x.shape) if path[-1] == "lora_b" else x
      for path, x in flat.items()
    }
  )


def is_adapter(path):
  return path[-1] in ("lora_a", "lora_b")


def placed(params, model):
  return jax.tree.map(
    lambda x, like: jax.device_put(jax.device_get(x), like.sharding), params, abstract_params(model)
  )


# What they are.


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


def test_the_same_key_gives_the_same_adapters_on_every_mesh():
  plain, params = base()
  wide = with_lora(plain, make_mesh(2, 2, 2))
  one = add_lora(with_lora(plain), params, jax.random.key(1))
  eight = add_lora(wide, placed(params, without_lora(wide)), jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(eight))
  jax.tree.map(
    lambda x, like: x.sharding == like.sharding or pytest.fail(f"{x.sharding} {like.sharding}"),
    eight,
    abstract_params(wide),
  )


def test_without_a_rank_there_is_nothing_to_add_part_or_merge():
  plain, params = base()
  assert (
    add_lora(plain, params, jax.random.key(0)) is params and merge_lora(plain, params) is params
  )
  assert partition(plain, params) == (params, {}) and combine(params, {}) is params
  assert not any(map(is_adapter, flatten_dict(abstract_params(plain))))


@pytest.mark.parametrize("targets", [LORA_TARGETS, SOME, ("k", "o", "gate")])
def test_the_merged_matrices_compute_what_the_adapters_do(targets):
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
def test_bad_values_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    Lora(**settings)


# Training.


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  prompts = Prompts(
    jnp.asarray(rng.integers(0, 64, (N, 5)), jnp.int32),
    jnp.asarray(rng.integers(1, 6, N), jnp.int32),
  )
  tokens = jnp.asarray(rng.integers(0, 64, (N, G, T)), jnp.int32)
  model, params = adapted()
  log_probs, entropy = score(model, params, prompts, tokens, 1.0, 64)
  mask = np.arange(T) < rng.integers(1, T + 1, (N, G, 1))
  correct = rng.random((N, G)) < 0.5
  correct[:, 0], correct[:, 1] = True, False
  noise = rng.normal(0, 0.1, (N, G, T)).astype(np.float32)
  rollouts = Rollouts(
    prompts,
    tokens,
    jnp.asarray(mask),
    jnp.where(mask, log_probs + noise, 0),
    jnp.where(mask, entropy, 0),
    jnp.asarray(mask.sum(-1) < T),
  )
  return jax.device_get(
    (rollouts, Rewards(correct, correct.astype(np.float32), np.zeros((N, G), np.float32)))
  )


@functools.cache
def trained(shape=None, micro_batches=1, kept="float32", targets=LORA_TARGETS):
  """(before, after, moments, metrics) of two updates, on the host."""
  model = with_lora(base()[0], make_mesh(*shape) if shape else None, targets, param_dtype=kept)
  params = unflatten_dict(
    {
      path: x if is_adapter(path) else x.astype(kept)
      for path, x in flatten_dict(adapted(targets)[1]).items()
    }
  )
  optimizer = make_optimizer(OPTIMIZER, 10)
  update = make_update(
    model, algorithms.make("gtpo"), optimizer, micro_batches=micro_batches, head_chunk=64
  )
  state = init_state(placed(params, model), optimizer, model)
  for _ in range(2):
    state, metrics = update(state, *shard_batch(batch(), model.mesh))
  return jax.device_get((params, state.params, state.opt_state, metrics))


@pytest.mark.parametrize(
  "settings",
  [{}, {"kept": "bfloat16"}, {"targets": SOME}, {"shape": (2, 2, 2), "micro_batches": 2}],
  ids=["f32", "bf16", "some", "2x2x2"],
)
def test_the_adapters_are_trained_alone(settings):
  before, after, _, metrics = trained(**settings)
  assert metrics["grad_norm"] > 1e-3
  before = flatten_dict(before)
  after = flatten_dict(after)
  assert before.keys() == after.keys()
  for path in before:
    assert (np.asarray(before[path]).tobytes() != np.asarray(after[path]).tobytes()) == is_adapter(
      path
    ), path


def test_the_optimizer_remembers_the_adapters_alone():
  before, _, moments, _ = trained()
  size = sum(x.size for path, x in flatten_dict(before).items() if is_adapter(path))
  assert sum(x.size for x in jax.tree.leaves(moments) if x.ndim) == 2 * size
  model = with_lora(base()[0])
  like = abstract_state(model, make_optimizer(OPTIMIZER, 10))
  assert jax.tree.structure(like.opt_state) == jax.tree.structure(moments)
  assert {x.dtype for x in jax.tree.leaves(trained(kept="bfloat16")[2]) if x.ndim} == {
    np.dtype("float32")
  }


@pytest.mark.parametrize(("shape", "micro_batches"), [(None, 4), ((2, 2, 2), 2)])
def test_the_update_is_the_same_however_it_is_cut(shape, micro_batches):
  _, want, _, metrics = trained()
  _, got, _, also = trained(shape, micro_batches)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), want, got)
  assert also["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4) and also[
    "loss"
  ] == pytest.approx(metrics["loss"], abs=1e-5)


def test_the_gradient_is_that_of_the_merged_matrices():
  """The chain rule by hand: dA = s W' B^T and dB = s A^T W', where W' is the gradient of the merged matrix."""
  model, params = adapted()
  tokens, _ = padded_batch()
  loss = lambda model, params: jnp.square(
    model.apply({"params": params}, jnp.asarray(tokens))
  ).mean()
  whole = jax.grad(lambda p: loss(without_lora(model), p))(merge_lora(model, params))
  part = jax.grad(lambda p: loss(model, p))(params)
  for name in LORA_TARGETS:
    layer = params["layers"][name]
    d = whole["layers"][name]["kernel"]
    a = layer["lora_a"].reshape(2, -1, RANK)
    b = layer["lora_b"].reshape(2, RANK, -1)
    d = d.reshape(2, a.shape[1], b.shape[2])
    got = part["layers"][name]
    np.testing.assert_allclose(
      got["lora_a"].reshape(a.shape), ALPHA / RANK * d @ b.mT, rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
      got["lora_b"].reshape(b.shape), ALPHA / RANK * a.mT @ d, rtol=1e-3, atol=1e-4
    )


# Folders.


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT about names of transformers
@pytest.mark.parametrize("targets", [LORA_TARGETS, SOME])
def test_peft_loads_the_adapters_and_computes_our_logits(targets, tmp_path):
  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  model, params = adapted(targets)
  save_adapter(model, params, tmp_path / "out", str(hf_folder()[0]), {"README.md": "# card"})
  assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
    "README.md",
    "SHA256SUMS",
    "adapter_config.json",
    "adapter_model.safetensors",
  ]
  reference = transformers.Qwen2ForCausalLM.from_pretrained(
    hf_folder()[0], attn_implementation="eager", local_files_only=True
  )
  loaded = peft.PeftModel.from_pretrained(reference, tmp_path / "out").eval()
  tokens, mask = padded_batch()
  want = our_logits(model, params, tokens, mask)[mask]
  np.testing.assert_allclose(torch_logits(loaded, tokens, mask)[mask], want, rtol=0, atol=2e-4)
  named = {name for name, _ in loaded.named_parameters() if "lora_" in name}
  assert (
    len(named) == 2 * 2 * len(targets) == len(raw_tensors(tmp_path / "out"))
  )  # a matrix that PEFT adds by itself would be silent
  config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == str(hf_folder()[0]) and len(
    config["target_modules"]
  ) == len(targets)
  np.testing.assert_allclose(
    torch_logits(loaded.merge_and_unload(), tokens, mask)[mask], want, rtol=0, atol=2e-4
  )


def test_the_merged_folder_computes_our_logits(tmp_path):
  transformers = pytest.importorskip("transformers")
  model, params = adapted()
  save(model, params, None, tmp_path / "out")
  again, read = load(tmp_path / "out", "float32")
  assert again.config == base()[0].config
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(read),
    jax.device_get(jax.jit(lambda p: merge_lora(model, p))(params)),
  )
  reference = transformers.Qwen2ForCausalLM.from_pretrained(
    tmp_path / "out", attn_implementation="eager", local_files_only=True
  ).eval()
  tokens, mask = padded_batch()
  np.testing.assert_allclose(
    torch_logits(reference, tokens, mask)[mask],
    our_logits(model, params, tokens, mask)[mask],
    rtol=0,
    atol=2e-4,
  )


def test_a_sharded_adapter_is_saved_as_on_one_device(tmp_path):
  model, params = adapted()
  wide = with_lora(base()[0], make_mesh(2, 2, 2))
  save_adapter(model, params, tmp_path / "one", "base")
  save_adapter(wide, placed(params, wide), tmp_path / "eight", "base")
  assert (tmp_path / "one" / "SHA256SUMS").read_text() == (
    tmp_path / "eight" / "SHA256SUMS"
  ).read_text()
  assert (
    subprocess.run(
      ["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "one", capture_output=True
    ).returncode
    == 0
  )


def test_adapters_that_are_not_there_or_have_no_place(tmp_path):
  with pytest.raises(UserError, match=r"has no adapters \(model.lora_rank = 0\)"):
    save_adapter(*base(), tmp_path / "out", "base")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "x").touch()
  with pytest.raises(UserError, match="holds something already"):
    save_adapter(*adapted(), tmp_path / "full", "base")
  assert [file.name for file in tmp_path.iterdir()] == ["full"]


def test_adapters_from_scratch_begin_as_nothing():
  model = with_lora(base()[0])
  params = init_params(model, jax.random.key(0))
  assert not any(
    np.any(np.asarray(x)) for path, x in flatten_dict(params).items() if path[-1] == "lora_b"
  )
  bound = 1 / np.sqrt(32)
  a = np.asarray(params["layers"]["o"]["lora_a"])
  assert bound * 0.9 < np.abs(a).max() <= bound  # fan in: heads x head_dim
  assert without_lora(Qwen2(model.config, single_device_mesh())).config.lora.rank == 0
