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

  With a guide, groups in which the policy itself has no correct completion are aggregated
  separately and weighted by lambda_zero.
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


def clip(w, a, s):
  """Returns the clipped objective of a token with ratio w and advantage a."""
  value = min(w * a, min(max(w, 1 - s["eps_low"]), 1 + s["eps_high"]) * a)
  return max(value, s["dual_clip"] * a) if s.get("dual_clip") and a < 0 else value


def clip_flags(w, a, s):
  return {"clip/low": w < 1 - s["eps_low"] and a < 0, "clip/high": w > 1 + s["eps_high"] and a > 0}


def objective(s, w, fixed_w, a, new, fixed, old, selected):
  """Returns the objective of one token without its weight, and its flags for the metrics.

  w: the ratio. new, old: log-probs. fixed_w, fixed: the values of w and new where the formula has a
    stop-gradient.
  """
  kind = s["objective"]
  log_ratio = min(max(new - old, -20.0), 20.0)
  if kind == "clip":
    return clip(w, a, s), clip_flags(w, a, s)
  if kind == "cispo":
    low = 1 - s["eps_low"]
    high = 1 + s["eps_high"]
    flags = {"clip/low": fixed_w < low, "clip/high": fixed_w > high}
    return min(max(fixed_w, low), high) * a * new, flags
  if kind == "sapo":
    tau = s["tau_positive"] if a > 0 else s["tau_negative"]
    gate = 1 / (1 + math.exp(-min(tau * (w - 1), 700.0)))
    return 4 / tau * gate * a, {"clip/soft": 4 * gate * (1 - gate) < 0.5}
  if kind == "dppo":
    change = math.exp(fixed) - math.exp(old)
    too_high = a > 0 and change > s["delta_high"]
    too_low = a <= 0 and change < -s["delta_low"]
    flags = {"clip/low": too_low, "clip/high": too_high, "clip/cap": fixed_w > s["ratio_cap"]}
    weight = 0.0 if too_high or too_low else min(fixed_w, s["ratio_cap"])
    return weight * a * new, flags
  if kind == "aspo":
    weight = 1 / fixed_w if a > 0 else fixed_w
    too_high = a > 0 and fixed_w > 1 + s["eps_high"]
    too_low = a <= 0 and fixed_w < 1 - s["eps_low"]
    flags = {"clip/low": too_low, "clip/high": too_high, "clip/cap": weight > s["ratio_cap"]}
    return (0.0 if too_high or too_low else min(weight, s["ratio_cap"])) * a * new, flags
  if kind == "clip_cov":
    value = 0.0 if selected else clip(w, a, s)
    return value, clip_flags(w, a, s) | {"clip/selected": selected}
  if kind == "kl_cov":
    penalty = s["kl_cov_coef"] * abs(log_ratio) if selected else 0.0
    return w * a - penalty, {"clip/selected": selected}
  if kind == "fipo":
    return clip(w, a, s), clip_flags(w, a, s)
  assert kind == "stare", f"the objective {kind!r} has no loop here"
  weight = s["surprise_weight"] if selected else 1.0
  return weight * clip(w, a, s), clip_flags(w, a, s) | {"clip/selected": selected}


def gmpo(s, log_ratios, a):
  """Returns the objective of a completion with advantage a, and the flags of its tokens."""
  sign = (a > 0) - (a < 0)
  bounded = []
  flags = []
  for x in log_ratios:
    x = min(max(x, -20.0), 20.0)
    clipped = min(max(x, -s["eps_low"]), s["eps_high"])
    bounded.append(sign * min(sign * x, sign * clipped))
    flags.append(
      {"clip/low": x < -s["eps_low"] and a < 0, "clip/high": x > s["eps_high"] and a > 0}
    )
  return a * math.exp(sum(bounded) / len(bounded)), flags


def influences(s, log_ratios, advantages):
  """Returns FIPO's influence of each token of a completion, and whether it was clipped."""
  discount = 0.5 ** (1 / s["half_life"])
  counted = [x if math.exp(x) <= (s["dual_clip"] or math.inf) else 0.0 for x in log_ratios]
  out = []
  for t, a in enumerate(advantages):
    raw = math.exp(sum(discount ** (k - t) * counted[k] for k in range(t, len(counted))))
    value = min(max(raw, 1 - s["influence_low"]), 1 + s["influence_high"])
    if a < 0 and math.exp(log_ratios[t]) > s["safe_ratio"]:
      value = min(value, 1.0)
    out.append((value, value != raw))
  return out


def covariance_terms(x, tokens):
  """Returns {token: (A - mean A) (log pi - mean log pi)} over the given tokens."""
  advantages = [float(x["advantages"][u]) for u in tokens]
  log_probs = [float(x["log_probs"][u]) for u in tokens]
  mean_a = sum(advantages) / len(tokens)
  mean_l = sum(log_probs) / len(tokens)
  pairs = zip(advantages, log_probs, strict=True)
  terms = [(a - mean_a) * (log_prob - mean_l) for a, log_prob in pairs]
  return dict(zip(tokens, terms, strict=True))


def select(x, s, entropy=None, draws=None):
  """Returns the tokens that the objective selects, bool[n, g, t]; None if it selects none.

  x: as in `loss`. entropy: f[n, g, t] of the sampling policy. draws: random integers [n, g, t]; the
  candidates with the largest are chosen.
  """
  kind = s["objective"]
  if kind not in ("clip_cov", "kl_cov", "stare"):
    return None
  mask = np.asarray(x["mask"])
  tokens = list(zip(*np.nonzero(mask), strict=True))
  chosen = np.zeros(mask.shape, bool)
  if not tokens:
    return chosen
  count = max(1, math.floor(s["selected_share"] * len(tokens) + 1e-9))
  if kind == "stare":
    if sum(float(entropy[u]) for u in tokens) / len(tokens) >= s["entropy_gate"]:
      return chosen
    rewarded = [u for u in tokens if x["advantages"][u] > 0]
    count = max(1, math.ceil(s["selected_share"] * len(rewarded) - 1e-9))
    picked = sorted(rewarded, key=lambda u: x["log_probs"][u])[:count]
  elif kind == "kl_cov":
    terms = covariance_terms(x, tokens)
    picked = sorted(tokens, key=lambda u: -terms[u])[:count]
  else:
    terms = covariance_terms(x, tokens)
    ratio_of = {}
    for i, j in zip(*np.nonzero(mask.any(-1)), strict=True):
      steps = np.flatnonzero(mask[i, j])
      log_ratios = [
        float(x["log_probs"][i, j, k]) - float(x["log_probs_old"][i, j, k]) for k in steps
      ]
      for k, w in zip(steps, ratios(s["ratio"], log_ratios), strict=True):
        ratio_of[i, j, k] = w
    free = [u for u in tokens if not any(clip_flags(ratio_of[u], x["advantages"][u], s).values())]
    candidates = [u for u in free if s["cov_low"] < terms[u] < s["cov_high"]]
    picked = sorted(candidates, key=lambda u: -int(draws[u]))[:count]
  for u in picked:
    chosen[u] = True
  return chosen


def loss(x, s):
  """Returns the loss, a float, and its metrics.

  x: log_probs, log_probs_old, advantages, mask, weights and, if any, guided, selected,
    log_probs_sampler, log_probs_reference, and `fixed`: the log-probs that the terms with a
    stop-gradient use (default: log_probs).
  """
  total = 0.0
  values_of = {}
  record = lambda name, value: values_of.setdefault(name, []).append(value)
  new = np.asarray(x["log_probs"], np.float64)
  old = np.asarray(x["log_probs_old"], np.float64)
  fixed = np.asarray(x.get("fixed", x["log_probs"]), np.float64)
  mask = x["mask"]
  for i, j in zip(*np.nonzero(mask.any(-1)), strict=True):
    steps = np.flatnonzero(mask[i, j])
    from_guide = x.get("guided") is not None and bool(x["guided"][i, j])
    log_ratios = [new[i, j, k] - old[i, j, k] for k in steps]
    fixed_log_ratios = [fixed[i, j, k] - old[i, j, k] for k in steps]
    kind = s.get("ratio") or "token"
    w_of = ratios(kind, log_ratios)
    fixed_w_of = ratios(kind, fixed_log_ratios)
    if kind == "gspo_token":
      moved = [math.exp(new[i, j, k] - fixed[i, j, k]) for k in steps]
      w_of = [w * m for w, m in zip(fixed_w_of, moved, strict=True)]
    if s["objective"] == "fipo":
      credit = [float(x["advantages"][i, j, k]) for k in steps]
      influence = influences(s, fixed_log_ratios, credit)
    if s["objective"] == "gmpo":
      completion = gmpo(s, log_ratios, float(x["advantages"][i, j, steps[0]]))
    for index, k in enumerate(steps):
      w = w_of[index]
      a = float(x["advantages"][i, j, k])
      selected = x.get("selected") is not None and bool(x["selected"][i, j, k])
      if from_guide:
        value = min(w, s["guide_cap"]) * a
        record("clip/guide", w > s["guide_cap"])
      else:
        if s["objective"] == "gmpo":
          value = completion[0]
          flags = completion[1][index]
        else:
          of_token = (new[i, j, k], fixed[i, j, k], old[i, j, k])
          factor, limited = influence[index] if s["objective"] == "fipo" else (1.0, False)
          value, flags = objective(s, w, fixed_w_of[index], factor * a, *of_token, selected)
          if s["objective"] == "fipo":
            flags["clip/influence"] = limited
        for name, flag in flags.items():
          record(name, flag)
        record("ratio/mean", w)
      if s.get("tis_cap"):
        trust = min(math.exp(old[i, j, k] - float(x["log_probs_sampler"][i, j, k])), s["tis_cap"])
        value *= trust
        if not from_guide:
          record("mismatch/weight", trust)
      if s.get("kl_weight") and not from_guide:
        log_r = float(x["log_probs_reference"][i, j, k]) - new[i, j, k]
        divergence = 0.5 * log_r**2
        if s["kl_estimator"] != "k2":
          divergence = math.exp(log_r) - 1 - log_r
        if s["kl_estimator"] == "k3_ratio":
          divergence *= math.exp(log_ratios[index])
        value -= s["kl_weight"] * divergence
        record("kl/reference", divergence)
      total -= x["weights"][i, j, k] * value
  metrics = {name: sum(values) / len(values) for name, values in values_of.items()}
  return total, metrics | diagnostics(x, values_of["ratio/mean"])


def diagnostics(x, own_ratios):
  """Returns the ratio and covariance metrics, computed over the policy's own tokens."""
  mask = np.asarray(x["mask"])
  if x.get("guided") is not None:
    mask = mask & ~np.asarray(x["guided"])[..., None]
  terms = covariance_terms(x, list(zip(*np.nonzero(mask), strict=True)))
  ordered = sorted(own_ratios)
  quantile = lambda share: ordered[max(math.ceil(share * len(ordered) - 1e-4), 1) - 1]
  return {
    "ratio/ess": sum(ordered) ** 2 / (len(ordered) * sum(w * w for w in ordered)),
    "ratio/p01": quantile(0.01),
    "ratio/p50": quantile(0.5),
    "ratio/p99": quantile(0.99),
    "covariance/mean": sum(terms.values()) / len(terms),
  }


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
