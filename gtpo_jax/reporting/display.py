"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere."""
from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SPARKS = "▁▂▃▄▅▆▇█"


class Display:
  """Lines that stay, and on a terminal one progress bar below them. `enabled=False` prints nothing."""

  def __init__(self, enabled: bool = True, console: Console | None = None):
    self._console = console or Console(quiet=not enabled, highlight=False, soft_wrap=True)
    self._progress: Progress | None = None
    self._task = None
    self._entropies: deque[float] = deque(maxlen=16)
    self._started = time.perf_counter()

  def say(self, text: str) -> None:
    """A line that stays, behind the seconds since the start."""
    self._console.print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", markup=False)

  def begin(self, what: str, total: int, done: int = 0) -> None:
    """Starts a stretch of `total` steps."""
    self.end()
    if self._console.is_terminal:
      self._progress = Progress(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                                TimeRemainingColumn(), TextColumn("{task.fields[facts]}"), console=self._console, transient=True,
                                redirect_stderr=False)
      self._task = self._progress.add_task(what, total=total, completed=done, facts="")
      self._progress.start()

  def advance(self, done: int, facts: str, line: bool) -> None:
    """`done` steps are behind; `facts` stand beside the bar, and as a line of their own where there is none and `line` is set."""
    if self._progress:
      self._progress.update(self._task, completed=done, facts=facts)
    elif line:
      self.say(facts)

  def step(self, step: int, metrics: Mapping[str, float], line: bool) -> None:
    """A learning step in one line."""
    self._entropies.append(metrics["entropy/mean"])
    facts = (f"step {step}  correct {metrics['reward/accuracy']:.0%}  entropy {metrics['entropy/mean']:.3f} "
             f"{sparkline(self._entropies)}  length {metrics['length/mean']:.1f}  {metrics['tokens/s']:,.0f} tokens/s")
    self.advance(step, facts, line)

  def sample(self, prompt: str, completion: str, correct: bool) -> None:
    """What the policy wrote, in one line."""
    self.say(f"  {prompt} {completion}  ({'right' if correct else 'wrong'})".replace("\n", "\\n"))

  def end(self) -> None:
    """Takes the bar away."""
    if self._progress:
      self._progress.stop()
      self._progress = None


def sparkline(values: Iterable[float]) -> str:
  """A row of small bars, scaled from 0 to the largest value; a value that is not finite is drawn as 0."""
  values = [value if math.isfinite(value) else 0.0 for value in values]
  top = max(values, default=0.0)
  return "".join(SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] if top > 0 else SPARKS[0] for value in values)
