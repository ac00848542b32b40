"""Terminal output: a panel on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from gtpo_jax.logs import display as display_module
from gtpo_jax.logs.display import Display, one_line
from gtpo_jax.runtime.device_errors import phase

METRICS = {
  "entropy/mean": 0.5,
  "reward/accuracy": 0.25,
  "reward/mean": -0.125,
  "length/mean": 12.34,
  "tokens/s": 1500.0,
  "loss": 0.0625,
  "time/step": 2.0,
  "time/sample": 1.0,
  "time/reward": 0.1,
  "time/update": 0.5,
  "tokens/completion": 3000.0,
}
SAMPLE = ("1+2:", "it is\n[bold]3[/bold]", True)


def printed(terminal, act, width=120):
  """Returns what `act` prints through a display."""
  out = io.StringIO()
  display = Display(
    console=Console(
      file=out,
      force_terminal=terminal,
      width=width,
      highlight=False,
      soft_wrap=True,
      color_system=None,
    )
  )
  act(display)
  return out.getvalue()


def run(display):
  display.begin("gtpo", total=8, done=2)
  for step in (3, 4):
    display.step(step, METRICS | {"entropy/mean": 2.0 / step}, SAMPLE, line=step == 3)
  display.say("  " + one_line(SAMPLE))
  display.end()


def test_plain_lines_without_a_terminal():
  lines = printed(False, run).splitlines()
  assert [line.split("s] ")[1] for line in lines] == [
    "step 3  correct 25%  entropy 0.667 █  length 12.3  1,500 tokens/s  0 s left",
    "  1+2: it is\\n[bold]3[/bold]  (right)",
  ]


def test_the_panel_of_a_terminal():
  text = printed(True, run)
  assert "\x1b[" in text  # the panel is redrawn in place
  last = text[text.rindex("gtpo") :]
  assert "4/8" in last
  assert "left" in last
  for part in (
    "accuracy 25% ▃▃  entropy 0.500 █▇",
    "reward -0.125  loss 0.0625  length 12.3  1,500 tokens/s",
    "sampling 50% at 3,000 tokens/s  reward 5%  update 25% at 6,000 tokens/s",
    "1+2: it is\\n[bold]3[/bold]  (right)",
  ):
    assert part in last, last
  assert "\x1b[?25h" in last  # the cursor is visible again


def test_a_stop_request_is_shown_with_what_is_awaited():
  """On a terminal in the panel, which would cover a line on stderr."""

  def stop(display):
    display.begin("gtpo", total=8)
    with phase("update"):
      display.notice("stopping")
      display.step(3, METRICS, SAMPLE, line=True)
      display._live.refresh()
    with phase("saving"):
      display._live.refresh()
    display.end()

  text = printed(True, stop)
  assert "  stopping" in text
  assert "  waiting for: update" in text
  assert "  waiting for: saving" in text


def test_a_stop_request_without_a_panel_goes_to_stderr(capsys):
  text = printed(False, lambda display: display.notice("stopping"))
  assert (text, capsys.readouterr().err) == ("", "\ngtpo: stopping\n")


def count(display):
  with display.counting("evaluated completions", 40) as done:
    for i in (0, 10, 20, 40):
      done(i)
    if display._live:
      display._live.refresh()


def test_a_part_of_a_run_counts_up_on_a_terminal():
  text = printed(True, count)
  assert "evaluated completions" in text and "/40" in text
  assert "\x1b[?25h" in text  # the cursor is visible again


def test_a_part_of_a_run_prints_lines_that_say_what_remains(monkeypatch):
  monkeypatch.setattr(display_module, "QUIET_S", 0.0)
  lines = printed(False, count).splitlines()
  assert [line.split("s] ")[1] for line in lines] == [
    "evaluated completions: 0 of 40",
    "evaluated completions: 10 of 40  0 s left",
    "evaluated completions: 20 of 40  0 s left",
  ]


def test_short_work_prints_nothing():
  assert printed(False, count) == ""


def test_a_slow_step_is_printed_although_no_line_was_due(monkeypatch):
  monkeypatch.setattr(display_module, "QUIET_S", 0.0)
  assert printed(False, run).count("entropy") == 2


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (5900, "98 min"), (9000, "2.5 h")],
)
def test_durations(seconds, text):
  assert display_module.duration(seconds) == text


@pytest.mark.parametrize("width", [140, 80, 60])
def test_no_value_is_cut_at_any_width(width):
  """Only the bar's columns and the sample adapt to the width."""

  def long_run(display):
    display.begin("gtpo", total=200)
    for step in range(1, 41):
      display.step(step, METRICS, ("a long prompt " * 10, "a long completion " * 10, False), False)
    display._live.refresh()
    display.end()

  text = printed(True, long_run, width=width)
  last = text[text.rindex("40/200") :]
  for value in ("accuracy 25% ▃", "entropy 0.500 █", "reward -0.125", "loss 0.0625", "length 12.3"):
    assert value in last, last
  for value in ("1,500 tokens/s", "sampling 50% at 3,000 tokens/s", "update 25% at 6,000 tokens/s"):
    assert value in last, last
  (cut,) = [line for line in last.splitlines() if "…" in line]
  assert cut.rstrip().endswith("…  (wrong)")


def test_a_disabled_display_prints_nothing(capsys):
  run(Display(enabled=False))
  assert capsys.readouterr() == ("", "")
