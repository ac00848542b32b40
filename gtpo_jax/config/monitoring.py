"""The sections of a configuration that say how a run is evaluated, saved, guarded and recorded."""

from __future__ import annotations

import dataclasses

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import SHARE, at_least, number, setting
from gtpo_jax.sampling.settings import TEMPERATURE, SamplingParams

STALL = number(lambda x: 0 <= x <= 1e9, "from 0 to 1e9 seconds")


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """Held-out evaluation: before the first step, at intervals, and at the end.

  Attributes:
    every: steps between evaluations; 0 evaluates only at the beginning and the end.
    problems: held-out problems.
    samples: completions per problem, for mean@n and pass@k.
    batch: problems sampled at once.
    temperature: temperature of the sampled completions; a greedy completion per problem is always
      added.
    top_p: sample from the smallest set of tokens with this total probability.
  """

  every: int = setting(10, bound=at_least(0))
  problems: int = setting(500, bound=at_least(1))
  samples: int = setting(8, bound=at_least(1))
  batch: int = setting(64, bound=at_least(1))
  temperature: float = setting(1.0, bound=TEMPERATURE)
  top_p: float = setting(1.0, bound=SHARE)

  @property
  def sampling_params(self) -> SamplingParams:
    """How the samples are drawn."""
    return SamplingParams(self.temperature, top_p=self.top_p)

  def is_due(self, step: int, last: int) -> bool:
    """Whether step `step` of a run of `last` steps is evaluated."""
    return step in (0, last) or bool(self.every and step % self.every == 0)


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
  """When the training state is saved.

  Attributes:
    every: steps between checkpoints; the last step is always saved.
    keep: how many of the newest checkpoints to keep.
    export_every: steps between Hugging Face folders, WORKDIR/exports/STEP, of which the newest
      `keep` are kept; 0 for none.
    best: also keep the parameters of the best evaluation (by mean@n), in WORKDIR/best.
    accept_changes: resume a run even if its config, its data or its frozen policies changed; the
      changes are printed.
  """

  every: int = setting(10, bound=at_least(1))
  keep: int = setting(2, bound=at_least(1))
  export_every: int = setting(0, bound=at_least(0))
  best: bool = False
  accept_changes: bool = False


@dataclasses.dataclass(frozen=True)
class GuardSection:
  """When to end a run that goes wrong.

  Attributes:
    skipped: end the run after this many consecutive steps with a skipped update (its loss or
      gradient was not finite).
    stall_s: exit, after printing all stacks, if no step, evaluation batch or part of the warm start
      ends, and no program is compiled, for this many seconds; 0 to never exit.
  """

  skipped: int = setting(3, bound=at_least(1))
  stall_s: float = setting(7200.0, bound=STALL)


@dataclasses.dataclass(frozen=True)
class LogSection:
  """What is written besides metrics.jsonl.

  Attributes:
    tensorboard: write TensorBoard's event files into WORKDIR.
    wandb: the Weights & Biases project to log to (needs `pip install wandb`); "" for none.
      WANDB_MODE=offline writes only to WORKDIR/wandb.
    trackio: the Trackio project to log to (needs `pip install trackio`); "" for none. It stays on
      this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise.
    samples: completions per step written to WORKDIR/samples.jsonl.
    credit_every: steps between records of token-level credit (WORKDIR/credit, for `gtpo report`);
      the first and the last step are recorded too; 0 for no records.
    credit_groups: groups per record whose tokens are kept, those with the most mixed verdicts
      first; for the other groups only entropies and verdicts are kept.
    continuations: at each record, prefixes of the group with the most mixed verdicts are continued
      so often, to measure how well the credit orders its segments (`truth/mc_*`); 0 for never.
  """

  tensorboard: bool = True
  wandb: str = ""
  trackio: str = ""
  samples: int = setting(4, bound=at_least(0))
  credit_every: int = setting(10, bound=at_least(0))
  credit_groups: int = setting(4, bound=at_least(1))
  continuations: int = setting(0, bound=at_least(0))

  def keeps_credit(self, step: int, last: int) -> bool:
    """Whether credit is recorded at step `step` of a run of `last` steps."""
    return bool(self.credit_every) and (step in (1, last) or step % self.credit_every == 0)


@dataclasses.dataclass(frozen=True)
class ProfileSection:
  """Which steps are traced, for XProf and Perfetto.

  Attributes:
    steps: the first and the last step to trace to WORKDIR/profile, such as "3:5"; "" for none. The
      first steps include compilation.
  """

  steps: str = ""

  def __post_init__(self):
    first, last = self.window or (1, 1)
    if not 1 <= first <= last:
      raise UserError(
        "profile.steps must be two steps, such as 3:5, the first at least 1 and not after the "
        f"last; got {self.steps!r}"
      )

  @property
  def window(self) -> tuple[int, int] | None:
    """The first and the last step to trace; None for no trace, (0, 0) if `steps` is invalid."""
    if not self.steps:
      return None
    first, _, last = self.steps.partition(":")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)
