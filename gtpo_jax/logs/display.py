"""Terminal output of a run: a live panel of metrics on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  SpinnerColumn,
  TaskID,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)
from rich.text import Text

from gtpo_jax.logs.text import visible
from gtpo_jax.runtime.device_errors import current_phase
from gtpo_jax.runtime.signals import print_notice

QUIET_S = 5.0  # without a terminal, work in progress prints a line this often
INDENT = "  "  # of the panel's lines below the progress bar
BAR_WIDTH = 40
BESIDE_BAR = 50  # columns for the name, the count and the time that remains


class Display:
  """Prints log lines and, on a terminal, a live panel below them.

  The panel shows progress, time left, accuracy, entropy, reward, the speed of each phase and the
  last sample.

  Args:
    enabled: if False, nothing is printed.
    console: the output to use instead of stdout; `enabled` has no effect on it.
  """

  def __init__(self, enabled: bool = True, console: Console | None = None):
    self._console = console or Console(quiet=not enabled, highlight=False, soft_wrap=True)
    self._live: Live | None = None  # the panel, while it is on the terminal
    self._progress: Progress | None = None  # its bars
    self._lines: list[Text] = []  # below the bars
    self._notice = ""  # below the lines; it outlives the panel
    self._accuracies: deque[float] = deque(maxlen=SPARKLINE_STEPS)
    self._entropies: deque[float] = deque(maxlen=SPARKLINE_STEPS)
    self._started = time.perf_counter()
    self._spoke = self._started  # when the last line was printed

  def say(self, text: str) -> None:
    """Prints a log line, prefixed with the seconds since the start."""
    self._spoke = time.perf_counter()
    self._console.print(f"[{self._spoke - self._started:6.1f} s] {text}", markup=False)

  def notice(self, text: str) -> None:
    """Shows a message until the panel ends. May be called on any thread and by signal handlers.

    The panel also names the phase that the run is waiting for. Without a panel, the message goes
    to stderr.
    """
    self._notice = text
    if not self._live:
      print_notice(text)

  def begin(self, name: str, total: int, done: int = 0) -> None:
    """Starts the panel of a phase with `total` steps, `done` of them complete."""
    self.end()
    self._total = total
    self._begun = (time.perf_counter(), done)
    if self._console.is_terminal:
      self._bar = self._start_panel(name, total, done)

  def advance(self, done: int, facts: Iterable[str], line: bool) -> None:
    """Updates the panel after a step.

    Args:
      done: the number of completed steps.
      facts: at least one line about the step, such as its metrics. A terminal shows all of them
        below the progress bar.
      line: whether to print the first of `facts` when the output is not a terminal. It is also
        printed if nothing was printed for `QUIET_S` seconds.
    """
    facts = list(facts)
    if self._live:
      self._progress.update(self._bar, completed=done)
      shown = (INDENT + fact.replace("\n", "\\n") for fact in facts)
      self._lines = [Text(fact, no_wrap=True, overflow="ellipsis") for fact in shown]
    elif line or self._is_quiet():
      began, before = self._begun
      self.say(facts[0] + _time_left(began, done - before, self._total - done))

  def step(self, step: int, metrics: Mapping[str, float], sample: Sample, line: bool) -> None:
    """Shows the metrics of a training step and one of its completions; `line` as in `advance`."""
    entropy = metrics["entropy/mean"]
    accuracy = metrics["reward/accuracy"]
    self._entropies.append(entropy)
    self._accuracies.append(accuracy)
    if self._live:
      width = self._console.width - len(INDENT)
      lines = panel_lines(metrics, [*self._accuracies], [*self._entropies], sample, width)
    else:
      lines = [
        f"step {step}  correct {percent(accuracy)}  "
        f"entropy {entropy:.3f} {sparkline(self._entropies)}  "
        f"length {metrics['length/mean']:.1f}  {metrics['tokens/s']:,.0f} tokens/s"
        + (
          f"  no verdict {missing:.0f}" if (missing := metrics.get("reward/no_verdict", 0)) else ""
        )
      ]
    self.advance(step, lines, line)

  @contextlib.contextmanager
  def counting(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a part of the run, such as an evaluation, while the context lasts.

    Yields:
      A function that takes how many of `total` are done.
    """
    alone = not self._live
    bar = None
    if not alone:
      bar = self._progress.add_task(name, total=total)
    elif self._console.is_terminal:
      bar = self._start_panel(name, total)
    began = time.perf_counter()

    def count(done: int) -> None:
      if bar is not None:
        self._progress.update(bar, completed=done)
      elif self._is_quiet() and done < total:
        self.say(f"{name}: {done} of {total}{_time_left(began, done, total - done)}")

    try:
      yield count
    finally:
      if alone:
        self.end()
      elif self._live:
        self._progress.remove_task(bar)

  @contextlib.contextmanager
  def waiting(self, text: str, line: bool = True) -> Iterator[None]:
    """Names the work in progress while the context lasts; a terminal shows its duration.

    Args:
      text: the work in progress.
      line: whether to print it when the output is not a terminal.
    """
    if not self._console.is_terminal:
      if line:
        self.say(text)
      yield
      return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=self._console, transient=True) as spinner:
      spinner.add_task(text, total=None)
      yield

  def end(self) -> None:
    """Removes the panel."""
    if self._live:
      self._live.stop()
      self._live = None
      self._lines = []

  def _is_quiet(self) -> bool:
    """Whether nothing was printed for a while."""
    return time.perf_counter() - self._spoke >= QUIET_S

  def _start_panel(self, name: str, total: int, done: int = 0) -> TaskID:
    """Shows the panel with one progress bar, and returns the bar."""
    self._progress = Progress(
      TextColumn("{task.description}", markup=False),
      BarColumn(max(min(BAR_WIDTH, self._console.width - BESIDE_BAR), 8)),
      MofNCompleteColumn(),
      TimeRemainingColumn(),
      TextColumn("left"),
      console=self._console,
    )
    self._live = Live(
      console=self._console,
      transient=True,
      redirect_stderr=sys.stderr.isatty(),  # else the panel would cover the lines printed there
      refresh_per_second=4,
      get_renderable=self._render,
    )
    bar = self._progress.add_task(name, total=total, completed=done)
    self._live.start()
    return bar

  def _render(self) -> Group:
    """Returns the present content of the panel; called for every refresh."""
    notices = [self._notice] if self._notice else []
    if notices and current_phase():
      notices.append(f"waiting for: {current_phase()}")
    bold = [Text(INDENT + notice, style="bold") for notice in notices]
    return Group(self._progress, *self._lines, *bold)


def _time_left(began: float, done: int, left: int) -> str:
  """Returns how long `left` steps take if they are as fast as the `done` ones since `began`."""
  if done < 1 or left < 1:
    return ""
  seconds = (time.perf_counter() - began) * left / done
  return f"  {duration(seconds)} left"


def duration(seconds: float) -> str:
  """Returns a duration with two digits or more, such as 45 s, 12 min or 3.5 h."""
  if seconds < 100:
    return f"{seconds:.0f} s"
  return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 32
GAP = "  "  # between two values
Sample = tuple[str, str, bool | None]  # prompt, completion, whether it is correct if judged
VERDICTS = {True: "right", False: "wrong", None: "no verdict"}


def panel_lines(
  metrics: Mapping[str, float],
  accuracies: Sequence[float],
  entropies: Sequence[float],
  sample: Sample,
  width: int,
) -> list[str]:
  """Returns the lines of the panel, none longer than `width`; only the sample is shortened.

  The latest accuracies, and entropies in nats, include those of the step.
  """
  loss = metrics["loss"]
  values = [
    f"reward {metrics['reward/mean']:.3f}",
    "no tokens in the loss" if math.isnan(loss) else f"loss {loss:.4f}",
    f"length {metrics['length/mean']:.1f}",
    f"{metrics['tokens/s']:,.0f} tokens/s",
  ]
  if "env/turns" in metrics:
    values += [f"turns {metrics['env/turns']:.1f}", f"calls {metrics['env/calls']:.1f}"]
  return [
    *_curves(f"accuracy {percent(accuracies[-1])}", accuracies, entropies, width),
    *packed(values, width),
    *packed(speeds(metrics), width),
    shortened(sample, width),
  ]


def _curves(
  accuracy: str, accuracies: Sequence[float], entropies: Sequence[float], width: int
) -> list[str]:
  """Returns accuracy and entropy with their sparklines side by side, or one above the other."""
  entropy = f"entropy {entropies[-1]:.3f}"
  beside = (width - len(accuracy) - len(entropy) - len(GAP) - 2) // 2
  steps = min(beside, SPARKLINE_STEPS)
  if steps >= min(len(entropies), SPARKLINE_STEPS // 4):
    left = f"{accuracy} {sparkline(accuracies[-steps:], top=1.0)}"
    return [f"{left}{GAP}{entropy} {sparkline(entropies[-steps:])}"]
  lines = ((accuracy, accuracies, 1.0), (entropy, entropies, None))
  return [
    f"{text} {sparkline(values[-max(width - len(text) - 1, 1) :], top)}"
    for text, values, top in lines
  ]


def packed(parts: Iterable[str], width: int) -> list[str]:
  """Joins parts to as few lines of at most `width` columns as possible, in order.

  A part that is longer than a line has its own.
  """
  lines: list[str] = []
  for part in parts:
    if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
      lines[-1] += GAP + part
    else:
      lines.append(part)
  return lines


def shortened(sample: Sample, width: int) -> str:
  """Returns a sample on one line of at most `width` columns; the verdict is never cut."""
  text = one_line(sample)
  if cell_len(text) <= width:  # an East Asian character takes two columns
    return text
  verdict = text[text.rindex(GAP + "(") :]
  return set_cell_size(text, max(width - len(verdict) - 1, 0)).rstrip() + "…" + verdict


def one_line(sample: Sample) -> str:
  """Returns a prompt, its completion and the verdict on one line, with \\n for line breaks.

  Characters that a terminal would act on, or cannot show, become symbols.
  """
  prompt, completion, correct = sample
  text = visible(f"{prompt} {completion}".replace("\n", "\\n"))
  return f"{text}{GAP}({VERDICTS[correct]})"


def speeds(metrics: Mapping[str, float]) -> list[str]:
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
    speed = f" at {tokens / seconds:,.0f} tokens/s" if tokens is not None and seconds else ""
    parts.append(f"{name} {seconds / step_s if step_s else 0:.0%}{speed}")
  return parts


def percent(share: float) -> str:
  """Returns a share in percent, or "no verdict" if it is NaN."""
  return "no verdict" if math.isnan(share) else f"{share:.0%}"


def sparkline(values: Iterable[float], top: float | None = None) -> str:
  """Returns a row of small bars, scaled from 0 to `top`, or to the largest value if it is None.

  Values that are not finite count as 0.
  """
  values = [value if math.isfinite(value) else 0.0 for value in values]
  top = max(values, default=0.0) if top is None else top
  if top <= 0:
    return SPARKS[0] * len(values)
  last = len(SPARKS) - 1
  return "".join(SPARKS[min(int(value / top * len(SPARKS)), last)] for value in values)
