"""The gradients of all losses against jax.grad of the written sums, and torch's."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TOY

from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.config import Lora
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.serving.requests import ApiError
from gtpo_jax.tinker.datum_batches import divide, loss_begins, prompt_width
from gtpo_jax.tinker.losses import SETTINGS, make_loss
from gtpo_jax.tinker.models import StepSettings, make_programs
from gtpo_jax.tinker.wire import Datum

MODEL = Transformer(dataclasses.replace(TOY, lora=Lora(4)), single_device_mesh())
CONFIGS = {
  "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
  "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
  "dro": {"beta": 0.3},
  "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
}


def written(name, config, xp, log_probs, x):
  """The protocol's formula of a sequence's loss, for jax.numpy and for torch."""
  clip = xp.clip
  stop = jax.lax.stop_gradient if xp is jnp else lambda y: y.detach()
  low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
  if name == "cross_entropy":
    return -(x["weights"] * log_probs).sum()
  advantages = x["advantages"]
  ratio = xp.exp(log_probs - x["logprobs"])
  if name == "importance_sampling":
    return -(ratio * advantages).sum()
  if name == "ppo":
    return -xp.minimum(ratio * advantages, clip(ratio, low, high) * advantages).sum()
  if name == "cispo":
    return -(stop(clip(ratio, low, high)) * log_probs * advantages).sum()
  if name == "dro":
    penalty = config["beta"] / 2 * (log_probs - x["logprobs"]) ** 2
    return -(log_probs * advantages - penalty).sum()
  mask = x["sequence_ratio_mask"]
  mean = ((log_probs - x["logprobs"]) * mask).sum() / mask.sum()
  ratio = xp.exp(mean)
  return -xp.minimum(ratio * advantages, clip(ratio, low, high) * advantages).sum()


def make_data(name):
  """Two sequences with one prompt, one with a longer one, and one all of whose tokens count."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, 48, 7)
  data = []
  for i, (begin, length) in enumerate([(6, 12), (6, 9), (20, 60), (0, 5)]):
    tokens = rng.integers(0, 48, length)
    if i < 2:
      tokens[: begin + 1] = prompt
    paid = np.arange(length) >= begin
    draw = lambda: (rng.normal(size=length) * paid).astype(np.float32)  # noqa: B023
    if name == "cross_entropy":
      inputs = {"weights": draw()}
    else:
      inputs = {"advantages": draw(), "logprobs": -3.8 * paid + 0.3 * draw()}
      inputs["sequence_ratio_mask"] = paid.astype(np.float32)
    targets = np.append(tokens[1:], rng.integers(0, 48)).astype(np.int32)
    targets[:begin] = 0  # as recipes do
    inputs = {key: x.astype(np.float32) for key, x in inputs.items()}
    data.append(Datum(tokens.astype(np.int32), targets, inputs, None))
  return data


@pytest.fixture(scope="module")
def params():
  params = init_params(MODEL, jax.random.key(0))
  fresh = lambda path, x: x + 0.1 * jax.random.normal(jax.random.key(len(str(path))), x.shape)
  return jax.tree_util.tree_map_with_path(fresh, params)  # B of an adapter would be 0


def run(name, data, params):
  loss = make_loss(name, CONFIGS.get(name, {}))
  programs = make_programs(MODEL)
  trained, frozen = partition(MODEL, params)
  grads = programs.zeros()
  begins = [0 if name == "dro" else loss_begins(datum) for datum in data]
  total = 0.0
  log_probs = [np.zeros(len(datum.tokens)) for datum in data]
  for rows, places in divide(data, begins, loss, 1, 0, "cpu"):
    grads, scores = programs.accumulate(trained, frozen, grads, rows, per_token=loss.per_token)
    total += float(scores.loss)
    for index, i, j in places:
      length = len(data[index].tokens) - begins[index]
      log_probs[index][begins[index] :] = scores.log_probs[i, j, :length]
  return total, grads, log_probs, begins


def all_log_probs(params, datum):
  logits = MODEL.apply({"params": params}, datum.tokens[None])[0]
  every = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(every, jnp.asarray(datum.targets)[:, None], -1)[:, 0]


@pytest.mark.some(1, slow=5)
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_written_sums(name, params):
  data = make_data(name)
  config = SETTINGS[name] | CONFIGS.get(name, {})
  total, grads, log_probs, begins = run(name, data, params)
  trained, frozen = partition(MODEL, params)

  def reference(trained):
    policy = combine(trained, frozen)
    return sum(written(name, config, jnp, all_log_probs(policy, x), x.inputs) for x in data)

  value, expected = jax.jit(jax.value_and_grad(reference))(trained)
  assert total == pytest.approx(float(value), rel=1e-5, abs=1e-4)
  flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
  error = np.abs(flat(grads) - flat(expected)).max()
  assert error < 1e-5 * np.abs(flat(expected)).max()
  for datum, begin, found in zip(data, begins, log_probs, strict=True):
    every = all_log_probs(params, datum)
    np.testing.assert_allclose(found[begin:], every[begin:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing")
@pytest.mark.parametrize("name", SETTINGS)
def test_derivatives_in_log_probs_are_those_of_torch(name):
  import torch

  from gtpo_jax.tinker.datum_batches import FIELDS
  from gtpo_jax.tinker.losses import PER_TOKEN, LossInputs, sequence_loss, token_losses

  config = SETTINGS[name] | CONFIGS.get(name, {})
  loss = make_loss(name, config)
  rng = np.random.default_rng(1)
  x = {key: rng.normal(size=9).astype(np.float32) for key in ("weights", "advantages")}
  x["logprobs"] = rng.uniform(-3, -1, 9).astype(np.float32)
  x["sequence_ratio_mask"] = np.ones(9, np.float32)
  point = (x["logprobs"] + rng.normal(size=9) / 4).astype(np.float32)
  of_torch = torch.tensor(point, requires_grad=True)
  tensors = {key: torch.tensor(value) for key, value in x.items()}
  written(name, config, torch, of_torch, tensors).backward()
  fill = lambda value: np.full((1, 1, 9), value, np.float32)
  arrays = (x[key].reshape(1, 1, 9) for key in FIELDS)
  kind = PER_TOKEN.index(name) if loss.per_token else 0
  settings = map(fill, (kind, loss.low, loss.high, loss.beta))
  inputs = LossInputs(fill(1), *arrays, *settings)
  call = lambda y: token_losses(y, y, inputs) if loss.per_token else sequence_loss(y, inputs)
  found = jax.grad(call)(point.reshape(1, 1, 9))
  np.testing.assert_allclose(np.ravel(found), of_torch.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_step_is_that_of_torch(params):
  torch = pytest.importorskip("torch")
  trained, _ = partition(MODEL, params)
  draw = lambda path, x: jax.random.normal(jax.random.key(len(str(path))), x.shape)
  grads = jax.tree_util.tree_map_with_path(draw, trained)
  programs = make_programs(MODEL)
  settings = StepSettings(*map(np.float32, (0.01, 0.9, 0.95, 1e-12, 0.1, 1.0)))
  tensors = [torch.nn.Parameter(torch.tensor(np.asarray(x))) for x in jax.tree.leaves(trained)]
  optimizer = torch.optim.AdamW(tensors, 0.01, (0.9, 0.95), 1e-12, 0.1)
  state = programs.init(trained)
  for _ in range(3):
    for tensor, grad in zip(tensors, jax.tree.leaves(grads), strict=True):
      tensor.grad = torch.tensor(np.asarray(grad))
    norm = torch.nn.utils.clip_grad_norm_(tensors, 1.0)
    optimizer.step()
    trained, state, found, finite = programs.apply(trained, state, grads, settings)
    assert found == pytest.approx(float(norm), rel=1e-5)
    assert finite
  for x, tensor in zip(jax.tree.leaves(trained), tensors, strict=True):
    np.testing.assert_allclose(x, tensor.detach().numpy(), rtol=1e-4, atol=1e-6)
  bad = jax.tree.map(lambda x: x * jnp.nan, grads)
  same, kept, _, finite = programs.apply(trained, state, bad, settings)
  assert not finite
  before, after = (jax.tree.leaves(tree) for tree in ((trained, state), (same, kept)))
  for old, new in zip(before, after, strict=True):
    np.testing.assert_array_equal(old, new)


def test_groups_of_any_size_are_divided_with_little_padding():
  data = []
  for i in range(13):
    tokens = np.asarray([1, 2, 3, *range(4, 8 + i % 3)], np.int32)
    weights = (np.arange(len(tokens)) >= 2).astype(np.float32)
    data.append(Datum(tokens, tokens, {"weights": weights}, None))
  loss = make_loss("cross_entropy", {})
  parts = list(divide(data, [loss_begins(x) for x in data], loss, 1, 0, "cpu"))
  assert sorted(index for _, places in parts for index, _, _ in places) == list(range(13))
  rows, _ = parts[0]
  assert rows.tokens.shape == (1, 16, 8)
  assert rows.prompts.tokens[0, -3:].tolist() == [1, 2, 3]
  assert rows.targets[0, 0, :2].tolist() == [3, 4]
  assert rows.tokens[0, 0, 0] == 4


def test_prompts_are_padded_to_powers_of_two_and_the_means_of_neighbours():
  lengths = (1, 32, 33, 48, 49, 64, 65, 97)
  assert [prompt_width(length) for length in lengths] == [32, 32, 48, 48, 64, 64, 96, 128]


@pytest.mark.parametrize(
  ("name", "config", "message"),
  [
    ("stable_reinforce", {}, "importance_sampling"),
    ("custom", {}, "forward_backward_custom"),
    ("pppo", {}, "did you mean 'ppo'"),
    ("ppo", {"clip_low_treshold": 0.9}, "did you mean 'clip_low_threshold'"),
    ("ppo", {"clip_low_threshold": 1.3}, "at most clip_high_threshold"),
    ("dro", {"beta": "much"}, "beta must be a number"),
  ],
)
def test_what_is_not_a_loss_is_refused_in_one_line(name, config, message):
  with pytest.raises(ApiError, match=message) as error:
    make_loss(name, config)
  assert "\n" not in error.value.message
