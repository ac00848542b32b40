"""What a run does about steps that go wrong: it keeps their batches, warns once of each kind, and ends where it does not get better."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.runtime.errors import RunError

Rows = Sequence[Mapping[str, float | None]]

FEW = 5  # steps that must agree before there is a warning
DUMPS = 8  # batches kept
COLLAPSED = 0.1  # of the entropy of the first steps
EXPLODED = 3.0  # times the length of the first steps
MISMATCH = 0.05  # nats a token, KL of the sampler to the trainer


class Guards:
  """Looks at each step's metrics.

  Args:
    limit: steps in a row with skipped updates that end the run.
    workdir: batches of skipped updates go into its folder `skipped`.
    rows: the metrics of the steps before.
    say: how a warning reaches the user.
    settle: called before the run is ended; returns when what is being saved is on disk.
  """

  def __init__(
    self,
    limit: int,
    workdir: Path,
    rows: Rows,
    say: Callable[[str], None],
    settle: Callable[[], None] = lambda: None,
  ):
    self._limit = limit
    self._folder = workdir / "skipped"
    self._say = say
    self._settle = settle
    rows = [row for row in rows if row["step"]]
    self._first = rows[:FEW]
    self._last = collections.deque(rows, max(FEW, limit))
    self._warned: set[str] = set()

  @property
  def skipped(self) -> int:
    """Steps in a row in which an update was skipped, up to the last step."""
    return next(
      (i for i, row in enumerate(reversed(self._last)) if not row.get("update/skipped")),
      len(self._last),
    )

  def check(
    self, step: int, metrics: Mapping[str, float], arrays: Callable[[], dict[str, np.ndarray]]
  ) -> None:
    """Takes in a step.

    Args:
      step: completed steps, this one included.
      metrics: of the step.
      arrays: gives the step's batch by name, on every process; called only if an update was skipped.

    Raises:
      RunError: updates were skipped in `limit` steps in a row.
    """
    row = {"step": step, **metrics}
    self._last.append(row)
    if len(self._first) < FEW:
      self._first.append(row)
    if skipped := metrics.get("update/skipped", 0.0):
      what = (
        "the update is skipped, parameters and optimizer are as before"
        if skipped == 1
        else f"{skipped:.0%} of its gradient updates are skipped, the others are made"
      )
      self._say(
        f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: {what}{self._dump(step, arrays())}"
      )
    for name, warning in WARNINGS.items():
      if name not in self._warned and (what := warning(self._first, self._last)):
        self._warned.add(name)
        self._say(f"warning: {what}")
    if self.skipped >= self._limit:
      self._settle()
      raise RunError(
        f"updates were skipped in {self.skipped} steps in a row, to step {step}, since loss or gradient was not finite; the "
        f"parameters are good, and no checkpoint is made of these steps; look at {str(self._folder)!r}, or try a smaller "
        f"optimizer.learning_rate in another workdir"
      )

  def _dump(self, step: int, arrays: dict[str, np.ndarray]) -> str:
    """Writes the arrays of a batch into a file; what to say of it."""
    if not is_first_process():
      return ""
    self._folder.mkdir(exist_ok=True)
    if len(list(self._folder.glob("*.npz"))) >= DUMPS:
      return ""
    file = self._folder / f"step_{step}.npz"
    np.savez_compressed(file, **arrays)
    return f"; its batch is in {str(file)!r}"


def _entropy_collapse(first: Rows, last: Rows) -> str:
  began = _mean(first, "entropy/mean")
  now = _mean(last, "entropy/mean")
  if now < COLLAPSED * began:
    return (
      f"entropy fell from {began:.3f} to {now:.3f} nats a token: the policy hardly explores any more; look at pass@k beside mean@n, "
      f"and try a larger algorithm.eps_high, a smaller optimizer.learning_rate, or harder problems"
    )
  return ""


def _length_explosion(first: Rows, last: Rows) -> str:
  began = _mean(first, "length/mean")
  now = _mean(last, "length/mean")
  if now > EXPLODED * began:
    return (
      f"completions grew from {began:.0f} to {now:.0f} tokens; look at samples.jsonl for repetition and at length/cut_off, and try "
      f"algorithm.overlong_buffer or algorithm.length_penalty"
    )
  return ""


def _mismatch(first: Rows, last: Rows) -> str:
  if (kl := last[-1].get("mismatch/kl")) is not None and kl > MISMATCH:
    return (
      f"sampler and trainer disagree by {kl:.3f} nats a token (mismatch/kl) at step {last[-1]['step']}: gradients are of another "
      f"policy than was sampled; try algorithm.tis_cap, or model.compute_dtype=float32"
    )
  return ""


def _no_reward(first: Rows, last: Rows) -> str:
  if len(last) >= FEW and all(row.get("reward/accuracy") == 0 for row in last):
    return (
      f"not one completion of the last {len(last)} steps is right: there is nothing to learn from; look at samples.jsonl, at the "
      f"answers of the problems, at reward/no_verdict and length/cut_off"
    )
  return ""


WARNINGS: dict[
  str, Callable[[Rows, Rows], str]
] = {  # of the first and the last few steps: what is wrong, if it is
  "entropy": _entropy_collapse,
  "length": _length_explosion,
  "mismatch": _mismatch,
  "reward": _no_reward,
}


def _mean(rows: Rows, name: str) -> float:
  """The mean of a metric; not a number where there are too few steps to speak of."""
  values = [row[name] for row in rows if row.get(name) is not None]
  return float(np.mean(values)) if len(values) >= FEW else np.nan
