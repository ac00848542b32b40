"""Ratios, aggregations and losses as slow float64 loops; nothing here uses the package."""

import math

import numpy as np


def aggregate(kind, mask):
  """Returns the weight of each token in the loss, f64[n, g, t]."""
  n, g, t = mask.shape
  weights = np.zeros(mask.shape)
  completions = sum(bool(mask[i, j].any()) for i in range(n) for j in range(g))
  groups = sum(bool(mask[i].any()) for i in range(n))
  for i, j, k in zip(*np.nonzero(mask), strict=True):
    weights[i, j, k] = {
      "token": 1 / mask.sum(),
      "completion": 1 / (mask[i, j].sum() * completions),
      "group": 1 / (mask[i].sum() * groups),
      "constant": 1 / (n * g * t),
    }[kind]
  return weights


def token_weights(mask, s, correct=None, guided=None):
  """Returns the weight of each token, f64[n, g, t].

  With a guide, groups without a correct completion of the policy's own are aggregated separately
  and weighted by lambda_zero.
  """
  kind = s["loss_aggregation"]
  if guided is None:
    return aggregate(kind, mask)
  rescued = np.zeros_like(mask)
  for i in range(len(mask)):
    own = [j for j in range(mask.shape[1]) if mask[i, j].any() and not guided[i, j]]
    if not any(correct[i, j] for j in own):
      rescued[i] = mask[i]
  return aggregate(kind, mask & ~rescued) + s["lambda_zero"] * aggregate(kind, rescued)


def ratios(kind, log_ratios):
  """Returns the importance ratio at each step of one completion."""
  bounded = lambda x: math.exp(min(max(x, -20.0), 20.0))
  length = len(log_ratios)
  if kind == "token":
    return [bounded(x) for x in log_ratios]
  if kind == "arithmetic":
    return [sum(bounded(x) for x in log_ratios) / length] * length
  return [bounded(sum(log_ratios) / length)] * length


def objective(w, a, s, from_guide=False):
  """Returns the objective of one token, without its weight."""
  if from_guide:
    return min(w, s["guide_cap"]) * a
  value = min(w * a, min(max(w, 1 - s["eps_low"]), 1 + s["eps_high"]) * a)
  return max(value, s["dual_clip"] * a) if s.get("dual_clip") and a < 0 else value


def loss(x, s):
  """Returns the loss, a float, and its metrics.

  x: log_probs, log_probs_old, advantages, mask, weights and, if any, guided, log_probs_sampler and
    log_probs_reference.
  """
  total = 0.0
  values_of = {}
  record = lambda name, value: values_of.setdefault(name, []).append(value)
  new = np.asarray(x["log_probs"], np.float64)
  old = np.asarray(x["log_probs_old"], np.float64)
  mask = x["mask"]
  for i, j in zip(*np.nonzero(mask.any(-1)), strict=True):
    steps = np.flatnonzero(mask[i, j])
    from_guide = x.get("guided") is not None and bool(x["guided"][i, j])
    log_ratios = [new[i, j, k] - old[i, j, k] for k in steps]
    for k, w in zip(steps, ratios(s.get("ratio") or "token", log_ratios), strict=True):
      a = float(x["advantages"][i, j, k])
      value = objective(w, a, s, from_guide)
      if from_guide:
        record("clip/guide", w > s["guide_cap"])
      else:
        record("clip/low", w < 1 - s["eps_low"] and a < 0)
        record("clip/high", w > 1 + s["eps_high"] and a > 0)
        record("ratio/mean", w)
      if s.get("tis_cap"):
        trust = min(math.exp(old[i, j, k] - float(x["log_probs_sampler"][i, j, k])), s["tis_cap"])
        value *= trust
        if not from_guide:
          record("mismatch/weight", trust)
      if s.get("kl_weight") and not from_guide:
        log_r = float(x["log_probs_reference"][i, j, k]) - new[i, j, k]
        divergence = math.exp(log_r) - 1 - log_r
        value -= s["kl_weight"] * divergence
        record("kl/reference", divergence)
      total -= x["weights"][i, j, k] * value
  return total, {name: sum(values) / len(values) for name, values in values_of.items()}


def numeric_gradient(f, x, indices, step=1e-6):
  """Returns central differences of f at `indices`, f64 of x's shape."""
  out = np.zeros(x.shape)
  for index in indices:
    up = np.array(x, np.float64)
    down = np.array(x, np.float64)
    up[index] += step
    down[index] -= step
    out[index] = (f(up) - f(down)) / (2 * step)
  return out
