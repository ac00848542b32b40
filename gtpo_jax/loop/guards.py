"""Checks on the metrics of each step.

They dump the batches of skipped updates, warn once about each kind of problem, and end a run that
skips too many updates in a row.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from etils import epath

from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.runtime.errors import RunError
from gtpo_jax.runtime.paths import is_remote, storage_errors, write_atomically

Rows = Sequence[Mapping[str, float | None]]  # metrics of consecutive steps; None: not finite

# Thresholds of the warnings.
MIN_STEPS = 5  # steps at the start, and the latest steps, that a warning compares
MAX_DUMPS = 8  # batches written to disk, so that a broken run does not fill it
ENTROPY_COLLAPSE = 0.1  # share of the entropy of the first steps
LENGTH_EXPLOSION = 3.0  # multiple of the length of the first steps
MAX_MISMATCH = 0.05  # nats per token, KL between sampler and trainer


class Guards:
  """Checks the metrics of each step.

  Args:
    limit: consecutive steps with skipped updates that end the run.
    workdir: batches of skipped updates are written to its folder `skipped`.
    rows: the metrics of all earlier steps.
    say: shows a message to the user.
    wait_for_saves: called before the run is ended; returns when pending checkpoints are on disk.
  """

  def __init__(
    self,
    limit: int,
    workdir: epath.Path,
    rows: Rows,
    say: Callable[[str], None],
    wait_for_saves: Callable[[], None] = lambda: None,
  ):
    self._limit = limit
    self._folder = workdir / "skipped"
    self._say = say
    self._wait_for_saves = wait_for_saves
    rows = [row for row in rows if row["step"]]  # row 0 holds no training metrics
    self._first = rows[:MIN_STEPS]
    self._last = collections.deque(rows, max(MIN_STEPS, limit))
    self._warned: set[str] = set()

  @property
  def skipped(self) -> int:
    """Number of consecutive steps with a skipped update, ending at the latest step."""
    count = 0
    for row in reversed(self._last):
      if not row.get("update/skipped"):
        break
      count += 1
    return count

  def check(
    self, step: int, metrics: Mapping[str, float], arrays: Callable[[], dict[str, np.ndarray]]
  ) -> None:
    """Checks one step.

    Args:
      step: completed steps, including this one.
      metrics: the metrics of this step.
      arrays: returns the arrays of the step's batch by name, on every process; called only if an
        update was skipped.

    Raises:
      RunError: updates were skipped in `limit` consecutive steps.
    """
    row = {"step": step, **metrics}
    self._last.append(row)
    if len(self._first) < MIN_STEPS:
      self._first.append(row)
    if share := metrics.get("update/skipped", 0.0):
      effect = (
        "skipped the update, parameters and optimizer are unchanged"
        if share == 1
        else f"skipped {share:.0%} of the step's gradient updates, applied the rest"
      )
      self._say(
        f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: "
        f"{effect}{self._dump(step, arrays())}"
      )
    for name, find_problem in WARNINGS.items():
      if name not in self._warned and (problem := find_problem(self._first, self._last)):
        self._warned.add(name)
        self._say(f"warning: {problem}")
    if self.skipped >= self._limit:
      self._wait_for_saves()
      raise RunError(
        f"updates were skipped in {self.skipped} consecutive steps, up to step {step}, because "
        f"loss or gradient was not finite; the parameters are intact, and these steps are not "
        f"saved; look at {str(self._folder)!r}, or try a smaller optimizer.learning_rate in "
        f"another workdir"
      )

  def _dump(self, step: int, arrays: dict[str, np.ndarray]) -> str:
    """Writes a batch to a file and returns the end of the message that names it."""
    if not is_first_process():
      return ""
    if not is_remote(self._folder):
      self._folder.mkdir(exist_ok=True)
    if len(list(self._folder.glob("*.npz"))) >= MAX_DUMPS:
      return ""
    file = self._folder / f"step_{step}.npz"
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    with storage_errors(f"cannot write {str(file)!r}"):
      write_atomically(file, packed.getvalue())
    return f"; its batch is in {str(file)!r}"


def _entropy_collapse(first: Rows, last: Rows) -> str:
  initial = _mean(first, "entropy/mean")
  current = _mean(last, "entropy/mean")
  if current < ENTROPY_COLLAPSE * initial:
    return (
      f"entropy fell from {initial:.3f} to {current:.3f} nats per token: the policy has almost "
      f"stopped exploring; compare pass@k with mean@n, and try a larger algorithm.eps_high, a "
      f"smaller optimizer.learning_rate, or harder problems"
    )
  return ""


def _length_explosion(first: Rows, last: Rows) -> str:
  initial = _mean(first, "length/mean")
  current = _mean(last, "length/mean")
  if current > LENGTH_EXPLOSION * initial:
    return (
      f"completions grew from {initial:.0f} to {current:.0f} tokens; check the samples "
      f"(samples.jsonl) for repetition and the metric length/cut_off, and try "
      f"algorithm.overlong_buffer or algorithm.length_penalty"
    )
  return ""


def _mismatch(first: Rows, last: Rows) -> str:
  if (kl := last[-1].get("mismatch/kl")) is not None and kl > MAX_MISMATCH:
    return (
      f"sampler and trainer disagree by {kl:.3f} nats per token (mismatch/kl) at step "
      f"{last[-1]['step']}: the gradient belongs to a different policy than the one that was "
      f"sampled; try algorithm.tis_cap, or model.compute_dtype=float32"
    )
  return ""


def _no_reward(first: Rows, last: Rows) -> str:
  # None: no completion has a verdict.
  if len(last) >= MIN_STEPS and not any(row.get("reward/accuracy") or 0 for row in last):
    return (
      f"no completion of the last {len(last)} steps is correct: there is nothing to learn from; "
      f"check the samples (samples.jsonl), the problems' answers, reward/no_verdict and "
      f"length/cut_off"
    )
  return ""


# Each function gets the first and the latest steps; it returns the warning, or "" if all is well.
WARNINGS: dict[str, Callable[[Rows, Rows], str]] = {
  "entropy": _entropy_collapse,
  "length": _length_explosion,
  "mismatch": _mismatch,
  "reward": _no_reward,
}


def _mean(rows: Rows, name: str) -> float:
  """Returns the mean of a metric, or NaN if fewer than `MIN_STEPS` rows have it."""
  values = [row[name] for row in rows if row.get(name) is not None]
  return float(np.mean(values)) if len(values) >= MIN_STEPS else np.nan
