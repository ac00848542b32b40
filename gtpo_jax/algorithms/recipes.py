"""The recipes: for each algorithm, the functions it consists of and its published settings.

GTPO here is the method of arXiv 2508.04349. It is not "Group-relative Trajectory-based Policy
Optimization" (arXiv 2508.03772).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gtpo_jax.algorithms.advantages import (
  Advantage,
  joint_centred,
  joint_zscore,
  leave_one_out,
  mean_normalised,
  two_sided_zscore,
  whitened,
)
from gtpo_jax.algorithms.objectives import OBJECTIVES
from gtpo_jax.algorithms.shaping import Shaping, entropy_shaping, plain_reward


@dataclasses.dataclass(frozen=True)
class Recipe:
  """An algorithm as functions and published settings.

  The objective, the ratio and the loss aggregation are not fields but settings of the same names,
  so that users can change them in every recipe.

  Attributes:
    paper: the source.
    settings: the hyperparameters that the recipe reads, with their published values. They include
      those of its objective.
    advantage: computes advantages from shaped rewards.
    shaping: computes shaped rewards and diagnostics from units and settings.
    per_completion: whether the unit of credit is a completion instead of a token.
    rewards: the rewards of an incorrect and of a correct completion, without penalties.
  """

  paper: str
  settings: Mapping[str, Any]
  advantage: Advantage
  shaping: Shaping = plain_reward
  per_completion: bool = False
  rewards: tuple[float, float] = (0.0, 1.0)

  def settings_with(self, objective: str) -> dict[str, Any]:
    """Returns the published settings with an objective other than the recipe's own.

    The settings of the recipe's own objective are replaced by those of `objective`, with the values
    published for it. If `objective` is not defined for the recipe's ratio, `ratio` becomes "token";
    if the objective computes its own ratio, there is no setting `ratio`.
    """
    own = self.settings["objective"]
    if objective == own:
      return dict(self.settings)
    dropped = {*OBJECTIVES[own].settings, "ratio"}
    kept = {key: value for key, value in self.settings.items() if key not in dropped}
    ratios = OBJECTIVES[objective].ratios
    if ratios:
      ratio = self.settings.get("ratio", "token")
      kept["ratio"] = ratio if ratio in ratios else "token"
    return kept | {"objective": objective} | OBJECTIVES[objective].settings


def _settings(objective: str = "clip", **changes: Any) -> dict[str, Any]:
  """Returns the settings that every recipe reads, with those of `objective`, then `changes`."""
  settings = {
    "objective": objective,
    "ratio": "token",
    "loss_aggregation": "token",
    **OBJECTIVES[objective].settings,
    "contrast": True,
    "kl_weight": 0.0,
    "tis_cap": 0.0,
    "tis_level": "token",
    "mask_low": 0.0,
    "mask_high": 0.0,
    "behaviour": "policy",
    "entropy_coef": 0.0,
    "entropy_target": 0.0,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 1.0,
    "length_penalty": "overlong",
    "overlong_buffer": 0,
    "gamma": 0.75,
    "overlong_filter": False,
    "dynamic_sampling": False,
  }
  if not OBJECTIVES[objective].ratios:
    del settings["ratio"]
  return settings | changes


_BY_ENTROPY = {"scope": "group", "h_floor": 1e-2, "sign_guard": False}
_GTPO = {**_settings(), **_BY_ENTROPY, "compare": "position", "norm_scope": "batch"}
_GRPO_S = {
  **_settings(ratio="arithmetic", loss_aggregation="completion"),
  **_BY_ENTROPY,
  "mean": "arithmetic",
  "norm_scope": "group",
}
_COMPLETION_MEAN = {"loss_aggregation": "completion", "contrast": False}
_GRPO = _settings(eps_high=0.2, **_COMPLETION_MEAN)
_DAPO = _settings(dynamic_sampling=True)

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
    settings={**_GTPO, "norm_scope": "group", "alpha": 0.1, "kappa": 0.0},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.alpha), minus=lambda s: (0.0, 1.0)),
    advantage=two_sided_zscore,
  ),
  "grpo_s": Recipe(
    paper=f"{_FINAL}, eqs. 8-11",
    settings={**_GRPO_S, "beta1": 1.0, "beta2": 0.1},
    shaping=entropy_shaping(plus=lambda s: (s.beta1, s.beta2), minus=lambda s: (s.beta1, s.beta2)),
    advantage=two_sided_zscore,
    per_completion=True,
  ),
  "grpo_s_v1": Recipe(
    paper=f"{_V1}, eqs. 5-8",
    settings={**_GRPO_S, "beta": 0.1},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.beta)),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "grpo_s_v2": Recipe(
    paper=f"{_V1}, eqs. 17-19",
    settings={**_GRPO_S, "beta": 0.1},
    shaping=entropy_shaping(plus=lambda s: (1.0, s.beta), minus=lambda s: (0.0, 1.0)),
    advantage=two_sided_zscore,
    per_completion=True,
  ),
  "grpo": Recipe(paper="2402.03300", settings=_GRPO, advantage=joint_zscore, per_completion=True),
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
  ),
  "gspo": Recipe(
    paper="2507.18071",
    settings={**_GRPO, "ratio": "geometric", "eps_low": 3e-4, "eps_high": 4e-4},
    advantage=joint_zscore,
    per_completion=True,
  ),
  "dapo_mixed": Recipe(
    paper="2507.12931",
    settings={**_DAPO, "guide_completions": 4, "guide_cap": 2.0, "lambda_zero": 0.5},
    advantage=joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
  "cispo": Recipe(
    paper="2506.13585",
    settings=_settings("cispo", contrast=False),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "sapo": Recipe(
    paper="2511.20347",
    settings=_settings("sapo", **_COMPLETION_MEAN),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "gmpo": Recipe(
    paper="2507.20673",
    settings=_settings("gmpo", **_COMPLETION_MEAN),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "gspo_token": Recipe(
    paper="2507.18071, section 4.3",
    settings={**_GRPO, "ratio": "gspo_token", "eps_low": 3e-4, "eps_high": 4e-4},
    advantage=joint_zscore,
    per_completion=True,
  ),
  "dppo": Recipe(
    paper="2602.04879",
    settings=_settings("dppo", contrast=False),
    advantage=joint_centred,
    per_completion=True,
  ),
  "clip_cov": Recipe(
    paper="2505.22617",
    settings=_settings("clip_cov", contrast=False),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "kl_cov": Recipe(
    paper="2505.22617",
    settings=_settings("kl_cov", contrast=False),
    advantage=joint_zscore,
    per_completion=True,
  ),
  "rloo": Recipe(
    paper="2402.14740",
    settings=_settings(eps_high=0.2, contrast=False),
    advantage=leave_one_out,
    per_completion=True,
  ),
  "reinforce_pp": Recipe(
    paper="2501.03262",
    settings=_settings(eps_high=0.2, contrast=False),
    advantage=whitened,
    per_completion=True,
  ),
  "max_rl": Recipe(
    paper="2602.02710",
    settings=_settings(eps_high=0.2, contrast=False),
    advantage=mean_normalised,
    per_completion=True,
  ),
  "entropy_advantage": Recipe(
    paper="2506.14758",
    settings={**_DAPO, "bonus_alpha": 0.4, "bonus_kappa": 2.0},
    advantage=joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
  "stare": Recipe(
    paper="2606.19236",
    settings=_settings("stare", dynamic_sampling=True),
    advantage=joint_zscore,
    per_completion=True,
  ),
}
