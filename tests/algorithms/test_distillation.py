"""What a teacher adds to the advantages, against slow loops, and the laws of its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses
import slow_reference
from recipe_cases import arrays, random_batch, random_policies, with_gaps

from gtpo_jax.algorithms import Distillation, make
from gtpo_jax.runtime.errors import UserError

H_FLOOR = 1e-2  # nats, of the published shaping
CLIP = {"objective": "clip", "ratio": "token", "eps_low": 0.2, "eps_high": 0.2}


def taught_batch(seed, name="gtpo"):
  """Returns a batch with divergences from a teacher, and the log-probs of four policies."""
  batch = random_batch(seed, name)
  policies = random_policies(seed, batch["mask"])
  rng = np.random.default_rng(seed + 100)
  divergence = np.where(batch["mask"], rng.normal(0.3, 1.0, batch["mask"].shape), 9e3)
  return batch | {"divergence": divergence.astype(np.float32)}, policies


def slow_share(batch, kept, where, compare):
  """Returns the share of a token: its (inverse) entropy over the mean of its comparison set."""
  right = batch["correct"][where[:2]]
  value = lambda h: float(h) if right else 1 / max(float(h), H_FLOOR)
  tokens = zip(*np.nonzero(kept), strict=True)
  side = [token for token in tokens if batch["correct"][token[:2]] == right]
  x = {token: value(batch["entropy"][token]) for token in side}
  places = slow_reference.places_of(batch["mask"], compare)
  return slow_reference.share(x, where, side, compare, "group", places)


def slow_advantages(batch, kept, coef, compare=None):
  """Returns f64[n, g, t]: -coef * share * divergence on the policy's own tokens in `kept`."""
  added = np.zeros(kept.shape)
  for where in zip(*np.nonzero(kept), strict=True):
    if "guided" in batch and batch["guided"][where[:2]]:
      continue
    share = slow_share(batch, kept, where, compare) if compare else 1.0
    added[where] = -coef * share * float(batch["divergence"][where])
  return added


@pytest.mark.parametrize(
  ("name", "distillation", "compare", "settings"),
  [
    ("opd", Distillation(), None, {}),
    ("opd", Distillation(0.5, "entropy"), "position", {}),
    ("gtpo", Distillation(0.3), None, {}),
    ("gtpo", Distillation(0.3, "entropy"), "sequence", {"compare": "sequence"}),
    ("dapo_mixed", Distillation(2.0, "entropy"), "position", {}),
    ("dapo_forking", Distillation(2.0), None, {}),
  ],
)
def test_advantages_against_a_slow_loop(name, distillation, compare, settings):
  for seed in range(3):
    batch, _ = taught_batch(seed, name)
    algorithm = make(name, distillation, **settings)
    got = algorithm.advantages(**arrays(batch))
    kept = np.asarray(algorithm.loss_mask(**arrays(batch)))
    compared = batch["mask"] if name == "opd" else kept
    added = slow_advantages(batch, compared, distillation.coef, compare)
    rest = {key: value for key, value in batch.items() if key != "divergence"}
    alone = np.zeros(kept.shape) if name == "opd" else make(name, **settings).advantages(**rest)
    np.testing.assert_allclose(got, np.where(kept, added + alone, 0), rtol=2e-5, atol=2e-5)
    assert np.abs(added[kept]).max() > 0.1


def test_the_loss_and_its_gradient_against_a_slow_loop():
  batch, policies = taught_batch(7)
  teacher = policies["log_probs_reference"]
  batch["divergence"] = policies["log_probs_old"] - teacher
  batch["divergence"][:2] = 0  # teacher and student agree
  algorithm = make("opd", Distillation(1.5))
  advantages = algorithm.advantages(**arrays(batch))
  expected = -1.5 * np.where(batch["mask"], batch["divergence"], 0)
  np.testing.assert_allclose(advantages, expected, rtol=1e-6)
  loss = lambda log_probs: algorithm.loss(
    log_probs=log_probs,
    log_probs_old=policies["log_probs_old"],
    advantages=advantages,
    mask=jnp.asarray(batch["mask"]),
  )[0]
  value, grad = jax.value_and_grad(loss)(jnp.asarray(policies["log_probs"]))
  mask = batch["mask"]
  inputs = policies | {"advantages": expected, "mask": mask, "weights": mask / mask.sum()}
  slow_value = lambda log_probs: slow_losses.loss(inputs | {"log_probs": log_probs}, CLIP)[0]
  assert value == pytest.approx(slow_value(policies["log_probs"]), rel=1e-5)
  tokens = list(zip(*np.nonzero(mask), strict=True))
  slow_grad = slow_losses.numeric_gradient(slow_value, policies["log_probs"], tokens)
  np.testing.assert_allclose(grad, slow_grad, atol=1e-7)
  assert not np.asarray(grad)[:2].any() and np.asarray(grad)[2:].any()


def test_the_gradient_is_that_of_the_divergence():
  """Over all tokens of a vocabulary, the expected gradient is that of KL(student || teacher)."""
  v = 6
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=v), jnp.float32)
  teacher = jax.nn.log_softmax(jnp.asarray(rng.normal(size=v), jnp.float32))
  old = jax.nn.log_softmax(logits)
  mask = jnp.ones((1, v, 1), bool)
  algorithm = make("opd")
  advantages = algorithm.advantages(
    entropy=jnp.zeros((1, v, 1)),
    mask=mask,
    correct=jnp.zeros((1, v), bool),
    reward=jnp.zeros((1, v)),
    divergence=(old - teacher)[None, :, None],
  )

  def expected_loss(logits):
    log_probs = jax.nn.log_softmax(logits)
    weights = jnp.exp(old)[None, :, None]  # each token as often as the student draws it
    columns = log_probs[None, :, None]
    return algorithm.loss(
      log_probs=columns,
      log_probs_old=old[None, :, None],
      advantages=advantages,
      mask=mask,
      weights=weights,
    )[0]

  def kl(logits):
    log_probs = jax.nn.log_softmax(logits)
    return (jnp.exp(log_probs) * (log_probs - teacher)).sum()

  np.testing.assert_allclose(jax.grad(expected_loss)(logits), jax.grad(kl)(logits), atol=1e-6)


def test_tokens_between_those_that_were_drawn_do_not_move_the_shares():
  """The k-th drawn tokens are compared, wherever the tokens between them are."""
  batch, _ = taught_batch(3)
  algorithm = make("opd", Distillation(1.0, "entropy"))
  dense = np.asarray(algorithm.advantages(**arrays(batch)))
  spread, columns = with_gaps(batch, 0)
  got = np.asarray(algorithm.advantages(**arrays(spread)))
  np.testing.assert_allclose(np.take_along_axis(got, columns, -1), dense, rtol=1e-5, atol=1e-6)


def test_what_has_no_meaning_is_refused():
  batch, _ = taught_batch(0)
  batch.pop("divergence")
  with pytest.raises(UserError, match="algorithm 'opd' has a teacher and needs divergence"):
    make("opd").advantages(**arrays(batch))
  with pytest.raises(
    UserError, match=r"ratio = 'arithmetic' .* a teacher gives each token its own"
  ):
    make("grpo_s", Distillation())
  with pytest.raises(
    UserError, match=r"objective = 'gmpo' .* a teacher .*; use objective = 'clip'"
  ):
    make("gmpo", Distillation())
  assert make("grpo_s", Distillation(), ratio="token").recipe.per_token_credit
  for settings, message in (
    ({"coef": 0.0}, "distill.coef must be above 0 and finite, got 0.0"),
    ({"credit": "h"}, "distill.credit must be one of uniform, entropy, got 'h'"),
  ):
    with pytest.raises(UserError) as error:
      Distillation(**settings)
    assert str(error.value) == message
