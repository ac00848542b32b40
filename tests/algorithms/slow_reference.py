"""The papers' equations as slow float64 loops over single tokens, for comparison; nothing here uses the package."""
import math

import numpy as np


def random_batch(seed, n=6, g=4, t=5):
  """Ragged completions; group 0 is all right, group 1 all wrong, the others mixed. Padding holds large numbers."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, t + 1, (n, g))
  mask = np.arange(t) < lengths[..., None]
  correct = rng.random((n, g)) < 0.5
  correct[0], correct[1] = True, False
  for i in range(2, n):
    right, wrong = rng.permutation(g)[:2]
    correct[i, right], correct[i, wrong] = True, False
  entropy = rng.gamma(0.7, 1.0, (n, g, t)).astype(np.float32)
  entropy[rng.random((n, g, t)) < 0.1] = 0.0
  return {"entropy": np.where(mask, entropy, 1e6).astype(np.float32), "mask": mask, "correct": correct,
          "reward": np.where(correct, 1.0, -1.0).astype(np.float32), "penalty": -rng.random((n, g)).astype(np.float32)}


def random_policies(seed, mask, spread=0.4):
  """New and old log-probs f32[n, g, t] whose ratios fall on both sides of the clip range, and advantages."""
  rng = np.random.default_rng(seed)
  old = -rng.gamma(1.0, 1.0, mask.shape)
  new = old + spread * rng.standard_normal(mask.shape)
  advantages = rng.standard_normal(mask.shape)
  return tuple(np.where(mask, x, 9e3).astype(np.float32) for x in (new, old, advantages))


def informative(correct):
  """Groups with 0 < n < G, by number."""
  return [i for i in range(len(correct)) if 0 < sum(correct[i]) < len(correct[i])]


def units_of(mask, correct):
  """The loss tokens (i, j, k) of the batch."""
  _, g, t = mask.shape
  return [(i, j, k) for i in informative(correct) for j in range(g) for k in range(t) if mask[i, j, k]]


def same_set(a, b, compare, scope):
  """Whether tokens a and b, both in O+ or both in O-, are compared with each other."""
  same_group = a[0] == b[0] or scope == "batch"
  return {"position": same_group and a[2] == b[2], "sequence": a[:2] == b[:2], "matrix": same_group}[compare]


def share(x, unit, side, compare, scope):
  """d * x / sum x of the unit's set: eq. 2."""
  members = [other for other in side if same_set(unit, other, compare, scope)]
  total = sum(x[other] for other in members)
  return len(members) * x[unit] / total if total > 0 else 1.0


def zscores(values, norm_scope):
  """Values {unit: r} to {unit: (r - mean) / std}, over the whole batch or each group; 0 where std < 1e-6."""
  out = {}
  for unit in values:
    pool = [r for other, r in values.items() if norm_scope == "batch" or other[0] == unit[0]]
    mean = sum(pool) / len(pool)
    std = math.sqrt(sum((r - mean) ** 2 for r in pool) / len(pool))
    out[unit] = 0.0 if std < 1e-6 else (values[unit] - mean) / std
  return out


def two_sided(shaped_plus, shaped_minus, correct, norm_scope, sign_guard):
  """R+ and R- each z-scored with the zeros of the other side in."""
  units = [*shaped_plus, *shaped_minus]
  plus = zscores({u: shaped_plus.get(u, 0.0) for u in units}, norm_scope)
  minus = zscores({u: shaped_minus.get(u, 0.0) for u in units}, norm_scope)
  advantages = {u: plus[u] if correct[u[:2]] else minus[u] for u in units}
  if sign_guard:
    advantages = {u: max(a, 0.0) if correct[u[:2]] else min(a, 0.0) for u, a in advantages.items()}
  return advantages


def gtpo_advantages(batch, *, alpha1, alpha2, compare, scope, norm_scope, h_floor, sign_guard=False):
  """Final paper, eqs. 3-7: f64[n, g, t]."""
  entropy, mask, correct = batch["entropy"].astype(np.float64), batch["mask"], batch["correct"]
  tokens = units_of(mask, correct)
  right, wrong = [u for u in tokens if correct[u[:2]]], [u for u in tokens if not correct[u[:2]]]
  bonus, penalty = {u: entropy[u] for u in right}, {u: 1 / max(entropy[u], h_floor) for u in wrong}
  plus = {u: alpha1 + alpha2 * share(bonus, u, right, compare, scope) for u in right}
  minus = {u: -alpha1 - alpha2 * share(penalty, u, wrong, compare, scope) for u in wrong}
  out = np.zeros(mask.shape)
  for unit, value in two_sided(plus, minus, correct, norm_scope, sign_guard).items():
    out[unit] = value
  return out


def completion_entropy(row, h_floor, mean):
  """H^ of one completion from its tokens' entropies."""
  if mean == "geometric":
    return math.exp(sum(math.log(max(h, h_floor)) for h in row) / len(row))
  return sum(row) / len(row)


def grpo_s_advantages(batch, *, beta1, beta2, scope, norm_scope, h_floor, mean="arithmetic", sign_guard=False):
  """Final paper, eqs. 8-11: f64[n, g, t], the same at every token of a completion."""
  entropy, mask, correct = batch["entropy"].astype(np.float64), batch["mask"], batch["correct"]
  completions = [(i, j, 0) for i in informative(correct) for j in range(mask.shape[1]) if mask[i, j].any()]
  whole = {u: completion_entropy(entropy[u[:2]][mask[u[:2]]].tolist(), h_floor, mean) for u in completions}
  right, wrong = [u for u in completions if correct[u[:2]]], [u for u in completions if not correct[u[:2]]]
  inverse = {u: 1 / max(whole[u], h_floor) for u in wrong}
  plus = {u: beta1 + beta2 * share(whole, u, right, "position", scope) for u in right}
  minus = {u: -beta1 - beta2 * share(inverse, u, wrong, "position", scope) for u in wrong}
  out = np.zeros(mask.shape)
  for (i, j, _), value in two_sided(plus, minus, correct, norm_scope, sign_guard).items():
    out[i, j, mask[i, j]] = value
  return out


def group_zscore_advantages(batch, *, contrast):
  """GRPO and DAPO: (r - mean) / std of the group's rewards plus penalties."""
  mask, correct = batch["mask"], batch["correct"]
  out = np.zeros(mask.shape)
  for i in informative(correct) if contrast else range(len(mask)):
    rewards = {(i, j, 0): float(batch["reward"][i, j]) + float(batch["penalty"][i, j]) for j in range(mask.shape[1])}
    for (_, j, _), value in zscores(rewards, "group").items():
      out[i, j, mask[i, j]] = value
  return out


def loss(logp, logp_old, advantages, mask, *, ratio, average, eps_low, eps_high):
  """The clipped loss as a float64 number.

  ratio: "token", "arithmetic" or "geometric". average: "token", "completion".
  """
  logp, logp_old = np.asarray(logp, np.float64), np.asarray(logp_old, np.float64)
  n, g, _ = mask.shape
  clipped = lambda w, a: min(w * a, min(max(w, 1 - eps_low), 1 + eps_high) * a)
  bounded = lambda x: math.exp(min(max(x, -20.0), 20.0))
  total, completions, tokens = 0.0, 0, int(mask.sum())
  for i in range(n):
    for j in range(g):
      steps = np.flatnonzero(mask[i, j])
      if not len(steps):
        continue
      completions += 1
      logs = [logp[i, j, k] - logp_old[i, j, k] for k in steps]
      if ratio == "token":
        weights = [bounded(x) for x in logs]
      elif ratio == "arithmetic":
        weights = [sum(bounded(x) for x in logs) / len(logs)] * len(logs)
      else:
        weights = [bounded(sum(logs) / len(logs))] * len(logs)
      terms = [clipped(w, float(advantages[i, j, k])) for w, k in zip(weights, steps, strict=True)]
      total += sum(terms) / (1 if average == "token" else len(terms))
  return -total / (tokens if average == "token" else completions)


def numeric_gradient(f, x, places, step=1e-6):
  """Central differences of f at `places`, f64 of x's shape."""
  out = np.zeros(x.shape)
  for place in places:
    up, down = np.array(x, np.float64), np.array(x, np.float64)
    up[place] += step
    down[place] -= step
    out[place] = (f(up) - f(down)) / (2 * step)
  return out
