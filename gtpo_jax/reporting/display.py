"""What a run shows while it runs: a live panel on a terminal, plain lines elsewhere."""

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
Sample = tuple[str, str, bool]  # prompt, completion, whether it is right


class Display:
  """Lines that stay, and on a terminal a panel below them: progress, time left, reward, entropy, speed by phase, the last sample.

  `enabled=False` prints nothing.
  """

  def __init__(self, enabled: bool = True, console: Console | None = None):
    self._console = console or Console(quiet=not enabled, highlight=False, soft_wrap=True)
    self._live: Live | None = None
    self._entropies: deque[float] = deque(maxlen=32)
    self._started = time.perf_counter()

  def say(self, text: str) -> None:
    """A line that stays, behind the seconds since the start."""
    self._console.print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", markup=False)

  def begin(self, what: str, total: int, done: int = 0) -> None:
    """Starts a stretch of `total` steps."""
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
      self._task = self._progress.add_task(what, total=total, completed=done)
      self._live = Live(
        self._progress,
        console=self._console,
        transient=True,
        redirect_stderr=False,
        refresh_per_second=4,
      )
      self._live.start()

  def advance(self, done: int, facts: Iterable[str], line: bool) -> None:
    """`done` steps are behind; `facts` are the lines of the panel; where there is none, the first of them, if `line` is set."""
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
    """A learning step, with its first completion."""
    self._entropies.append(metrics["entropy/mean"])
    facts = (
      f"step {step}  correct {metrics['reward/accuracy']:.0%}  entropy {metrics['entropy/mean']:.3f} "
      f"{sparkline(self._entropies)}  length {metrics['length/mean']:.1f}  {metrics['tokens/s']:,.0f} tokens/s"
    )
    self.advance(
      step,
      (
        facts,
        f"reward {metrics['reward/mean']:.3f}  loss {metrics['loss']:.4f}  {speeds(metrics)}",
        shown(sample),
      ),
      line,
    )

  def sample(self, prompt: str, completion: str, correct: bool) -> None:
    """What the policy wrote, in one line."""
    self.say("  " + shown((prompt, completion, correct)))

  def end(self) -> None:
    """Takes the panel away."""
    if self._live:
      self._live.stop()
      self._live = None


def shown(sample: Sample) -> str:
  """A completion in one line."""
  prompt, completion, correct = sample
  return f"{prompt} {completion}  ({'right' if correct else 'wrong'})".replace("\n", "\\n")


def speeds(metrics: Mapping[str, float]) -> str:
  """Tokens a second while sampling and while updating, and each phase's share of the step."""
  whole = metrics["time/step"]
  sampled = metrics.get("tokens/sampled", metrics["tokens/completion"])
  parts = [
    ("sampling", "time/sample", sampled),
    ("reward", "time/reward", None),
    ("update", "time/update", metrics["tokens/completion"]),
  ]
  return ", ".join(
    f"{name} {f'{tokens / metrics[key]:,.0f} tokens/s ' if tokens is not None and metrics[key] else ''}"
    f"{metrics[key] / whole if whole else 0:.0%}"
    for name, key, tokens in parts
  )


def sparkline(values: Iterable[float]) -> str:
  """A row of small bars, scaled from 0 to the largest value; a value that is not finite is drawn as 0."""
  values = [value if math.isfinite(value) else 0.0 for value in values]
  top = max(values, default=0.0)
  return "".join(
    SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] if top > 0 else SPARKS[0]
    for value in values
  )
