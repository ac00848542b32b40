"""The divergence between the distributions of policy and teacher, in the head and in the update."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import update_cases
from meshes import mesh_of
from update_cases import CONFIG, SGD_LIKE, assert_same, params_on

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Distillation
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.training.head import HeadSettings, TeacherStates, loss_and_log_probs
from gtpo_jax.training.packing import plan_rows
from gtpo_jax.training.state import init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update

KINDS = {
  "reverse_kl": Distillation(divergence="reverse_kl"),
  "forward_kl": Distillation(divergence="forward_kl"),
  "jsd": Distillation(divergence="jsd", beta=0.3),
}
B, T, D, V = 4, 7, 8, 24
TEMPERATURE = 0.8


def head_inputs(v_teacher=V, seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((B, T, D), (V, D), (B, T, 6), (v_teacher, 6))
  arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
  return [*arrays, (rng.random((B, T)) * (rng.random((B, T)) < 0.7)).astype(np.float32)]


def slow_divergence(hidden, table, teacher_hidden, teacher_table, weights, distillation):
  """Returns the same as `loss_and_gradients`, in torch, in float64."""
  torch = pytest.importorskip("torch")
  tensor = lambda x: torch.tensor(np.asarray(x, np.float64))
  shared = min(len(table), len(teacher_table))
  states, head = tensor(hidden).requires_grad_(), tensor(table).requires_grad_()
  softmax = lambda logits: torch.log_softmax(logits[..., :shared] / TEMPERATURE, -1)
  log_p = softmax(states @ head.T)
  log_q = softmax(tensor(teacher_hidden) @ tensor(teacher_table).T)
  overlap = 1 - 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)  # over all ids, whatever top_k
  if k := distillation.top_k:  # the k ids, then the sum of the others
    kept = log_q.topk(k).indices
    tail = lambda x: 1 - x.exp().gather(-1, kept).sum(-1, keepdim=True)
    log_p, log_q = (torch.cat([x.gather(-1, kept), tail(x).log()], -1) for x in (log_p, log_q))
  p, q, beta = log_p.exp(), log_q.exp(), distillation.beta
  log_m = (beta * q + (1 - beta) * p).log()
  kl = lambda probs, log_a, log_b: (probs * (log_a - log_b)).sum(-1)
  divergence = {
    "reverse_kl": lambda: kl(p, log_p, log_q),
    "forward_kl": lambda: kl(q, log_q, log_p),
    "jsd": lambda: beta * kl(q, log_q, log_m) + (1 - beta) * kl(p, log_p, log_m),
  }[distillation.divergence]()
  loss = (tensor(weights) * divergence).sum()
  loss.backward()
  return [x.detach().numpy() for x in (loss, divergence, states.grad, head.grad, overlap)]


def weighted_sum(log_probs, entropy, signals):
  return (signals * log_probs).sum()


def head_settings(mesh=None, chunk=4):
  return HeadSettings(mesh or single_device_mesh(), TEMPERATURE, chunk, "highest")


@functools.partial(jax.jit, static_argnums=(5, 6))
def loss_and_gradients(
  hidden, table, teacher_hidden, teacher_table, weights, distillation, s, signals=None
):
  """The loss is the divergences' weighted sum, and that of the log-probs with `signals`."""
  teacher = TeacherStates(teacher_hidden, teacher_table, weights, distillation)
  tokens = jnp.arange(B * T).reshape(B, T) % V
  signals = jnp.zeros((B, T)) if signals is None else signals

  def run(hidden, table):
    loss, *_, comparison = loss_and_log_probs(
      weighted_sum, hidden, table, tokens, signals, s, teacher
    )
    return loss, comparison

  (loss, comparison), grads = jax.value_and_grad(run, (0, 1), has_aux=True)(hidden, table)
  return loss, comparison.divergence, *grads, comparison.overlap


@pytest.mark.parametrize(
  ("v_teacher", "top_k"), [(V, 0), (V - 4, 0), (V + 8, 0), (V, 5), (V - 4, 1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_torch(kind, v_teacher, top_k):
  inputs = head_inputs(v_teacher)
  distillation = dataclasses.replace(KINDS[kind], top_k=top_k)
  expected = slow_divergence(*inputs, distillation)
  got = loss_and_gradients(*inputs, distillation, head_settings())
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  assert np.abs(expected[2]).max() > 0.01
  assert (np.asarray(got[1]) > 0).all()


@pytest.mark.devices
def test_the_head_on_eight_devices():
  """The teacher's 15 most probable ids are more than a vocabulary shard has."""
  inputs = head_inputs()
  for top_k in (0, 15):
    distillation = dataclasses.replace(KINDS["jsd"], top_k=top_k)
    expected = loss_and_gradients(*inputs, distillation, head_settings())
    got = loss_and_gradients(*inputs, distillation, head_settings(mesh_of(2, 2, 1, 2)))
    for x, y in zip(got, expected, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_the_most_probable_ids_say_less_than_all():
  """Counting ids as one never raises a divergence, and with all but one of them nothing changes."""
  for kind in KINDS.values():
    found = [
      loss_and_gradients(*head_inputs(), dataclasses.replace(kind, top_k=k), head_settings())
      for k in (1, 4, V - 1, 0)
    ]
    one, four, most, everything = (np.asarray(divergence) for _, divergence, *_ in found)
    assert (one >= 0).all() and (one <= four + 1e-6).all() and (four <= everything + 1e-6).all()
    assert (one < everything - 1e-3).any()
    np.testing.assert_allclose(most, everything, rtol=1e-4, atol=1e-6)


def test_the_loss_of_the_tokens_is_added():
  """Of values and gradients, those of the divergences and of the log-probs add up."""
  inputs = head_inputs()
  signals = np.random.default_rng(2).normal(size=(B, T)).astype(np.float32)
  run = lambda weights, signals: loss_and_gradients(
    *inputs[:4], weights, KINDS["reverse_kl"], head_settings(), signals
  )
  alone = run(inputs[4], None)
  of_tokens = run(np.zeros_like(inputs[4]), signals)
  both = run(inputs[4], signals)
  np.testing.assert_allclose(both[1], alone[1], rtol=1e-6)
  for i in (0, 2, 3):
    np.testing.assert_allclose(both[i], alone[i] + of_tokens[i], rtol=1e-4, atol=1e-5)
  assert abs(of_tokens[0]) > 0.1 and np.abs(of_tokens[2]).max() > 0.01


def test_the_sampled_divergence_is_an_unbiased_estimate():
  """Its mean over the policy's own distribution is the reverse KL divergence."""
  hidden, table, teacher_hidden, teacher_table, weights = head_inputs(seed=3)
  softmax = lambda x, y: jax.nn.log_softmax(x @ y.T / TEMPERATURE)
  log_p, log_q = softmax(hidden, table), softmax(teacher_hidden, teacher_table)
  mean = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
  _, divergence, *_ = loss_and_gradients(
    hidden, table, teacher_hidden, teacher_table, weights, KINDS["reverse_kl"], head_settings()
  )
  np.testing.assert_allclose(divergence, mean, rtol=1e-5)


def test_no_array_has_all_logits():
  """Neither the program as written nor what XLA makes of it."""
  program = loss_and_gradients.lower(*head_inputs(), KINDS["jsd"], head_settings())
  size = lambda dims, separator: int(np.prod([int(x) for x in dims.split(separator)]))
  written = re.findall(r"tensor<((?:\d+x)*\d+)x[fb]", program.as_text())
  compiled = re.findall(r"\b[fb]f?\d+\[(\d[\d,]*)\]", program.compile().as_text())
  for sizes in ([size(x, "x") for x in written], [size(x, ",") for x in compiled]):
    assert V * D <= max(sizes) < B * T * V


@functools.cache
def batch():
  """Completions of at most 4 of 9 tokens, which can share rows."""
  rollouts, rewards = update_cases.batch()
  mask = rollouts.mask & (np.arange(9) < 4)
  return rollouts.replace(mask=mask, present=mask), rewards


TEACHER = dataclasses.replace(CONFIG, width=24, heads=2, kv_heads=2, layers=1, vocab_size=52)


@functools.cache
def teacher_params():
  model = Transformer(TEACHER, single_device_mesh())
  return jax.device_get(init_params(model, jax.random.key(9)))


def run(
  mesh=None, micro_batches=1, data=None, name="opd", distillation=None, agree=False, own=False
):
  """The state and the metrics of one update that matches a teacher's distributions.

  With `agree`, the teacher has the policy's parameters; with `own`, no others are given.
  """
  model = Transformer(CONFIG, mesh or single_device_mesh())
  teacher = model if agree or own else Transformer(TEACHER, model.mesh)
  optimizer = make_optimizer(SGD_LIKE, 10)
  algorithm = algorithms.make(name, distillation or KINDS["jsd"])
  update = make_update(
    model, algorithm, optimizer, UpdateSettings(micro_batches=micro_batches, head_chunk=16), teacher
  )
  state = init_state(params_on(model), optimizer, model)
  of_teacher = () if own else (params_on(model) if agree else teacher_params(),)
  state, metrics = update(state, *shard_batch(data or batch(), model.mesh), *of_teacher)
  return jax.device_get(state), {key: float(value) for key, value in metrics.items()}


@functools.cache
def plain():
  return run()


@pytest.mark.slow
def test_the_update_is_the_same_in_parts_and_packed():
  assert plain()[1]["distill/divergence"] > 1e-3 and plain()[1]["grad_norm"] > 1e-4
  assert plain()[1]["loss"] == pytest.approx(plain()[1]["distill/divergence"], rel=1e-4)
  assert_same(plain(), run(micro_batches=4))
  of_sides = sorted(plain()[1][f"distill/{side}"] for side in ("correct", "incorrect"))
  assert of_sides[0] < plain()[1]["distill/divergence"] < of_sides[1]
  assert 0.1 < plain()[1]["distill/agreement"] < 0.99
  rollouts, rewards = batch()
  packing = plan_rows(rollouts.lengths, rollouts.tokens.shape[2])
  assert packing.source.shape[1] == 2
  packed = run(data=(rollouts.replace(packing=packing), rewards))
  packed[1]["tokens/padding"] = plain()[1]["tokens/padding"]
  assert_same(plain(), packed)


def test_a_teacher_with_prompts_of_its_own():
  rollouts, rewards = batch()
  same = run(data=(rollouts.replace(teacher_prompts=rollouts.prompts), rewards))
  assert_same(plain(), same)
  others = rollouts.prompts.replace(tokens=rollouts.prompts.tokens[::-1])
  _, metrics = run(data=(rollouts.replace(teacher_prompts=others), rewards))
  assert abs(metrics["distill/divergence"] - plain()[1]["distill/divergence"]) > 1e-5


@pytest.mark.devices
@pytest.mark.slow
def test_one_device_equals_eight():
  assert_same(plain(), run(mesh_of(2, 2, 1, 2), 2))


@pytest.mark.slow
def test_nothing_is_learned_from_a_teacher_that_agrees():
  _, metrics = run(agree=True, distillation=KINDS["reverse_kl"])
  assert metrics["grad_norm"] < 1e-5 and metrics["distill/divergence"] < 1e-5
  assert metrics["distill/agreement"] == pytest.approx(1, abs=1e-5)
  assert metrics["update/empty"] == 0


@pytest.mark.slow
def test_the_policy_with_other_prompts_is_a_teacher():
  """Its parameters are constants of the gradient, as if a copy of them were given."""
  rollouts, rewards = batch()
  others = rollouts.prompts.replace(tokens=rollouts.prompts.tokens[::-1])
  data = (rollouts.replace(teacher_prompts=others), rewards)
  own = run(data=data, own=True, micro_batches=2)
  assert own[1]["distill/divergence"] > 1e-3 and own[1]["grad_norm"] > 1e-4
  assert_same(own, run(data=data, agree=True, micro_batches=2))


def test_what_has_no_meaning_is_refused():
  for name in ("gspo", "gmpo", "stare"):
    with pytest.raises(UserError, match=r"distill.divergence = 'jsd' needs ratio = 'token' and an"):
      algorithms.make(name, KINDS["jsd"])
  with pytest.raises(UserError, match=r"distill.beta = 0.3 only has an effect with divergence = "):
    Distillation(beta=0.3)
  with pytest.raises(UserError, match=r"distill.top_k = 8 only has an effect with a divergence ov"):
    Distillation(top_k=8)
  with pytest.raises(UserError, match="needs the teacher's model; pass `teacher`"):
    model = Transformer(CONFIG, single_device_mesh())
    make_update(model, algorithms.make("opd", KINDS["jsd"]), make_optimizer(SGD_LIKE, 10))
