"""Shaped rewards, advantages and loss on one small batch, calculated by hand.

The recipes are those of both versions of the paper, and the baselines. The completions have 2, 1, 2
and 1 tokens; the first two are correct. The tests list one number per token (completion, position),
in this order: (1,1) (1,2) (2,1) | (3,1) (3,2) (4,1).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import BONUS

from gtpo_jax.algorithms import make
from gtpo_jax.runtime.errors import UserError

MASK = jnp.asarray([[[True, True], [True, False], [True, True], [True, False]]])
CORRECT = jnp.asarray([[True, True, False, False]])
REWARD = jnp.asarray([[1.0, 1.0, 0.0, 0.0]])
RATIOS = jnp.asarray([[[1.5, 1.0], [0.5, 1.0], [0.5, 1.1], [1.5, 1.0]]])
OLD = jnp.full((1, 4, 2), -1.0)

# Position 1, correct: H = 1, 3, mean 2, H/mean = 1/2, 3/2. Incorrect: 1/H = 2, 4, mean 3,
# (1/H)/mean = 2/3, 4/3. Position 2: O+ and O- have one token each, so the quotient is 1.
TOKENS = [[[1.0, 2.0], [3.0, 7.0], [0.5, 0.25], [0.25, 7.0]]]
# H^ is the mean entropy of a completion. Correct: H^ = 1.5, 0.5, H^/mean = 3/2, 1/2. Incorrect:
# H^ = 0.5, 0.25, 1/H^ = 2, 4, (1/H^)/mean = 2/3, 4/3.
COMPLETIONS = [[[1.0, 2.0], [0.5, 7.0], [0.25, 0.75], [0.25, 7.0]]]


def work(algorithm, entropy, penalty=None, reward=REWARD):
  """Returns the shaped rewards R+ and R-, the advantages and the loss."""
  x = {
    "entropy": jnp.asarray(entropy),
    "mask": MASK,
    "correct": CORRECT,
    "reward": reward,
    "penalty": penalty,
  }
  shaped, _ = algorithm.shaped(**x)
  advantages = algorithm.advantages(**x)
  mask = algorithm.loss_mask(**x)
  policies = {"log_probs": OLD + jnp.log(RATIOS), "log_probs_old": OLD}
  loss, _ = jax.jit(algorithm.loss)(**policies, advantages=advantages, mask=mask)
  return np.asarray(shaped.plus), np.asarray(shaped.minus), np.asarray(advantages), float(loss)


def per_token(a, b, c, d, e, f):
  return [[[a, b], [c, 0], [d, e], [f, 0]]]


def per_completion(a, b, c, d):
  return per_token(a, a, b, c, c, d)


def close(got, expected):
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_gtpo():
  plus, minus, advantages, loss = work(make("gtpo", alpha1=1.0, alpha2=0.3), TOKENS)
  # Mean 0.65, variance (0.5^2 + 0.65^2 + 0.8^2 + 3 * 0.65^2) / 6 = 2.58 / 6.
  close(plus, per_token(1.15, 1.3, 1.45, 0, 0, 0))
  # Mean -0.65, variance (0.55^2 + 0.65^2 + 0.75^2 + 3 * 0.65^2) / 6 = 2.555 / 6.
  close(minus, per_token(0, 0, 0, -1.2, -1.3, -1.4))
  p = (2.58 / 6) ** 0.5
  m = (2.555 / 6) ** 0.5
  close(advantages, per_token(0.5 / p, 0.65 / p, 0.8 / p, -0.55 / m, -0.65 / m, -0.75 / m))
  # Ratios 1.5 -> 1.28, 1, 0.5 on O+; 0.5 -> 0.8, 1.1, 1.5 on O-; the mean over six tokens.
  right = (1.28 * 0.5 + 0.65 + 0.5 * 0.8) / p
  wrong = (0.8 * 0.55 + 1.1 * 0.65 + 1.5 * 0.75) / m
  close(loss, -(right - wrong) / 6)


def test_gtpo_v1():
  plus, minus, advantages, loss = work(make("gtpo_v1", alpha=0.3), TOKENS)
  close(plus, per_token(1.15, 1.3, 1.45, 0, 0, 0))
  assert not minus.any()
  p = (2.58 / 6) ** 0.5  # the same values as R+ of gtpo; here the zeros are the rewards of O-
  close(advantages, per_token(0.5 / p, 0.65 / p, 0.8 / p, -0.65 / p, -0.65 / p, -0.65 / p))
  close(loss, -(1.28 * 0.5 + 0.65 + 0.5 * 0.8 - 0.65 * (0.8 + 1.1 + 1.5)) / p / 6)


def test_gtpo_v1_clipped():
  # Clipped to [1, 0.6 + 0.6 / 1.25 = 1.08].
  algorithm = make("gtpo_v1_clipped", alpha1=0.6, alpha2=0.4, kappa=1.25, floor=1.0)
  penalty = jnp.asarray([[-0.5, 0.0, 0.0, -0.3]])
  plus, minus, advantages, loss = work(algorithm, TOKENS, penalty=penalty)
  # 0.6 + 0.4 * (1/2, 1, 3/2) = 0.8 -> 1, 1, 1.2 -> 1.08; then R(i) is added on O+ and O-.
  close(plus, per_token(0.5, 0.5, 1.08, 0, 0, 0))
  close(minus, per_token(0, 0, 0, 0, 0, -0.3))
  # Mean square (0.25 + 0.25 + 1.1664 + 0.09) / 6.
  mean = 1.78 / 6
  s = (1.7564 / 6 - mean**2) ** 0.5
  values = [(x - mean) / s for x in (0.5, 0.5, 1.08, 0, 0, -0.3)]
  close(advantages, per_token(*values))
  ratios = (1.28, 1.0, 0.5, 0.8, 1.1, 1.5)
  close(loss, -np.dot(ratios, values) / 6)


def test_the_other_published_floor_of_gtpo_v1_clipped():
  algorithm = make("gtpo_v1_clipped", alpha1=0.6, alpha2=0.4, kappa=1.25, floor=0.6)
  plus, _, _, _ = work(algorithm, TOKENS)
  close(plus, per_token(0.8, 1.0, 1.08, 0, 0, 0))


def test_gtpo_v2():
  plus, minus, advantages, loss = work(make("gtpo_v2", alpha=0.3), TOKENS)
  close(plus, per_token(1.15, 1.3, 1.45, 0, 0, 0))
  # Mean -1/2, variance (4/9 + 1 + 16/9) / 6 - 1/4.
  close(minus, per_token(0, 0, 0, -2 / 3, -1, -4 / 3))
  p = (2.58 / 6) ** 0.5
  m = (29 / 54 - 0.25) ** 0.5
  close(advantages, per_token(0.5 / p, 0.65 / p, 0.8 / p, -1 / 6 / m, -0.5 / m, -5 / 6 / m))
  close(loss, -((1.28 * 0.5 + 0.65 + 0.5 * 0.8) / p - (0.8 / 6 + 1.1 * 0.5 + 1.5 * 5 / 6) / m) / 6)


def test_gtpo_v2_with_a_cap():
  plus, minus, _, _ = work(make("gtpo_v2", alpha=0.3, kappa=4.0), TOKENS)
  close(plus, per_token(1.15, 1.25, 1.25, 0, 0, 0))  # at most 1 + 1/4
  close(minus, per_token(0, 0, 0, -2 / 3, -1, -4 / 3))


def test_grpo_s():
  plus, minus, advantages, loss = work(make("grpo_s", beta1=1.0, beta2=0.3), COMPLETIONS)
  assert plus.shape == (1, 4, 1)
  # Mean 0.65, variance (0.8^2 + 0.5^2 + 2 * 0.65^2) / 4 = 1.735 / 4.
  close(plus.ravel(), [1.45, 1.15, 0, 0])
  # Mean -0.65, variance (0.55^2 + 0.75^2 + 2 * 0.65^2) / 4 = 1.71 / 4.
  close(minus.ravel(), [0, 0, -1.2, -1.4])
  p = (1.735 / 4) ** 0.5
  m = (1.71 / 4) ** 0.5
  close(advantages, per_completion(0.8 / p, 0.5 / p, -0.55 / m, -0.75 / m))
  # w^ = 1.25, 0.5 on O+ and 0.8, 1.5 on O-: none is clipped; the mean over four completions.
  close(loss, -((1.25 * 0.8 + 0.5 * 0.5) / p - (0.8 * 0.55 + 1.5 * 0.75) / m) / 4)


def test_grpo_s_with_the_geometric_means():
  # H^ = 1, 3 on O+, so H^/mean = 1/2, 3/2; H^ = 1/4, 1/2 on O-, so (1/H^)/mean = 4/3, 2/3.
  entropy = [[[0.5, 2.0], [3.0, 7.0], [0.125, 0.5], [0.5, 7.0]]]
  algorithm = make("grpo_s", beta1=1.0, beta2=0.3, mean="geometric", ratio="geometric")
  plus, minus, advantages, loss = work(algorithm, entropy)
  close(plus.ravel(), [1.15, 1.45, 0, 0])
  close(minus.ravel(), [0, 0, -1.4, -1.2])
  p = (1.735 / 4) ** 0.5
  m = (1.71 / 4) ** 0.5
  close(advantages, per_completion(0.5 / p, 0.8 / p, -0.75 / m, -0.55 / m))
  # w^ = sqrt(1.5 * 1) = 1.2247, 0.5; sqrt(0.5 * 1.1) = 0.7416 -> 0.8, 1.5.
  close(loss, -((1.5**0.5 * 0.5 + 0.5 * 0.8) / p - (0.8 * 0.75 + 1.5 * 0.55) / m) / 4)


def test_grpo_s_v1():
  plus, minus, advantages, loss = work(make("grpo_s_v1", beta=0.3), COMPLETIONS)
  close(plus.ravel(), [1.45, 1.15, 0, 0])
  assert not minus.any()
  p = (1.735 / 4) ** 0.5
  close(advantages, per_completion(0.8 / p, 0.5 / p, -0.65 / p, -0.65 / p))
  close(loss, -(1.25 * 0.8 + 0.5 * 0.5 - 0.65 * (0.8 + 1.5)) / p / 4)


def test_grpo_s_v2():
  plus, minus, advantages, loss = work(make("grpo_s_v2", beta=0.3), COMPLETIONS)
  close(plus.ravel(), [1.45, 1.15, 0, 0])
  # Mean -1/2, variance (4/9 + 16/9) / 4 - 1/4 = 11/36.
  close(minus.ravel(), [0, 0, -2 / 3, -4 / 3])
  p = (1.735 / 4) ** 0.5
  m = (11 / 36) ** 0.5
  close(advantages, per_completion(0.8 / p, 0.5 / p, -1 / 6 / m, -5 / 6 / m))
  close(loss, -((1.25 * 0.8 + 0.5 * 0.5) / p - (0.8 / 6 + 1.5 * 5 / 6) / m) / 4)


def test_grpo():
  _, _, advantages, loss = work(make("grpo"), TOKENS)
  close(advantages, per_completion(1, 1, -1, -1))
  # Means of the completions: (1.5 -> 1.2 + 1) / 2, 0.5, -(0.5 -> 0.8 + 1.1) / 2, -1.5.
  close(loss, -(1.1 + 0.5 - 0.95 - 1.5) / 4)


def test_dapo():
  penalty = jnp.asarray([[-0.5, 0.0, 0.0, 0.0]])
  _, _, advantages, loss = work(make("dapo"), TOKENS, penalty=penalty, reward=2 * REWARD - 1)
  # Rewards 0.5, 1, -1, -1: mean -0.125, deviations 0.625, 1.125, -0.875, -0.875, so the variance is
  # 3.1875 / 4.
  s = (3.1875 / 4) ** 0.5
  close(advantages, per_completion(0.625 / s, 1.125 / s, -0.875 / s, -0.875 / s))
  close(loss, -(0.625 * (1.28 + 1.0) + 1.125 * 0.5 - 0.875 * (0.8 + 1.1 + 1.5)) / s / 6)


def test_dapo_forking():
  # 20 % of 6 tokens is 1.2, rounded up to 2: the tokens with 3 and 2 nats.
  entropy = [[[1.0, 2.0], [0.1, 7.0], [0.5, 3.0], [0.25, 7.0]]]
  _, _, advantages, loss = work(make("dapo_forking"), entropy, reward=2 * REWARD - 1)
  close(advantages, per_token(0, 1, 0, 0, -1, 0))
  close(loss, -(1.0 * 1 - 1.1 * 1) / 2)


def test_dr_grpo():
  _, _, advantages, loss = work(make("dr_grpo"), TOKENS)
  # Minus the mean, not divided by the std.
  close(advantages, per_completion(0.5, 0.5, -0.5, -0.5))
  # Four completions of at most two tokens.
  close(loss, -0.5 * (1.2 + 1.0 + 0.5 - 0.8 - 1.1 - 1.5) / 8)


def test_gspo():
  _, _, advantages, loss = work(make("gspo"), TOKENS)
  close(advantages, per_completion(1, 1, -1, -1))
  # w^ = sqrt(1.5) -> 1.0004, 0.5 on O+; sqrt(0.55) -> 0.9997, 1.5 on O-.
  close(loss, -(1.0004 + 0.5 - 0.9997 - 1.5) / 4)


def test_dapo_mixed():
  """The guide sampled the last completion of both groups; the policy never solves the second."""
  mask = jnp.asarray([[[True, True], [True, False], [True, False]], [[True, False]] * 3])
  correct = jnp.asarray([[True, False, True], [False, False, True]])
  guided = jnp.asarray([[False, False, True]] * 2)
  x = {
    "entropy": jnp.zeros(mask.shape),
    "mask": mask,
    "correct": correct,
    "reward": jnp.where(correct, 1.0, -1.0),
    "guided": guided,
  }
  algorithm = make("dapo_mixed", guide_cap=2.0, lambda_zero=0.5)
  advantages = algorithm.advantages(**x)
  kept = algorithm.loss_mask(**x)
  np.testing.assert_array_equal(kept, mask)
  # Rewards 1, -1, 1: mean 1/3, std sqrt(8)/3. Rewards -1, -1, 1: mean -1/3, the same std.
  r = 2**0.5
  close(advantages, [[[1 / r, 1 / r], [-r, 0], [1 / r, 0]], [[-1 / r, 0], [-1 / r, 0], [r, 0]]])
  weights = algorithm.token_weights(kept, correct, guided)
  # Each group has a mean of its own; that of the second is multiplied by lambda_zero.
  close(weights, [[[1 / 4, 1 / 4], [1 / 4, 0], [1 / 4, 0]], [[0.5 / 3, 0]] * 3])
  ratios = jnp.asarray([[[1.5, 1.0], [0.5, 1.0], [3.0, 1.0]], [[1.1, 1.0], [1.5, 1.0], [0.5, 1.0]]])
  loss, metrics = jax.jit(algorithm.loss)(
    log_probs=jnp.log(ratios),
    log_probs_old=jnp.zeros(mask.shape),
    advantages=advantages,
    mask=kept,
    weights=weights,
    guided=guided,
  )
  # First group: 1.5 -> 1.28, 1; 0.5 -> 0.8; the guide's 3 -> 2.
  first = (1.28 + 1.0 + 2.0) / r - 0.8 * r
  # Second: 1.1, 1.5, and the guide's 0.5 unchanged.
  second = (-1.1 - 1.5) / r + 0.5 * r
  close(loss, -first / 4 - 0.5 * second / 3)
  close([metrics["clip/guide"], metrics["clip/low"], metrics["clip/high"]], [1 / 2, 1 / 5, 1 / 5])
  close(metrics["ratio/mean"], (1.5 + 1.0 + 0.5 + 1.1 + 1.5) / 5)


def completions(*correct):
  """Returns a group of completions of one token, whose rewards are 1 and 0."""
  right = jnp.asarray([correct], bool)
  alive = jnp.ones((1, len(correct), 1), bool)
  reward = right.astype(jnp.float32)
  return {"entropy": 0.0 * alive, "mask": alive, "correct": right, "reward": reward}


def test_qae():
  """The 2nd smallest of five rewards is the baseline with K = 0.4, the std is 0.4 or 0.49."""
  algorithm = make("qae", baseline_quantile=0.4)
  of = lambda *correct: algorithm.advantages(**completions(*correct))[0, :, 0]
  # A fifth and three fifths are correct, at most 1 - K: the baseline is 0.
  close(of(1, 0, 0, 0, 0), [2.5, 0, 0, 0, 0])
  close(of(1, 1, 1, 0, 0), [1 / 0.24**0.5] * 3 + [0, 0])
  # Four fifths are correct: the baseline is 1.
  close(of(1, 1, 1, 1, 0), [0, 0, 0, 0, -2.5])
  # Graded rewards: 0.1, 0.2, 0.4, 0.5, 0.8 have mean 0.4 and variance 0.3 / 5; the baseline is 0.2.
  graded = completions(1, 0, 0, 0, 0) | {"reward": jnp.asarray([[0.8, 0.1, 0.5, 0.2, 0.4]])}
  std = 0.06**0.5
  close(algorithm.advantages(**graded)[0, :, 0], np.array([0.6, -0.1, 0.3, 0, 0.2]) / std)


def test_rlsd():
  """A = 1 on O+ and -1 on O-; the teacher finds a token exp(d) times as probable as the policy."""
  d = jnp.log(jnp.asarray([[[1.1, 2.0], [0.5, 1.0], [1.1, 2.0], [0.5, 1.0]]]))
  x = {"entropy": jnp.asarray(TOKENS), "mask": MASK, "correct": CORRECT, "reward": REWARD}
  of = lambda **settings: make("rlsd", **settings).advantages(**x, divergence=-d)
  # w = 1.1, 2 -> 1.2, 0.5 -> 0.8 on O+; 1 / 1.1, 1 / 2 -> 0.8, 1 / 0.5 -> 1.2 on O-.
  close(of(), per_token(1.05, 1.1, 0.9, -(0.5 + 0.5 / 1.1), -0.9, -1.1))
  close(of(teacher_mix=1.0, teacher_clip=1.0), per_token(1.1, 2, 0.5, -1 / 1.1, -0.5, -2))
  close(of(teacher_mix=0.0), per_completion(1, 1, -1, -1))


def test_otb():
  """W is 1, 3 in the first completion, 3 in the second, 2, 4 in the third, 2 in the last."""
  norms = jnp.asarray([[[1.0, 2.0], [3.0, 9.0], [2.0, 2.0], [2.0, 9.0]]])
  x = {"entropy": jnp.asarray(TOKENS), "mask": MASK, "correct": CORRECT, "reward": REWARD}
  algorithm = make("otb")
  got = algorithm.advantages(**x, score_norms=norms)
  # Position 1: (1 + 3) / 8. Position 2: 3 / 7, without the completions of one token.
  close(got, per_token(0.5, 4 / 7, 0.5, -0.5, -3 / 7, -0.5))
  # The third has three tokens: at its last one there is nobody to be compared with.
  longer = {key: jnp.pad(y, ((0, 0), (0, 0), (0, 1))) for key, y in x.items() if y.ndim == 3}
  longer["mask"] = longer["mask"].at[0, 2, 2].set(True)
  penalty = jnp.asarray([[0.0, 0.0, -0.2, 0.0]])
  norms = jnp.pad(norms, ((0, 0), (0, 0), (0, 1)), constant_values=1.0)
  got = algorithm.advantages(**x | longer, score_norms=norms, penalty=penalty)
  # Position 1: (1 + 3 - 0.4) / 8, position 2: (3 - 0.8) / 7.
  close(got[0, 2], [-0.2 - 0.45, -0.2 - 2.2 / 7, -0.2])
  # With importance weights, their squares count: W is 4, 3, 2, 2 at position 1.
  importance = jnp.ones(MASK.shape).at[0, 0].set(2.0)
  weighted = algorithm.advantages(**x, score_norms=norms[..., :2], importance=importance)
  close(weighted[0, :, 0], np.array([1, 1, 0, 0]) - 7 / 11)
  with pytest.raises(UserError, match="'otb' needs score_norms; pass it"):
    algorithm.advantages(**x)


def test_vineppo_and_spo_chain():
  """Two segments in the first completion; in the third, the second one is not learned from."""
  gains = jnp.asarray([[[0.25, 0.5], [0.75, 9.0], [-0.5, jnp.nan], [0.0, 9.0]]])
  x = {"entropy": jnp.asarray(TOKENS), "mask": MASK, "correct": CORRECT, "reward": REWARD}
  for name in ("vineppo", "spo_chain"):
    algorithm = make(name)
    got = algorithm.advantages(**x, value_gains=gains)
    close(got, per_token(0.25, 0.5, 0.75, -0.5, 0, 0))
    mask = algorithm.loss_mask(**x, value_gains=gains)
    assert not mask[0, 2, 1] and mask.sum() == 5
    loss, _ = algorithm.loss(log_probs=OLD, log_probs_old=OLD, advantages=got, mask=mask)
    close(loss, -1.0 / 5)  # the mean over five tokens
    with pytest.raises(UserError, match=f"'{name}' needs value_gains; pass it"):
      algorithm.advantages(**x)


def test_gdpo():
  """A verdict, and half as much a format that the failures keep more often than the success."""
  x = completions(1, 0, 0, 0) | {
    "parts": jnp.asarray([[[1.0, 0.0], [0.0, 0.1], [0.0, 0.1], [0.0, 0.0]]]),
    "part_weights": jnp.asarray([[1.0, 0.5]]),
  }
  # z-scores of the verdict: mean 1/4, std sqrt(3)/4; of the format: mean 0.05, std 0.05.
  r = 3**0.5
  total = np.array([r - 0.5, -1 / r + 0.5, -1 / r + 0.5, -1 / r - 0.5])
  close(make("gdpo").advantages(**x)[0, :, 0], total / total.std())
  # The second z-score counts tokens: the first completion has two of five. The penalty is a part.
  longer = jnp.asarray([[[True, True], [True, False], [True, False], [True, False]]])
  penalty = {"penalty": jnp.asarray([[-0.3, 0.0, 0.0, 0.0]])}
  total = total + np.array([-r, 1 / r, 1 / r, 1 / r])
  tokens = total[[0, 0, 1, 2, 3]]
  got = make("gdpo").advantages(**x | penalty | {"mask": longer, "entropy": 0.0 * longer})
  close(got[0, :, 0], (total - tokens.mean()) / tokens.std())
  with pytest.raises(UserError, match="'gdpo' needs part_weights; pass it"):
    make("gdpo").advantages(**x | {"part_weights": None})


def test_pass_at_k():
  """One of four is correct: half of the six pairs succeed, and each pair of three failures."""
  of = lambda k, *correct: make("pass_at_k", pass_k=k).advantages(**completions(*correct))[0, :, 0]
  # R = 1 - C(3, 2) / C(4, 2) = 1/2, s = 1/2; A- = (1/2 - C(2, 1) / C(3, 1)) / s = -1/3.
  close(of(2, 1, 0, 0, 0), [1, -1 / 3, -1 / 3, -1 / 3])
  # R = 1 - C(2, 2) / C(4, 2) = 5/6, s = sqrt(5)/6; A- = (1/6 - 1/3) / s.
  right = 1 / 5**0.5
  close(of(2, 1, 1, 0, 0), [right, right, -right, -right])
  # Every pair has one of the three correct ones.
  close(of(2, 1, 1, 1, 0), [0, 0, 0, 0])
  # With k = 1, the z-score of GRPO: mean 1/4, std sqrt(3)/4.
  close(of(1, 1, 0, 0, 0), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
  # A group of fewer than k completions counts as a whole.
  close(of(9, 1, 0, 0, 0), [0, 0, 0, 0])
  penalised = completions(1, 0, 0, 0) | {"penalty": jnp.asarray([[-0.4, 0.0, 0.0, 0.0]])}
  # -0.4 has the mean -0.1, and s is 1/2.
  expected = [1 - 0.6, -1 / 3 + 0.2, -1 / 3 + 0.2, -1 / 3 + 0.2]
  close(make("pass_at_k", pass_k=2).advantages(**penalised)[0, :, 0], expected)


def test_pass_k_max():
  of = lambda x: make("pass_k_max").advantages(**x)[0, :, 0]
  close(of(completions(0, 1, 0, 0)), [0, 1, 0, 0])
  close(of(completions(0, 1, 0, 1)), [0, 0, 0, 0])
  graded = completions(1, 0, 0, 0) | {"reward": jnp.asarray([[0.3, 0.1, 0.9, 0.5]])}
  close(of(graded), [0, 0, 0.4, 0])
  close(of(completions(1)), [0])


def test_w_reinforce():
  rewards = {"reward": jnp.asarray([[1.0, 1.0, -1.0, -1.0]])}
  _, _, advantages, loss = work(make("w_reinforce"), TOKENS, **rewards)
  close(advantages, per_completion(0.1, 0.1, -1, -1))
  # Ratios 1.5 -> 1.2, 1, 0.5 on O+; 0.5 -> 0.8, 1.1, 1.5 on O-.
  close(loss, -(0.1 * (1.2 + 1.0 + 0.5) - (0.8 + 1.1 + 1.5)) / 6)
  _, _, negative_only, _ = work(make("w_reinforce", positive_weight=0.0), TOKENS, **rewards)
  close(negative_only, per_completion(0, 0, -1, -1))


def test_the_effective_fraction_of_participants():
  """(sum x)^2 / sum x^2, divided by the number of tokens; "matrix" compares all of them.

  On O+, x = H = 1, 2, 3; on O-, x = 1/H = 2, 4, 4.
  """
  x = {"entropy": jnp.asarray(TOKENS), "mask": MASK, "correct": CORRECT, "reward": REWARD}
  metrics = make("gtpo", compare="matrix").credit_metrics(**x)
  close(metrics["credit/participants_correct"], 36 / 14 / 3)
  close(metrics["credit/participants_incorrect"], 100 / 36 / 3)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_a_token_of_a_rare_success_earns_more(name):
  """One of four correct: R+ = 1 or 0, mean 1/4, std sqrt(3)/4; three correct: mean 3/4."""
  mask = jnp.ones((1, 4, 1), bool)
  for right, expected in ((1, 3**0.5), (3, 3**-0.5)):
    x = {
      "entropy": jnp.ones(mask.shape),
      "mask": mask,
      "correct": jnp.arange(4)[None] < right,
      "reward": jnp.zeros((1, 4)),
    }
    close(make(name, **{BONUS[name]: 0.0}).advantages(**x)[0, 0, 0], expected)
