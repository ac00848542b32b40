"""The papers' equations as slow float64 loops over tokens; nothing here uses the package.

`s` is a dict of a recipe's settings. A unit of credit is (i, j, k): prompt, completion, step, with
k = 0 for a whole completion.
"""

import math
from fractions import Fraction

import numpy as np

NOTHING = lambda s, share: 0.0
FROM_1 = lambda weight, share: 1 + weight * share
UPPER = lambda base, kappa: base + base / kappa if kappa else math.inf

# The reward of a unit, given its share of the entropy (on O+) or of the inverse entropy (on O-).
TOKEN_LEVEL = {
  "gtpo": (
    lambda s, share: s["alpha1"] + s["alpha2"] * share,
    lambda s, share: -s["alpha1"] - s["alpha2"] * share,
  ),
  "gtpo_v1": (lambda s, share: FROM_1(s["alpha"], share), NOTHING),
  "gtpo_v1_clipped": (
    lambda s, share: min(
      max(s["alpha1"] + s["alpha2"] * share, s["floor"]), UPPER(s["alpha1"], s["kappa"])
    ),
    NOTHING,
  ),
  "gtpo_v2": (
    lambda s, share: min(FROM_1(s["alpha"], share), UPPER(1, s["kappa"])),
    lambda s, share: -share,
  ),
}
# Their tokens have credit of their own, whatever the shaping.
NOT_SHAPED = ("otb", "vineppo", "spo_chain")
SEQUENCE_LEVEL = {
  "grpo_s": (
    lambda s, share: s["beta1"] + s["beta2"] * share,
    lambda s, share: -s["beta1"] - s["beta2"] * share,
  ),
  "grpo_s_v1": (lambda s, share: FROM_1(s["beta"], share), NOTHING),
  "grpo_s_v2": (lambda s, share: FROM_1(s["beta"], share), lambda s, share: -share),
}
BY_ENTROPY = TOKEN_LEVEL | SEQUENCE_LEVEL
TWO_COLLECTIONS = ("gtpo", "gtpo_v2", "grpo_s", "grpo_s_v2")
CENTRED = ("dr_grpo", "dppo")
# All other recipes remove groups without contrast.
EVERY_GROUP = (
  "grpo",
  "dr_grpo",
  "gspo",
  "cispo",
  "sapo",
  "gmpo",
  "gspo_token",
  "dppo",
  "clip_cov",
  "kl_cov",
  "rloo",
  "reinforce_pp",
  "max_rl",
  "otb",
  "vineppo",
  "spo_chain",
  "gdpo",
  "pass_at_k",
  "pass_k_max",
  "w_reinforce",
  "gigpo",
  "turn_return",
  "mt_grpo",
  "rlsd",
)


def kept_groups(name, batch, contrast=None):
  """Returns the indices of the groups that are trained on.

  contrast: whether groups without contrast are removed; None for what is published.
  """
  every_group = name in EVERY_GROUP if contrast is None else not contrast
  alive = batch["mask"].any(-1)
  correct = batch["correct"]
  guided = batch.get("guided")
  if guided is None:
    guided = np.zeros_like(correct)
  kept = []
  for i in range(len(correct)):
    own = [j for j in range(len(correct[i])) if alive[i, j] and not guided[i, j]]
    guide = [j for j in range(len(correct[i])) if alive[i, j] and guided[i, j]]
    right = sum(bool(correct[i, j]) for j in own)
    rescued = len(own) > 0 and right == 0 and any(correct[i, j] for j in guide)
    if every_group or 0 < right < len(own) or rescued:
      kept.append(i)
  return kept


def loss_mask(name, batch, s):
  """Returns the tokens of the kept groups, bool[n, g, t].

  With `forking_share`, only that share with the highest entropy, ties included.
  """
  mask = np.zeros_like(batch["mask"])
  for i in kept_groups(name, batch, s["contrast"]):
    mask[i] = batch["mask"][i]
  if "value_gains" in batch:
    mask &= batch["value_gains"] == batch["value_gains"]  # NaN: not learned from
  if s.get("forking_share") and mask.any():
    count = math.ceil(Fraction(str(s["forking_share"])) * int(mask.sum()))
    threshold = sorted(batch["entropy"][mask].tolist(), reverse=True)[count - 1]
    mask &= batch["entropy"] >= threshold
  return mask


def share(x, unit, side, compare, scope, places=None):
  """Returns d * x / sum x over the unit's set: eq. 2. `side` lists the units of O+ or of O-.

  `places` has the place of each token, and is None for completions.
  """
  group_of = {"group": lambda u: u[0], "batch": lambda u: None}[scope]
  place_of = lambda u: places[u] if places else 0
  set_of = {
    "position": lambda u: (group_of(u), place_of(u)),
    "turn": lambda u: (group_of(u), place_of(u)),
    "sequence": lambda u: u[:2],
    "matrix": group_of,
  }[compare]
  members = [x[other] for other in side if set_of(other) == set_of(unit)]
  total = sum(members)
  return len(members) * x[unit] / total if total > 0 else 1.0


def places_of(mask, compare):
  """Maps each drawn token to (turn, place in it), or to the number of those drawn before it."""
  places = {}
  for steps in steps_of(mask, "turn"):
    before = 0
    for turn, step in enumerate(steps):
      for place, token in enumerate(step):
        places[token] = (turn, place) if compare == "turn" else before
        before += 1
  return places


def completion_entropy(row, h_floor, mean):
  """Returns the entropy of one completion from its tokens' entropies."""
  if mean == "geometric":
    return math.exp(sum(math.log(max(h, h_floor)) for h in row) / len(row))
  return sum(row) / len(row)


def units(name, batch, s):
  """Returns {unit: entropy} for the kept groups; the units are tokens or completions."""
  mask = batch["mask"]
  entropy = batch["entropy"].astype(np.float64)
  kept = kept_groups(name, batch, s["contrast"])
  if name in TOKEN_LEVEL:
    tokens = zip(*np.nonzero(mask), strict=True)
    return {(i, j, k): entropy[i, j, k] for i, j, k in tokens if i in kept}
  completions = zip(*np.nonzero(mask.any(-1)), strict=True)
  rows = {(i, j, 0): entropy[i, j][mask[i, j]].tolist() for i, j in completions if i in kept}
  if name not in SEQUENCE_LEVEL:
    return dict.fromkeys(rows)
  return {unit: completion_entropy(row, s["h_floor"], s["mean"]) for unit, row in rows.items()}


def shaped_rewards(name, batch, s):
  """Returns two dicts {unit: reward}, for O+ and O-, length penalties included."""
  entropy = units(name, batch, s)
  correct = batch["correct"]
  penalty = np.zeros(correct.shape)
  if batch.get("penalty") is not None:
    penalty = batch["penalty"].astype(np.float64)
  right = [u for u in entropy if correct[u[:2]]]
  wrong = [u for u in entropy if not correct[u[:2]]]
  if name not in BY_ENTROPY:
    reward = batch["reward"].astype(np.float64)
    if s["turn_credit"] == "reward":
      for steps in steps_of(batch["mask"], "turn"):
        reward[steps[0][0][:2]] -= sum(float(batch["turn_reward"][step[0]]) for step in steps[:-1])
    return tuple({u: reward[u[:2]] + penalty[u[:2]] for u in side} for side in (right, wrong))
  inverse = {u: 1 / max(entropy[u], s["h_floor"]) for u in wrong}
  compare = s.get("compare") or "position"
  places = places_of(batch["mask"], compare) if name in TOKEN_LEVEL else None
  sets = (compare, s["scope"], places)
  of_right, of_wrong = BY_ENTROPY[name]
  return (
    {u: of_right(s, share(entropy, u, right, *sets)) + penalty[u[:2]] for u in right},
    {u: of_wrong(s, share(inverse, u, wrong, *sets)) + penalty[u[:2]] for u in wrong},
  )


def normalised(values, norm_scope, by_std=True):
  """Maps {unit: r} to {unit: (r - mean) / std}, over the batch or each group; 0 if std < 1e-6."""
  scope_of = lambda unit: None if norm_scope == "batch" else unit[0]
  pools = {}
  for unit, value in values.items():
    pools.setdefault(scope_of(unit), []).append(value)
  means = {key: sum(pool) / len(pool) for key, pool in pools.items()}
  variances = {
    key: sum((r - means[key]) ** 2 for r in pool) / len(pool) for key, pool in pools.items()
  }
  out = {}
  for unit, value in values.items():
    deviation = value - means[scope_of(unit)]
    std = math.sqrt(variances[scope_of(unit)])
    if not by_std:
      out[unit] = deviation
    else:
      out[unit] = deviation / std if std >= 1e-6 else 0.0
  return out


def _groups(rewards):
  """Returns {group: [rewards of its completions]}."""
  groups = {}
  for (i, _, _), r in rewards.items():
    groups.setdefault(i, []).append(r)
  return groups


def rloo(rewards, mask, s):
  """Maps {unit: r} to {unit: r - mean of the others in the group}."""
  groups = _groups(rewards)
  out = {}
  for unit, r in rewards.items():
    others = len(groups[unit[0]]) - 1
    out[unit] = r - (sum(groups[unit[0]]) - r) / others if others else 0.0
  return out


def max_rl(rewards, mask, s):
  """Maps {unit: r} to {unit: (r - mean) / mean}; 0 if the mean is not positive."""
  means = {key: sum(pool) / len(pool) for key, pool in _groups(rewards).items()}
  return {
    u: (r - means[u[0]]) / means[u[0]] if means[u[0]] >= 1e-6 else 0.0 for u, r in rewards.items()
  }


def reinforce_pp(rewards, mask, s):
  """Subtracts the group's mean, then z-scores over all tokens, each with its completion's value."""
  means = {key: sum(pool) / len(pool) for key, pool in _groups(rewards).items()}
  return over_tokens({u: r - means[u[0]] for u, r in rewards.items()}, mask)


def over_tokens(values, mask):
  """Maps {unit: x} to z-scores over all tokens, each with its completion's value."""
  tokens = [values[u] for u in values for _ in range(int(mask[u[:2]].sum()))]
  mean = sum(tokens) / len(tokens)
  std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens))
  return {u: (x - mean) / std if std >= 1e-6 else 0.0 for u, x in values.items()}


def qae(rewards, mask, s):
  """Subtracts the smallest reward that a fraction of the group does not exceed; divides by std."""
  out = {}
  for group, pool in _groups(rewards).items():
    needed = Fraction(str(s["baseline_quantile"])) * len(pool)
    baseline = min(r for r in pool if sum(other <= r for other in pool) >= needed)
    mean = sum(pool) / len(pool)
    std = math.sqrt(sum((r - mean) ** 2 for r in pool) / len(pool))
    for unit, r in rewards.items():
      if unit[0] == group:
        out[unit] = (r - baseline) / std if std >= 1e-6 else 0.0
  return out


def pass_k_max(rewards, mask, s):
  """Maps the best unit of each group to its lead over the second best, and all others to 0."""
  ordered = {group: sorted(pool) for group, pool in _groups(rewards).items()}
  lead = lambda pool: pool[-1] - pool[-2] if len(pool) > 1 else 0.0
  return {u: lead(ordered[u[0]]) if r == ordered[u[0]][-1] else 0.0 for u, r in rewards.items()}


def pass_at_k(correct, penalty, kept, k):
  """Returns A+ and A- of 2508.10751, plus the centred penalty over s; `kept` lists the units."""
  out = {}
  for group in {u[0] for u in kept}:
    members = [u for u in kept if u[0] == group]
    count = len(members)
    size = min(k, count)
    wrong = sum(not correct[u[:2]] for u in members)
    mean = 1 - math.comb(wrong, size) / math.comb(count, size)
    std = math.sqrt(mean * (1 - mean))
    average = sum(float(penalty[u[:2]]) for u in members) / count
    for u in members:
      a = 1 - mean
      if not correct[u[:2]]:
        a -= math.comb(wrong - 1, size - 1) / math.comb(count - 1, size - 1)
      out[u] = (a + float(penalty[u[:2]]) - average) / std if std > 0 else 0.0
  return out


def otb(batch, rewards):
  """Maps each drawn token to its reward minus the mean of the rewards weighted by W."""
  drawn = {u[:2]: np.flatnonzero(batch["mask"][u[:2]]) for u in rewards}
  norms = batch["score_norms"].astype(np.float64)
  out = {}
  for unit, r in rewards.items():
    for place, k in enumerate(drawn[unit[:2]]):
      pool = []
      for other, other_reward in rewards.items():
        steps = drawn[other[:2]]
        if other[0] == unit[0] and len(steps) > place:
          pool.append((other_reward, sum(norms[(*other[:2], j)] for j in steps[: place + 1])))
      baseline = 0.0
      if len(pool) > 1:
        baseline = sum(x * w for x, w in pool) / sum(w for _, w in pool)
      out[*unit[:2], k] = r - baseline
  return out


def gdpo(batch, kept):
  """Z-scores each part and the penalty in its group, then their weighted sum over all tokens."""
  penalty = batch.get("penalty")
  total = dict.fromkeys(kept, 0.0)
  for k in range(batch["parts"].shape[-1]):
    own = normalised({u: float(batch["parts"][*u[:2], k]) for u in kept}, "group")
    for u in kept:
      total[u] += float(batch["part_weights"][u[0], k]) * own[u]
  if penalty is not None:
    own = normalised({u: float(penalty[u[:2]]) for u in kept}, "group")
    total = {u: x + own[u] for u, x in total.items()}
  return over_tokens(total, batch["mask"])


CRITIC_FREE = {
  "rloo": rloo,
  "max_rl": max_rl,
  "reinforce_pp": reinforce_pp,
  "qae": qae,
  "pass_k_max": pass_k_max,
}


def advantages(name, batch, s):
  """Returns the advantages, f64[n, g, t], 0 outside `loss_mask`."""
  plus, minus = shaped_rewards(name, batch, s)
  every = [*plus, *minus]
  norm_scope = s.get("norm_scope") or "group"
  if name in TWO_COLLECTIONS:  # each includes the zeros of the other side, except with "own"
    own = s.get("norm_sides") == "own"
    of_plus = normalised(plus if own else {u: plus.get(u, 0.0) for u in every}, norm_scope)
    of_minus = normalised(minus if own else {u: minus.get(u, 0.0) for u in every}, norm_scope)
    out = {u: of_plus[u] if u in plus else of_minus[u] for u in every}
  elif name in CRITIC_FREE:
    out = CRITIC_FREE[name](plus | minus, batch["mask"], s)
  elif name == "pass_at_k":
    penalty = batch.get("penalty")
    penalty = np.zeros(batch["correct"].shape) if penalty is None else penalty
    out = pass_at_k(batch["correct"], penalty, every, s["pass_k"])
  elif name == "otb":
    out = otb(batch, plus | minus)
  elif "value_gains" in batch:
    out = {u: float(batch["value_gains"][u]) for u in np.ndindex(batch["mask"].shape)}
  elif name == "gdpo":
    out = gdpo(batch, every)
  elif name == "w_reinforce":
    out = {u: s["positive_weight"] * r for u, r in plus.items()} | minus
  else:
    out = normalised(plus | minus, norm_scope, by_std=name not in CENTRED)
  if s.get("sign_guard"):
    out = {u: max(a, 0.0) if u in plus else min(a, 0.0) for u, a in out.items()}
  mask = loss_mask(name, batch, s)
  per_token = np.zeros(mask.shape)
  of_turns = turn_advantages(batch, s)
  for i, j, k in zip(*np.nonzero(mask), strict=True):
    a = out[i, j, k if name in TOKEN_LEVEL or name in NOT_SHAPED else 0]
    if of_turns:
      a = s["outcome_weight"] * a + s["step_weight"] * of_turns[i, j, k]
    if s.get("bonus_alpha"):
      a += min(s["bonus_alpha"] * float(batch["entropy"][i, j, k]), abs(a) / s["bonus_kappa"])
    if s.get("teacher_mix") is not None:
      sign = int(a > 0) - int(a < 0)
      weight = math.exp(min(max(-sign * float(batch["divergence"][i, j, k]), -20), 20))
      weight = min(max(weight, 1 - s["teacher_clip"]), 1 + s["teacher_clip"])
      a *= 1 - s["teacher_mix"] + s["teacher_mix"] * weight
    per_token[i, j, k] = a
  return empg(per_token, batch["entropy"], mask, s) if s.get("step") else per_token


def steps_of(mask, kind):
  """Returns the steps of each completion as lists of tokens: single tokens, or runs of them."""
  completions = []
  for i, j in zip(*np.nonzero(mask.any(-1)), strict=True):
    steps = []
    for k in np.flatnonzero(mask[i, j]):
      if kind == "turn" and k and mask[i, j, k - 1]:
        steps[-1].append((i, j, k))
      else:
        steps.append([(i, j, k)])
    completions.append(steps)
  return completions


def turn_advantages(batch, s):
  """Maps each drawn token to the advantage of its turn; {} if turns are not compared."""
  if s["turn_credit"] == "none":
    return {}
  values = {}  # {(completion, number of the turn): (value, compared with, tokens)}
  out = {}
  for steps in steps_of(batch["mask"], "turn"):
    following = 0.0
    for number in reversed(range(len(steps))):
      step = steps[number]
      reward = float(batch["turn_reward"][step[0]])
      following = reward + s["turn_discount"] * following
      with_whom = (step[0][0], number)
      if s["turn_credit"] == "state":
        with_whom = (step[0][0], "state", int(batch["turn_state"][step[0]]))
      if s["turn_credit"] == "reward" and number == len(steps) - 1:
        out |= dict.fromkeys(step, 0.0)
      else:
        value = reward if s["turn_credit"] == "reward" else following
        values[step[0][:2], number] = (value, with_whom, step)
  for value, with_whom, step in values.values():
    pool = [other for other, key, _ in values.values() if key == with_whom]
    mean = sum(pool) / len(pool)
    std = math.sqrt(sum((x - mean) ** 2 for x in pool) / len(pool))
    own = value - mean
    if s["turn_norm"] == "std":
      own = own / std if std >= 1e-6 else 0.0
    out |= dict.fromkeys(step, own)
  return out


def empg(advantages, entropy, mask, s):
  """Returns the advantages that EMPG makes of others, f64[n, g, t]: 2509.09265, eqs. 8-12."""
  completions = steps_of(mask, s["step"])
  every = [step for steps in completions for step in steps]
  out = np.zeros(mask.shape)
  if not every:
    return out
  mean = {tuple(step): sum(float(entropy[u]) for u in step) / len(step) for step in every}
  low = min(mean.values())
  width = max(mean.values()) - low
  scaled = {step: (h - low) / width if width > 0 else 0.0 for step, h in mean.items()}
  scales = {step: math.exp(-s["confidence_k"] * h) for step, h in scaled.items()}
  average = sum(scales.values()) / len(every)
  values = {}
  for steps in completions:
    for index, step in enumerate(steps):
      value = advantages[step[0]] * scales[tuple(step)] / average
      if index + 1 < len(steps):
        value += s["clarity"] * math.exp(-s["clarity_k"] * scaled[tuple(steps[index + 1])])
      values[tuple(step)] = value
  centre = sum(values.values()) / len(every)
  for step, value in values.items():
    for u in step:
      out[u] = value - centre
  return out
