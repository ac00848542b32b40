"""Terminal output of a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 32
Sample = tuple[str, str, bool]  # prompt, completion, whether it is correct


class Display:
  """Prints log lines and, on a terminal, a live panel below them.

  The panel shows progress, time left, reward, entropy, the speed of each phase and the last
  sample.

  Args:
    enabled: if False, nothing is printed.
    console: the output to use instead of stdout; `enabled` has no effect on it.
  """

  def __init__(self, enabled: bool = True, console: Console | None = None):
    self._console = console or Console(quiet=not enabled, highlight=False, soft_wrap=True)
    self._live: Live | None = None
    self._entropies: deque[float] = deque(maxlen=SPARKLINE_STEPS)
    self._started = time.perf_counter()

  def say(self, text: str) -> None:
    """Prints a log line, prefixed with the seconds since the start."""
    self._console.print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", markup=False)

  def begin(self, name: str, total: int, done: int = 0) -> None:
    """Starts the panel of a phase with `total` steps, `done` of them complete."""
    self.end()
    if self._console.is_terminal:
      self._progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=self._console,
      )
      self._task = self._progress.add_task(name, total=total, completed=done)
      self._live = Live(
        self._progress,
        console=self._console,
        transient=True,
        redirect_stderr=False,
        refresh_per_second=4,
      )
      self._live.start()

  def advance(self, done: int, facts: Iterable[str], line: bool) -> None:
    """Updates the panel after a step.

    Args:
      done: the number of completed steps.
      facts: at least one line about the step, such as its metrics. A terminal shows all of them
        below the progress bar.
      line: whether to print the first of `facts` when the output is not a terminal.
    """
    first, *more = facts
    if self._live:
      self._progress.update(self._task, completed=done)
      lines = [
        Text("  " + fact.replace("\n", "\\n"), no_wrap=True, overflow="ellipsis")
        for fact in (first, *more)
      ]
      self._live.update(Group(self._progress, *lines))
    elif line:
      self.say(first)

  def step(self, step: int, metrics: Mapping[str, float], sample: Sample, line: bool) -> None:
    """Shows the metrics of a training step and one of its completions.

    Args:
      step: completed steps.
      metrics: the metrics of the step.
      sample: one of its completions.
      line: see `advance`.
    """
    entropy = metrics["entropy/mean"]
    self._entropies.append(entropy)
    facts = (
      f"step {step}  correct {percent(metrics['reward/accuracy'])}  "
      f"entropy {entropy:.3f} {sparkline(self._entropies)}  "
      f"length {metrics['length/mean']:.1f}  {metrics['tokens/s']:,.0f} tokens/s",
      f"reward {metrics['reward/mean']:.3f}  loss {metrics['loss']:.4f}  {speeds(metrics)}",
      one_line(sample),
    )
    self.advance(step, facts, line)

  def sample(self, prompt: str, completion: str, correct: bool) -> None:
    """Prints a prompt, its completion and the verdict on one log line."""
    self.say("  " + one_line((prompt, completion, correct)))

  def end(self) -> None:
    """Removes the panel."""
    if self._live:
      self._live.stop()
      self._live = None


def one_line(sample: Sample) -> str:
  """Returns a prompt, its completion and the verdict on one line, with \\n for line breaks."""
  prompt, completion, correct = sample
  return f"{prompt} {completion}  ({'right' if correct else 'wrong'})".replace("\n", "\\n")


def speeds(metrics: Mapping[str, float]) -> str:
  """Returns each phase's share of the step time, with tokens per second for sampling and update."""
  step_s = metrics["time/step"]
  trained = metrics["tokens/completion"]
  phases = (
    ("sampling", metrics["time/sample"], metrics.get("tokens/sampled", trained)),
    ("reward", metrics["time/reward"], None),
    ("update", metrics["time/update"], trained),
  )
  parts = []
  for name, seconds, tokens in phases:
    speed = f"{tokens / seconds:,.0f} tokens/s " if tokens is not None and seconds else ""
    parts.append(f"{name} {speed}{seconds / step_s if step_s else 0:.0%}")
  return ", ".join(parts)


def percent(share: float) -> str:
  """Returns a share in percent, or "no verdict" if it is NaN."""
  return "no verdict" if math.isnan(share) else f"{share:.0%}"


def sparkline(values: Iterable[float]) -> str:
  """Returns a row of small bars, scaled from 0 to the largest value.

  Values that are not finite count as 0.
  """
  values = [value if math.isfinite(value) else 0.0 for value in values]
  top = max(values, default=0.0)
  if top <= 0:
    return SPARKS[0] * len(values)
  last = len(SPARKS) - 1
  return "".join(SPARKS[min(int(value / top * len(SPARKS)), last)] for value in values)
