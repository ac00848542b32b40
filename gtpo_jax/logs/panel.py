"""The lines of the live panel: the metrics of a step, laid out for the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from gtpo_jax.logs.text import visible

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

  Args:
    metrics: the metrics of the step.
    accuracies: the share of correct completions of the latest steps, the last one included.
    entropies: the mean entropy of the same steps, in nats.
    sample: one of the step's completions.
    width: columns of the terminal.
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
