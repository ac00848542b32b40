"""Importance ratios, averages and losses as slow float64 loops, and numeric gradients; nothing here uses the package."""

import math

import numpy as np


def average(kind, mask):
  """The weight of each token in the loss, f64[n, g, t]."""
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
  """As `average`; with a guide the groups without a right completion of the policy's own are averaged apart, times lambda_zero."""
  if guided is None:
    return average(s["average"], mask)
  apart = np.zeros_like(mask)
  for i in range(len(mask)):
    if not any(
      mask[i, j].any() and correct[i, j] and not guided[i, j] for j in range(mask.shape[1])
    ):
      apart[i] = mask[i]
  return average(s["average"], mask & ~apart) + s["lambda_zero"] * average(s["average"], apart)


def ratios(kind, logs):
  """The importance ratio at each step of one completion from its log-ratios."""
  bounded = lambda x: math.exp(min(max(x, -20.0), 20.0))
  if kind == "token":
    return [bounded(x) for x in logs]
  if kind == "arithmetic":
    return [sum(bounded(x) for x in logs) / len(logs)] * len(logs)
  return [bounded(sum(logs) / len(logs))] * len(logs)


def objective(w, a, s, from_guide=False):
  """What one token adds, before weights."""
  if from_guide:
    return min(w, s["guide_cap"]) * a
  value = min(w * a, min(max(w, 1 - s["eps_low"]), 1 + s["eps_high"]) * a)
  return max(value, s["dual_clip"] * a) if s.get("dual_clip") and a < 0 else value


def loss(x, s):
  """The loss f64 and its metrics.

  x: logp, logp_old, advantages, mask, weights and, where there are any, guided, logp_sampler, logp_reference.
  """
  total = 0.0
  seen = {
    "clip/low": [],
    "clip/high": [],
    "ratio/mean": [],
    "clip/guide": [],
    "mismatch/weight": [],
    "kl/reference": [],
  }
  logp = np.asarray(x["logp"], np.float64)
  logp_old = np.asarray(x["logp_old"], np.float64)
  mask = x["mask"]
  for i, j in zip(*np.nonzero(mask.any(-1)), strict=True):
    steps = np.flatnonzero(mask[i, j])
    from_guide = x.get("guided") is not None and bool(x["guided"][i, j])
    for k, w in zip(
      steps,
      ratios(s.get("ratio") or "token", [logp[i, j, k] - logp_old[i, j, k] for k in steps]),
      strict=True,
    ):
      a = float(x["advantages"][i, j, k])
      value = objective(w, a, s, from_guide)
      if from_guide:
        seen["clip/guide"].append(w > s["guide_cap"])
      else:
        seen["clip/low"].append(w < 1 - s["eps_low"] and a < 0)
        seen["clip/high"].append(w > 1 + s["eps_high"] and a > 0)
        seen["ratio/mean"].append(w)
      if s.get("tis_cap"):
        trust = min(math.exp(logp_old[i, j, k] - float(x["logp_sampler"][i, j, k])), s["tis_cap"])
        seen["mismatch/weight"] += [] if from_guide else [trust]
        value *= trust
      if s.get("kl_weight") and not from_guide:
        log_r = float(x["logp_reference"][i, j, k]) - logp[i, j, k]
        seen["kl/reference"].append(math.exp(log_r) - 1 - log_r)
        value -= s["kl_weight"] * seen["kl/reference"][-1]
      total -= x["weights"][i, j, k] * value
  return total, {name: sum(values) / len(values) for name, values in seen.items() if values}


def numeric_gradient(f, x, places, step=1e-6):
  """Central differences of f at `places`, f64 of x's shape."""
  out = np.zeros(x.shape)
  for place in places:
    up = np.array(x, np.float64)
    down = np.array(x, np.float64)
    up[place] += step
    down[place] -= step
    out[place] = (f(up) - f(down)) / (2 * step)
  return out
