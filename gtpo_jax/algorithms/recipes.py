"""The algorithms, each a row: unit of credit x shaping x advantage x ratio x average, with its published settings.

Not to be confused with the other GTPO ("Group-relative Trajectory-based Policy Optimization", arXiv 2508.03772).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gtpo_jax.algorithms.advantages import joint_centred, joint_zscore, two_sided_zscore

# A number, or the setting that holds it.
Amount = float | str


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One row of the table.

  Attributes:
    paper: where it comes from.
    settings: the hyperparameters that this row reads, with their published values.
    advantage: from shaped rewards to advantages.
    per_completion: the unit of credit is a whole completion, else a token.
    right: base and bonus of O+, see `shaping.Credit`; None where the reward is the verifier's alone.
    wrong: base and bonus of O-.
    contrast: groups that carry no signal are cleared before anything is computed.
    rewards: what a wrong and a right completion earn, before any penalty.
  """

  paper: str
  settings: Mapping[str, Any]
  advantage: Callable[..., jax.Array]
  per_completion: bool = False
  right: tuple[Amount, Amount] | None = None
  wrong: tuple[Amount, Amount] = (0.0, 0.0)
  contrast: bool = True
  rewards: tuple[float, float] = (0.0, 1.0)


# What every recipe reads, and what it is unless a row says otherwise.
_COMMON = {
  "average": "token",
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
_CREDIT = {"scope": "group", "h_floor": 1e-2, "sign_guard": False}
_TOKENS = {**_COMMON, **_CREDIT, "compare": "position", "norm_scope": "batch"}
_COMPLETIONS = {
  **_COMMON,
  **_CREDIT,
  "mean": "arithmetic",
  "ratio": "arithmetic",
  "norm_scope": "group",
  "average": "completion",
}
_DAPO = {**_COMMON, "dynamic_sampling": True}
_GRPO = {**_COMMON, "eps_low": 0.2, "eps_high": 0.2, "average": "completion"}

_FINAL, _V1 = "2508.04349, final", "2508.04349, v1"

RECIPES: dict[str, Recipe] = {
  "gtpo": Recipe(
    f"{_FINAL}, eqs. 3-7",
    {**_TOKENS, "alpha1": 1.0, "alpha2": 0.1},
    two_sided_zscore,
    right=("alpha1", "alpha2"),
    wrong=("alpha1", "alpha2"),
  ),
  "gtpo_v1": Recipe(
    f"{_V1}, eqs. 2-4", {**_TOKENS, "alpha": 0.1}, joint_zscore, right=(1.0, "alpha")
  ),
  "gtpo_v1_clipped": Recipe(
    f"{_V1}, eqs. 11-12",
    {**_TOKENS, "alpha1": 0.9, "alpha2": 0.1, "kappa": 3.0, "floor": 1.0},
    joint_zscore,
    right=("alpha1", "alpha2"),
  ),
  "gtpo_v2": Recipe(
    f"{_V1}, eqs. 13-16",
    {**_TOKENS, "alpha": 0.1, "kappa": 0.0},
    two_sided_zscore,
    right=(1.0, "alpha"),
    wrong=(0.0, 1.0),
  ),
  "grpo_s": Recipe(
    f"{_FINAL}, eqs. 8-11",
    {**_COMPLETIONS, "beta1": 1.0, "beta2": 0.1},
    two_sided_zscore,
    per_completion=True,
    right=("beta1", "beta2"),
    wrong=("beta1", "beta2"),
  ),
  "grpo_s_v1": Recipe(
    f"{_V1}, eqs. 5-8",
    {**_COMPLETIONS, "beta": 0.1},
    joint_zscore,
    per_completion=True,
    right=(1.0, "beta"),
  ),
  "grpo_s_v2": Recipe(
    f"{_V1}, eqs. 17-19",
    {**_COMPLETIONS, "beta": 0.1},
    two_sided_zscore,
    per_completion=True,
    right=(1.0, "beta"),
    wrong=(0.0, 1.0),
  ),
  "grpo": Recipe("2402.03300", _GRPO, joint_zscore, per_completion=True, contrast=False),
  "dapo": Recipe("2503.14476", _DAPO, joint_zscore, per_completion=True, rewards=(-1.0, 1.0)),
  "dapo_forking": Recipe(
    "2506.01939",
    {**_DAPO, "forking_share": 0.2},
    joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
  "dr_grpo": Recipe(
    "2503.20783",
    {**_GRPO, "average": "constant"},
    joint_centred,
    per_completion=True,
    contrast=False,
  ),
  "gspo": Recipe(
    "2507.18071",
    {**_GRPO, "ratio": "geometric", "eps_low": 3e-4, "eps_high": 4e-4},
    joint_zscore,
    per_completion=True,
    contrast=False,
  ),
  "dapo_mixed": Recipe(
    "2507.12931",
    {**_DAPO, "guide_completions": 4, "guide_cap": 2.0, "lambda_zero": 0.5},
    joint_zscore,
    per_completion=True,
    rewards=(-1.0, 1.0),
  ),
}
