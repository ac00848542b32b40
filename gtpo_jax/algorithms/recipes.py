"""The recipes: for each algorithm, the functions it consists of and its published settings.

GTPO here is the method of arXiv 2508.04349. It is not "Group-relative Trajectory-based Policy
Optimization" (arXiv 2508.03772).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gtpo_jax.algorithms.advantages import Advantage, joint_centred, joint_zscore, two_sided_zscore
from gtpo_jax.algorithms.objectives import OBJECTIVES, Objective
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS, TOKEN_RATIO, Ratio
from gtpo_jax.algorithms.settings import Settings
from gtpo_jax.algorithms.shaping import Shaping, entropy_shaping, plain_reward


def token_level(_: Settings) -> Ratio:
  """Returns the importance ratio of single tokens."""
  return TOKEN_RATIO


def sequence_level(settings: Settings) -> Ratio:
  """Returns the importance ratio of completions that the setting `ratio` selects."""
  return SEQUENCE_RATIOS[settings.ratio]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """An algorithm as functions and published settings.

  The loss aggregation is not a field but a setting, `loss_aggregation`, so that users can change
  it in every recipe.

  Attributes:
    paper: the source.
    settings: the hyperparameters that the recipe reads, with their published values.
    advantage: computes advantages from shaped rewards.
    shaping: computes shaped rewards and diagnostics from units and settings.
    ratio: returns the importance ratio for given settings.
    objective: the surrogate objective, a function of ratio and advantages.
    per_completion: whether the unit of credit is a completion instead of a token.
    contrast: whether groups without contrast (see `has_contrast`) are excluded from the loss and
      from all statistics.
    rewards: the rewards of an incorrect and of a correct completion, without penalties.
  """

  paper: str
  settings: Mapping[str, Any]
  advantage: Advantage
  shaping: Shaping = plain_reward
  ratio: Callable[[Settings], Ratio] = token_level
  objective: Objective = OBJECTIVES["clip"]
  per_completion: bool = False
  contrast: bool = True
  rewards: tuple[float, float] = (0.0, 1.0)


# Every recipe reads these settings; a recipe may set other values.
_COMMON = {
  "loss_aggregation": "token",
  "eps_low": 0.2,
  "eps_high": 0.28,
  "dual_clip": 0.0,
  "kl_weight": 0.0,
  "tis_cap": 0.0,
  "length_penalty": "overlong",
  "overlong_buffer": 0,
  "gamma": 0.75,
  "overlong_filter": False,
  "dynamic_sampling": False,
}
_BY_ENTROPY = {"scope": "group", "h_floor": 1e-2, "sign_guard": False}
_GTPO = {**_COMMON, **_BY_ENTROPY, "compare": "position", "norm_scope": "batch"}
_GRPO_S = {
  **_COMMON,
  **_BY_ENTROPY,
  "mean": "arithmetic",
  "ratio": "arithmetic",
  "norm_scope": "group",
  "loss_aggregation": "completion",
}
_GRPO = {**_COMMON, "eps_low": 0.2, "eps_high": 0.2, "loss_aggregation": "completion"}
_DAPO = {**_COMMON, "dynamic_sampling": True}

_FINAL = "2508.04349, final"
_V1 = "2508.04349, v1"

RECIPES: dict[str, Recipe] = {
  "gtpo": Recipe(
    paper=f"{_FINAL}, eqs. 3-7",
    settings={**_GTPO, "alpha1": 1.0, "alpha2": 0.1},
    shaping=entropy_shaping(
      plus=lambda s: (s.alpha1, s.alpha2), minus=lambda s: (s.alpha1, s.alpha2)
    ),
    advantage=two_sided_zscore,
  ),
  "gtpo_v1": Recipe(
    paper=f"{_V1}, eqs. 2-4",
    settings={**_GTPO, "alpha": 0.1},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.alpha)),
    advantage=joint_zscore,
  ),
  "gtpo_v1_clipped": Recipe(
    paper=f"{_V1}, eqs. 11-12",
    settings={**_GTPO, "alpha1": 0.9, "alpha2": 0.1, "kappa": 3.0, "floor": 1.0},
    shaping=entropy_shaping(plus=lambda s: (s.alpha1, s.alpha2)),
    advantage=joint_zscore,
  ),
  "gtpo_v2": Recipe(
    paper=f"{_V1}, eqs. 13-16",
    settings={**_GTPO, "alpha": 0.1, "kappa": 0.0},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.alpha), minus=lambda s: (0.0, 1.0)),
    advantage=two_sided_zscore,
  ),
  "grpo_s": Recipe(
    paper=f"{_FINAL}, eqs. 8-11",
    settings={**_GRPO_S, "beta1": 1.0, "beta2": 0.1},
    shaping=entropy_shaping(plus=lambda s: (s.beta1, s.beta2), minus=lambda s: (s.beta1, s.beta2)),
    advantage=two_sided_zscore,
    ratio=sequence_level,
    per_completion=True,
  ),
  "grpo_s_v1": Recipe(
    paper=f"{_V1}, eqs. 5-8",
    settings={**_GRPO_S, "beta": 0.1},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.beta)),
    advantage=joint_zscore,
    ratio=sequence_level,
    per_completion=True,
  ),
  "grpo_s_v2": Recipe(
    paper=f"{_V1}, eqs. 17-19",
    settings={**_GRPO_S, "beta": 0.1},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.beta), minus=lambda s: (0.0, 1.0)),
    advantage=two_sided_zscore,
    ratio=sequence_level,
    per_completion=True,
  ),
  "grpo": Recipe(
    paper="2402.03300", settings=_GRPO, advantage=joint_zscore, per_completion=True, contrast=False
  ),
  "dapo": Recipe(
    paper="2503.14476",
    settings=_DAPO,
    advantage=joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
  "dapo_forking": Recipe(
    paper="2506.01939",
    settings={**_DAPO, "forking_share": 0.2},
    advantage=joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
  "dr_grpo": Recipe(
    paper="2503.20783",
    settings={**_GRPO, "loss_aggregation": "constant"},
    advantage=joint_centred,
    per_completion=True,
    contrast=False,
  ),
  "gspo": Recipe(
    paper="2507.18071",
    settings={**_GRPO, "ratio": "geometric", "eps_low": 3e-4, "eps_high": 4e-4},
    advantage=joint_zscore,
    ratio=sequence_level,
    per_completion=True,
    contrast=False,
  ),
  "dapo_mixed": Recipe(
    paper="2507.12931",
    settings={**_DAPO, "guide_completions": 4, "guide_cap": 2.0, "lambda_zero": 0.5},
    advantage=joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
}
