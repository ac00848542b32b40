"""What `make` returns and what it refuses."""

import dataclasses
import typing

import numpy as np
import pytest
from recipe_cases import meaningful

from gtpo_jax.algorithms import OBJECTIVES, RECIPES, Settings, declarations, make
from gtpo_jax.runtime.errors import UserError

# What every recipe reads, besides the settings of its objective.
BASE = {
  "ratio": "token",
  "loss_aggregation": "token",
  "contrast": True,
  "kl_weight": 0.0,
  "kl_estimator": "k3",
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
  "turn_credit": "none",
  "step_weight": 1.0,
  "outcome_weight": 1.0,
  "turn_discount": 1.0,
  "turn_norm": "std",
}
COMMON = {**BASE, "objective": "clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 0.0}
GTPO = {
  **COMMON,
  "compare": "position",
  "scope": "group",
  "norm_scope": "batch",
  "h_floor": 0.01,
  "sign_guard": False,
}
TWO_SIDED = {"norm_sides": "all"}
GRPO_S = {
  **COMMON,
  "scope": "group",
  "norm_scope": "group",
  "h_floor": 0.01,
  "sign_guard": False,
  "mean": "arithmetic",
  "ratio": "arithmetic",
  "loss_aggregation": "completion",
}
EVERY_GROUP = {"contrast": False}
GRPO = {**COMMON, **EVERY_GROUP, "eps_high": 0.2, "loss_aggregation": "completion"}
DAPO = {**COMMON, "dynamic_sampling": True}

# The settings of every recipe, and the rewards of an incorrect and a correct completion.
PUBLISHED = {
  "gtpo": ({**GTPO, **TWO_SIDED, "alpha1": 1.0, "alpha2": 0.1}, (0, 1)),
  "gtpo_v1": ({**GTPO, "alpha": 0.1}, (0, 1)),
  "gtpo_v1_clipped": ({**GTPO, "alpha1": 0.9, "alpha2": 0.1, "kappa": 3.0, "floor": 1.0}, (0, 1)),
  "gtpo_v2": ({**GTPO, **TWO_SIDED, "norm_scope": "group", "alpha": 0.1, "kappa": 0.0}, (0, 1)),
  "grpo_s": ({**GRPO_S, **TWO_SIDED, "beta1": 1.0, "beta2": 0.1}, (0, 1)),
  "grpo_s_v1": ({**GRPO_S, "beta": 0.1}, (0, 1)),
  "grpo_s_v2": ({**GRPO_S, **TWO_SIDED, "beta": 0.1}, (0, 1)),
  "grpo": (GRPO, (0, 1)),
  "dapo": (DAPO, (-1, 1)),
  "dapo_forking": ({**DAPO, "forking_share": 0.2}, (-1, 1)),
  "dr_grpo": ({**GRPO, "loss_aggregation": "constant"}, (0, 1)),
  "gspo": ({**GRPO, "ratio": "geometric", "eps_low": 3e-4, "eps_high": 4e-4}, (0, 1)),
  "dapo_mixed": ({**DAPO, "guide_completions": 4, "guide_cap": 2.0, "lambda_zero": 0.5}, (-1, 1)),
  "cispo": ({**BASE, **EVERY_GROUP, "objective": "cispo", "eps_low": 1.0, "eps_high": 4.0}, (0, 1)),
  "sapo": (
    {
      **BASE,
      **EVERY_GROUP,
      "loss_aggregation": "completion",
      "objective": "sapo",
      "tau_positive": 1.0,
      "tau_negative": 1.05,
    },
    (0, 1),
  ),
  "gmpo": (
    {
      **{key: value for key, value in BASE.items() if key != "ratio"},
      **EVERY_GROUP,
      "loss_aggregation": "completion",
      "objective": "gmpo",
      "eps_low": 0.4,
      "eps_high": 0.4,
    },
    (0, 1),
  ),
  "gspo_token": ({**GRPO, "ratio": "gspo_token", "eps_low": 3e-4, "eps_high": 4e-4}, (0, 1)),
  "dppo": (
    {
      **BASE,
      **EVERY_GROUP,
      "objective": "dppo",
      "delta_low": 0.2,
      "delta_high": 0.2,
      "ratio_cap": 5.0,
    },
    (0, 1),
  ),
  "clip_cov": (
    {
      **COMMON,
      **EVERY_GROUP,
      "objective": "clip_cov",
      "eps_high": 0.2,
      "selected_share": 2e-4,
      "cov_low": 1.0,
      "cov_high": 5.0,
    },
    (0, 1),
  ),
  "kl_cov": (
    {**BASE, **EVERY_GROUP, "objective": "kl_cov", "selected_share": 2e-3, "kl_cov_coef": 1.0},
    (0, 1),
  ),
  "rloo": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "reinforce_pp": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "max_rl": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "qae": ({**DAPO, "baseline_quantile": 0.4}, (-1, 1)),
  "otb": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "vineppo": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2, "continuations": 9}, (0, 1)),
  "spo_chain": (
    {
      **COMMON,
      **EVERY_GROUP,
      "eps_high": 0.2,
      "continuations": 9,
      "cut_probability": 0.9,
      "cut_interval": 5,
    },
    (0, 1),
  ),
  "gdpo": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "pass_at_k": ({**GRPO, "pass_k": 4}, (0, 1)),
  "pass_k_max": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "w_reinforce": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2, "positive_weight": 0.1}, (-1, 1)),
  "entropy_advantage": ({**DAPO, "bonus_alpha": 0.4, "bonus_kappa": 2.0}, (-1, 1)),
  "aspo": (
    {
      **BASE,
      "dynamic_sampling": True,
      "objective": "aspo",
      "eps_low": 0.2,
      "eps_high": 0.2,
      "ratio_cap": 3.0,
    },
    (-1, 1),
  ),
  "fipo": (
    {
      **DAPO,
      "objective": "fipo",
      "dual_clip": 10.0,
      "half_life": 32.0,
      "influence_low": 0.0,
      "influence_high": 0.2,
      "safe_ratio": 4.0,
    },
    (-1, 1),
  ),
  "empg": (
    {**DAPO, "step": "turn", "confidence_k": 1.0, "clarity": 0.1, "clarity_k": 1.0},
    (-1, 1),
  ),
  "gigpo": (
    {**COMMON, **EVERY_GROUP, "eps_high": 0.2, "turn_credit": "state", "turn_discount": 0.95},
    (0, 1),
  ),
  "turn_return": (
    {**COMMON, **EVERY_GROUP, "eps_high": 0.2, "turn_credit": "return", "outcome_weight": 0.0},
    (0, 1),
  ),
  "mt_grpo": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2, "turn_credit": "reward"}, (0, 1)),
  "rlsd": ({**GRPO, "teacher_mix": 0.5, "teacher_clip": 0.2}, (0, 1)),
  "opd": ({**COMMON, **EVERY_GROUP, "eps_high": 0.2}, (0, 1)),
  "stare": (
    {
      **DAPO,
      "objective": "stare",
      "selected_share": 0.1,
      "surprise_weight": 1.1,
      "entropy_gate": 0.3,
    },
    (0, 1),
  ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_settings(name):
  algorithm = make(name)
  settings, rewards = PUBLISHED[name]
  read = {key: value for key, value in vars(algorithm.settings).items() if value is not None}
  assert read == algorithm.recipe.settings == settings
  assert algorithm.name == name and algorithm.recipe == RECIPES[name]
  assert algorithm.recipe.rewards == rewards


@pytest.mark.parametrize("name", RECIPES)
def test_published_values_are_never_refused(name):
  """A run records the resolved settings and reads them back through `make`."""
  published = make(name)
  assert make(name, **published.recipe.settings) == published
  for key, value in published.recipe.settings.items():
    assert make(name, **{key: value}) == published, key


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("dapo", {"gamma": 0.9, "length_penalty": "group_relative"}),
    ("dapo", {"overlong_buffer": 64}),
    ("gtpo_v1_clipped", {"alpha1": 0.5, "alpha2": 0.5, "floor": 0.5}),
    ("gtpo", {"objective": "cispo"} | dataclasses.asdict(OBJECTIVES["cispo"]())),
    ("grpo", {"objective": "gmpo"}),
    ("grpo_s", {"objective": "dppo", "ratio_cap": 3.0}),
    ("gtpo", {"ratio": "gspo_token", "objective": "clip_cov"}),
    ("gtpo", {"entropy_target": 0.3, "entropy_coef_delta": 0.01}),
    ("gtpo", {"eps_low": 0.1, "eps_high": 0.1, "compare": "matrix"}),
  ],
)
def test_resolved_settings_make_the_same_algorithm(name, options):
  algorithm = make(name, **options)
  objective = options.get("objective", RECIPES[name].objective.name)
  assert algorithm.recipe.settings == RECIPES[name].with_objective(objective).settings | options
  assert make(name, **algorithm.recipe.settings) == algorithm


@pytest.mark.parametrize(
  ("name", "setting", "value", "bound"),
  [
    ("gtpo", "alpha1", -0.5, "at least 0 and finite"),
    ("gtpo", "alpha1", float("inf"), "at least 0 and finite"),
    ("gtpo", "alpha2", float("nan"), "at least 0 and finite"),
    ("gtpo", "alpha2", "0.1", "at least 0 and finite"),
    ("gtpo_v1", "alpha", -0.1, "at least 0 and finite"),
    ("gtpo_v1", "alpha", True, "at least 0 and finite"),
    ("gtpo_v2", "kappa", -1.0, "at least 0 and finite"),
    ("gtpo_v1_clipped", "floor", -1.0, "at least 0 and finite"),
    ("grpo_s", "beta1", -1, "at least 0 and finite"),
    ("grpo_s", "beta2", -1e-9, "at least 0 and finite"),
    ("grpo_s_v1", "beta", float("inf"), "at least 0 and finite"),
    ("grpo", "kl_weight", -1e-3, "at least 0 and finite"),
    ("grpo", "tis_cap", float("nan"), "at least 0 and finite"),
    ("dapo_mixed", "lambda_zero", -0.5, "at least 0 and finite"),
    ("gtpo", "compare", "column", "one of position, sequence, matrix, turn, state"),
    ("gtpo", "compare", ["position"], "one of position, sequence, matrix, turn, state"),
    ("gtpo", "scope", "global", "one of group, batch"),
    ("grpo_s", "norm_scope", "sequence", "one of group, batch"),
    ("grpo_s", "mean", "harmonic", "one of arithmetic, geometric"),
    ("grpo_s", "ratio", "mean", "one of token, arithmetic, geometric, gspo_token"),
    ("dapo", "loss_aggregation", "sequence", "one of token, completion, group, constant"),
    ("dapo", "length_penalty", "linear", "one of overlong, group_relative"),
    ("gtpo", "h_floor", 0.0, "at least 1e-30 (1/h_floor must fit float32) and finite"),
    ("grpo_s", "h_floor", -0.01, "at least 1e-30 (1/h_floor must fit float32) and finite"),
    ("gtpo", "h_floor", float("nan"), "at least 1e-30 (1/h_floor must fit float32) and finite"),
    # With an infinite floor every 1/H would be 0.
    ("gtpo", "h_floor", float("inf"), "at least 1e-30 (1/h_floor must fit float32) and finite"),
    ("gtpo", "eps_low", 0.0, "in (0, 1]"),
    ("grpo", "eps_low", 1.1, "in (0, 1]"),
    ("dapo", "eps_low", float("nan"), "in (0, 1]"),
    ("dapo", "eps_high", 0.0, "above 0 and finite"),
    ("dapo", "eps_high", float("inf"), "above 0 and finite"),
    ("dapo_mixed", "guide_cap", 0.0, "above 0 and finite"),
    ("dapo", "dual_clip", 1.0, "above 1 and finite, or 0 for off"),
    ("dapo", "dual_clip", 0.5, "above 1 and finite, or 0 for off"),
    ("dapo", "dual_clip", -2.0, "above 1 and finite, or 0 for off"),
    ("dapo_forking", "forking_share", 0.0, "in (0, 1]"),
    ("dapo_forking", "forking_share", 1.01, "in (0, 1]"),
    ("dapo", "gamma", 0.5, "in (0.5, 1]"),
    ("dapo", "gamma", 1.1, "in (0.5, 1]"),
    ("dapo", "overlong_buffer", -1, "an integer >= 0 (tokens)"),
    ("dapo", "overlong_buffer", 1.5, "an integer >= 0 (tokens)"),
    ("dapo_mixed", "guide_completions", 0, "an integer >= 1"),
    ("dapo_mixed", "guide_completions", 2.0, "an integer >= 1"),
    ("qae", "baseline_quantile", 0.0, "in (0, 1]"),
    ("pass_at_k", "pass_k", 0, "an integer >= 1"),
    ("pass_at_k", "pass_k", 2.0, "an integer >= 1"),
    ("w_reinforce", "positive_weight", -0.1, "at least 0 and finite"),
    ("rlsd", "teacher_mix", 1.1, "in [0, 1]"),
    ("rlsd", "teacher_clip", 0.0, "in (0, 1]"),
    ("gtpo", "sign_guard", "no", "True or False"),  # any text is true
    ("gtpo", "sign_guard", 2, "True or False"),
    ("gtpo", "sign_guard", 1, "True or False"),
    ("dapo", "dynamic_sampling", "yes", "True or False"),
    ("dapo", "overlong_filter", 0, "True or False"),
  ],
)
def test_a_bad_value_is_refused_with_the_value_and_the_bound(name, setting, value, bound):
  with pytest.raises(UserError) as error:
    make(name, **{setting: value})
  assert str(error.value) == f"algorithm.{setting} must be {bound}, got {value!r}"


@pytest.mark.parametrize(
  ("name", "setting", "value"),
  [
    ("gtpo", "alpha1", 0),
    ("gtpo", "alpha2", 0.0),
    ("gtpo_v2", "kappa", 0),
    ("gtpo_v1_clipped", "floor", 0),
    ("grpo", "kl_weight", 0),
    ("dapo", "dual_clip", 0),
    ("dapo", "dual_clip", 1.001),
    ("dapo", "eps_high", 5),
    ("dapo_forking", "forking_share", 1),
    ("dapo_forking", "forking_share", 1e-9),
    ("gtpo", "eps_low", 0.28),
    ("gtpo", "h_floor", 1e-9),
    ("dapo", "overlong_buffer", 0),
    ("dapo_mixed", "guide_completions", 1),
    ("dapo_mixed", "lambda_zero", 0),
    ("qae", "baseline_quantile", 1.0),
    ("pass_at_k", "pass_k", 1),
    ("w_reinforce", "positive_weight", 0),
    ("dapo", "length_penalty", "group_relative"),
    ("dapo", "loss_aggregation", "group"),
    ("gtpo", "sign_guard", True),
  ],
)
def test_the_ends_of_the_bounds_are_allowed(name, setting, value):
  assert getattr(make(name, **{setting: value}).settings, setting) == value


def test_numpy_numbers_are_accepted():
  settings = make("gtpo", alpha2=np.float32(0.25), overlong_buffer=np.int64(4)).settings
  assert (settings.alpha2, settings.overlong_buffer) == (0.25, 4)


def test_settings_that_would_have_no_effect_are_refused():
  assert make("dapo", gamma=1, length_penalty="group_relative").settings.gamma == 1
  with pytest.raises(UserError, match="'k2' only has an effect with kl_weight above"):
    make("dapo", kl_estimator="k2")
  with pytest.raises(UserError) as error:
    make("dapo", gamma=0.6)
  assert str(error.value) == (
    "algorithm.gamma = 0.6 only has an effect with length_penalty = 'group_relative'; use that, or "
    "leave gamma at 0.75"
  )


def test_every_setting_is_declared_with_a_bound_and_a_meaning():
  declared = declarations()
  kinds = {name: type(next(iter(fields.values())).default) for name, fields in declared.items()}
  hints = {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(Settings).items()}
  assert [*hints.items()] == [*kinds.items()]
  for name, fields in declared.items():
    for field in fields.values():
      assert field.metadata["bound"].accepts(field.default), name
      assert len(field.metadata["meaning"]) > 5, name


def test_a_setting_belongs_to_one_part_of_an_algorithm():
  assert {key for recipe in RECIPES.values() for key in recipe.settings} == {*declarations()}
  for recipe in RECIPES.values():
    parts = recipe.parts.values()
    assert len(recipe.settings) == 1 + sum(len(dataclasses.fields(part)) for part in parts)


def test_an_inverted_clip_range_is_refused():
  with pytest.raises(UserError) as error:
    make("gtpo", eps_low=0.3)
  assert str(error.value) == "algorithm.eps_low must be at most eps_high = 0.28, got 0.3"
  assert make("gtpo", eps_low=0.28).settings.eps_low == 0.28


def test_an_empty_range_for_the_shaped_reward_is_refused():
  """[floor, alpha1 + alpha1 / kappa] is empty if alpha1 < floor * kappa / (kappa + 1)."""
  with pytest.raises(UserError) as error:
    make("gtpo_v1_clipped", alpha1=0.7, alpha2=0.3, kappa=3.0)
  assert str(error.value) == (
    "algorithm.alpha1 must be at least floor * kappa / (kappa + 1) = 0.75, got 0.7: the clip range "
    "[floor, alpha1 + alpha1/kappa] = [1, 0.9333] is empty"
  )
  clipped = lambda alpha1, **more: make("gtpo_v1_clipped", alpha1=alpha1, alpha2=1 - alpha1, **more)
  assert clipped(0.75, kappa=3.0).settings.alpha1 == 0.75  # [1, 1]
  assert clipped(0.5, kappa=0.0).settings.kappa == 0.0  # no upper bound
  # With the paper's other floor, alpha1, the range is never empty.
  assert clipped(0.5, floor=0.5).settings.floor == 0.5
  with pytest.raises(UserError, match=r"= 1\.5, got 0\.9.*\[2, 1\.2\]"):
    clipped(0.9, kappa=3.0, floor=2.0)


@pytest.mark.parametrize(("name", "weights"), [("gtpo", "alpha"), ("grpo_s", "beta")])
def test_a_reward_that_is_always_0_is_refused(name, weights):
  with pytest.raises(UserError, match=f"{weights}1 and algorithm.{weights}2 are both 0, so every"):
    make(name, **{f"{weights}1": 0, f"{weights}2": 0})
  make(name, **{f"{weights}1": 0, f"{weights}2": 0.1})


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"alpha1": 0.8}, "alpha1 and algorithm.alpha2 must sum to 1 (v1, eq. 11), got 0.8 + 0.1"),
    ({"kappa": 1.0}, "kappa must be above 1 (v1, eq. 11), or 0 for no upper bound, got 1.0"),
  ],
)
def test_what_eq_11_excludes_is_refused(options, message):
  with pytest.raises(UserError) as error:
    make("gtpo_v1_clipped", **options)
  assert str(error.value) == f"algorithm.{message}"


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("gtpo", {"ratio": "geometric"}, "'gtpo' gives each token its own advantage; use 'token' or"),
    ("entropy_advantage", {"ratio": "arithmetic"}, "gives each token its own advantage; use 'to"),
    ("gtpo", {"objective": "gmpo"}, "'gmpo' needs one advantage per completion, but 'gtpo' gives"),
    ("grpo", {"objective": "dppo", "ratio": "geometric"}, "needs ratio = 'token', got 'geometric'"),
    (
      "grpo",
      {"objective": "gmpo", "ratio": "token"},
      "with objective = 'gmpo' has no setting 'rat",
    ),
    ("grpo", {"objective": "sapo", "eps_low": 0.1}, "with objective = 'sapo' has no setting 'eps_"),
    ("gtpo", {"tau_positive": 2.0}, "algorithm 'gtpo' has no setting 'tau_positive'"),
    ("dapo_mixed", {"objective": "kl_cov"}, "its guide's tokens have an objective of their own"),
    ("dapo_mixed", {"ratio": "gspo_token"}, "its guide's tokens have an objective of their own"),
    ("gtpo", {"objective": "ppo"}, "must be one of clip, cispo, sapo, gmpo, dppo, clip_cov, kl_c"),
    ("clip_cov", {"cov_low": 6.0}, "algorithm.cov_low must be at most cov_high = 5.0, got 6.0"),
    ("gtpo", {"entropy_coef_delta": 0.1}, "only has an effect with entropy_target above 0; use"),
    (
      "gtpo",
      {"entropy_target": 0.3, "entropy_coef": 2.0},
      "entropy_coef must be at most entropy_coef_max = 1.0, got 2.0",
    ),
  ],
)
def test_a_meaningless_combination_is_refused(name, options, message):
  with pytest.raises(UserError) as error:
    make(name, **options)
  assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_accepts_every_meaningful_objective(name, objective):
  if not meaningful(name, objective):
    with pytest.raises(UserError):
      make(name, objective=objective)
    return
  algorithm = make(name, objective=objective)
  assert algorithm.settings.objective == objective
  if objective != RECIPES[name].objective.name:
    own = dataclasses.asdict(OBJECTIVES[objective]())
    own.pop("ratio", None)
    assert {key: algorithm.recipe.settings[key] for key in own} == own


def test_an_overlong_buffer_without_effect_is_refused():
  message = "overlong_buffer = 64 only has an effect with length_penalty = 'overlong'; use"
  with pytest.raises(UserError, match=message):
    make("gtpo", length_penalty="group_relative", overlong_buffer=64)
  assert make("gtpo", length_penalty="group_relative").settings.overlong_buffer == 0
  assert make("gtpo", overlong_buffer=64).settings.overlong_buffer == 64


@pytest.mark.parametrize(
  ("name", "nearest"),
  [
    ("gtop", "gtpo"),
    ("daapo", "dapo"),
    ("grpo-s", "grpo_s"),
    ("GSPO", "gspo"),
    ("gtpo_v1_cliped", "gtpo_v1_clipped"),
    ("drgrpo", "dr_grpo"),
  ],
)
def test_an_unknown_algorithm_names_the_nearest(name, nearest):
  with pytest.raises(UserError) as error:
    make(name)
  message = f"unknown algorithm {name!r}, did you mean {nearest!r}?; valid are {', '.join(RECIPES)}"
  assert str(error.value) == message


def test_a_name_close_to_no_algorithm_is_refused_without_a_guess():
  with pytest.raises(UserError, match="unknown algorithm 'xyz'; valid are gtpo, "):
    make("xyz")


def test_an_unknown_setting_names_the_nearest_and_lists_the_valid_ones():
  message = (
    r"^algorithm 'gtpo' has no setting 'alpha_2', did you mean 'alpha2'.; it reads .*eps_low"
  )
  with pytest.raises(UserError, match=message):
    make("gtpo", alpha_2=0.1)
  with pytest.raises(UserError, match="no setting 'alpha2'"):  # another recipe's
    make("grpo", alpha2=0.1)
  with pytest.raises(UserError, match="no setting 'guide_cap'"):
    make("dapo", guide_cap=2.0)


@pytest.mark.parametrize(
  ("name", "setting", "published"),
  [("gtpo", "alpha2", 0.1), ("grpo", "eps_low", 0.2), ("gtpo", "scope", "group")],
)
def test_none_is_refused(name, setting, published):
  with pytest.raises(UserError) as error:
    make(name, **{setting: None})
  message = f"algorithm.{setting} must not be None; omit it to use the published value "
  assert str(error.value) == f"{message}{published!r}"


def test_algorithms_and_their_settings_are_frozen_and_hashable():
  algorithm = make("gtpo")
  with pytest.raises(dataclasses.FrozenInstanceError):
    algorithm.name = "grpo"
  with pytest.raises(dataclasses.FrozenInstanceError):
    algorithm.settings.alpha1 = 2.0
  with pytest.raises(dataclasses.FrozenInstanceError):
    algorithm.recipe.rewards = (0.0, 2.0)
  assert {make("gtpo"), make("gtpo"), make("gtpo", alpha2=0.2)} == {
    make("gtpo"),
    make("gtpo", alpha2=0.2),
  }
  with pytest.raises(UserError):
    dataclasses.replace(algorithm.recipe.shaping, alpha1=-1.0)
