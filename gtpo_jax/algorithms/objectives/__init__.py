"""Surrogate objectives, which are maximised."""

from gtpo_jax.algorithms.objectives.base import Objective, ObjectiveInputs
from gtpo_jax.algorithms.objectives.clipped import Clip, Gmpo, clip_ratio
from gtpo_jax.algorithms.objectives.future import Fipo
from gtpo_jax.algorithms.objectives.selecting import ClipCov, KlCov, Stare
from gtpo_jax.algorithms.objectives.weighted import Cispo, Dppo, Sapo, clip_weight
from gtpo_jax.runtime.fields import one_of, setting

OBJECTIVES: dict[str, type[Objective]] = {
  cls.name: cls for cls in (Clip, Cispo, Sapo, Gmpo, Dppo, ClipCov, KlCov, Stare, Fipo)
}

# The setting that chooses one of them.
CHOICE = setting(
  "clip", "the surrogate objective; each has settings of its own.", one_of(OBJECTIVES)
)

__all__ = [
  "CHOICE",
  "OBJECTIVES",
  "Cispo",
  "Clip",
  "ClipCov",
  "Dppo",
  "Fipo",
  "Gmpo",
  "KlCov",
  "Objective",
  "ObjectiveInputs",
  "Sapo",
  "Stare",
  "clip_ratio",
  "clip_weight",
]
