"""The arms of benchmarks/credit_real.py, and which of them are trained."""

from __future__ import annotations

from credit_arms import ARMS, BASELINE, EQUAL, REFERENCE, Arm, gtpo, shuffled_within_verdict

from gtpo_jax.algorithms import make

SHUFFLED = "alpha2 = 1, shuffled within verdict"
# All probed arms; fipo has the gradient of dapo before the first update, so it is only trained.
PROBED: dict[str, Arm] = {
  **{name: ARMS[name] for name in (BASELINE, "gtpo, alpha2 = 0.1", "gtpo, alpha2 = 1")},
  SHUFFLED: Arm(gtpo(1.0), entropy=shuffled_within_verdict),
  "alpha2 = 1, norm_sides = own": Arm(gtpo(1.0, norm_sides="own")),
  **{
    name: ARMS[name]
    for name in (
      "grpo_s, beta2 = 0",
      "grpo_s, beta2 = 0.1",
      "grpo_s, beta2 = 1",
      "grpo_s, entropies shuffled",
      "dapo",
      "dapo_forking",
    )
  },
  "empg": Arm(make("empg", **EQUAL)),
  "empg, step = token": Arm(make("empg", step="token", **EQUAL)),
}
REAL_ARMS = {**PROBED, "fipo": Arm(make("fipo", **EQUAL))}
# Whose complete gradients are compared with their sketches.
CHECKED = {
  **{name: PROBED[name] for name in (BASELINE, "gtpo, alpha2 = 1", "alpha2 = 1, norm_sides = own")},
  "leave-one-out": REFERENCE,
}
# By arm: those that it is compared with, besides the baseline.
CONTROLS = {
  "gtpo, alpha2 = 1": (SHUFFLED,),
  "grpo_s, beta2 = 1": ("grpo_s, beta2 = 0", "grpo_s, entropies shuffled"),
  "dapo_forking": ("dapo",),
  "empg": ("dapo",),
  "fipo": ("dapo",),
}
# The arms of each task, in the order of the runs: what a shorter budget leaves out comes last.
TRAINED = {
  "sums": (
    BASELINE,
    "gtpo, alpha2 = 1",
    SHUFFLED,
    "grpo_s, beta2 = 0",
    "grpo_s, beta2 = 1",
    "dapo",
    "empg",
    "fipo",
  ),
  "sums_lora16": (BASELINE, "gtpo, alpha2 = 1"),
  "words": (BASELINE, "gtpo, alpha2 = 1", SHUFFLED),
}
