"""A value function that is learned from the verdicts of one batch, and the credit it gives."""

from __future__ import annotations

import numpy as np

FOLDS = 8  # each value is predicted by a fit to the other seven eighths of the prompts
PENALTY = 0.01  # of the ridge regression, relative to the variance of a feature


def values(hidden: np.ndarray, mask: np.ndarray, correct: np.ndarray) -> np.ndarray:
  """Returns the probability that a completion will be correct, before each of its tokens.

  It is a ridge regression of the verdict on the policy's last hidden state. A prompt's values are
  predicted by a fit to other prompts, so they do not depend on its own completions' verdicts.

  Args:
    hidden: f32[n, g, t, d], the states that predict each token.
    mask: bool[n, g, t], the sampled tokens.
    correct: bool[n, g], the verdicts.

  Returns:
    f64[n, g, t], between 0 and 1; arbitrary on padding.
  """
  n = len(mask)
  target = np.broadcast_to(correct[..., None], mask.shape).astype(np.float64)
  predicted = np.zeros(mask.shape)
  fold = np.arange(n) % min(FOLDS, n)
  for number in range(min(FOLDS, n)):
    seen = mask & (fold != number)[:, None, None]
    x = hidden[seen].astype(np.float64)
    y = target[seen]
    center = x.mean(0)
    scale = x.std(0) + 1e-6
    x = (x - center) / scale
    covariance = x.T @ x / len(x) + PENALTY * np.eye(x.shape[1])
    weights = np.linalg.solve(covariance, x.T @ (y - y.mean()) / len(x))
    held_out = fold == number
    predicted[held_out] = (hidden[held_out] - center) / scale @ weights + y.mean()
  return predicted.clip(0, 1)


def generalized_advantages(
  value: np.ndarray, mask: np.ndarray, correct: np.ndarray, decay: float
) -> np.ndarray:
  """Returns generalised advantage estimates (Schulman et al., 1506.02438) f64[n, g, t].

  The reward is the verdict, after the last token, and there is no discount.

  Args:
    value: f64[n, g, t], the value before each token.
    mask: bool[n, g, t], the sampled tokens.
    correct: bool[n, g], the verdicts.
    decay: lambda of the estimate. With 1, the advantage is the verdict minus the value, which is
      unbiased whatever the values are. With 0, it is the change of the value.
  """
  verdict = correct.astype(np.float64)
  advantages = np.zeros(mask.shape)
  after = np.zeros(mask.shape[:2])  # the advantage of the next token
  next_value = verdict
  for t in reversed(range(mask.shape[2])):
    alive = mask[..., t]
    current = next_value - value[..., t] + decay * after
    advantages[..., t] = np.where(alive, current, 0.0)
    after = np.where(alive, current, 0.0)
    next_value = np.where(alive, value[..., t], verdict)
  return advantages
