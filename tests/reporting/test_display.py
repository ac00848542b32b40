"""Terminal output: a panel on a terminal, plain lines elsewhere."""

import io

from rich.console import Console

from gtpo_jax.reporting.display import Display, sparkline, speeds

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
  display.sample(*SAMPLE)
  display.end()


def test_plain_lines_without_a_terminal():
  lines = printed(False, run).splitlines()
  assert [line.split("s] ")[1] for line in lines] == [
    "step 3  correct 25%  entropy 0.667 █  length 12.3  1,500 tokens/s",
    "  1+2: it is\\n[bold]3[/bold]  (right)",
  ]


def test_the_panel_of_a_terminal():
  text = printed(True, run)
  assert "\x1b[" in text  # the panel is redrawn in place
  last = text[text.rindex("gtpo") :]
  assert "4/8" in last
  assert "left" in last
  for part in (
    "step 4  correct 25%  entropy 0.500 █▇  length 12.3  1,500 tokens/s",
    "reward -0.125  loss 0.0625  sampling 3,000 tokens/s 50%, reward 5%, update 6,000 tokens/s 25%",
    "1+2: it is\\n[bold]3[/bold]  (right)",
  ):
    assert part in last, last
  assert "\x1b[?25h" in last  # the cursor is visible again


def test_a_narrow_terminal_truncates_lines():
  text = printed(True, run, width=40)
  assert "…" in text
  assert "tokens/s 25%" not in text


def test_a_disabled_display_prints_nothing(capsys):
  run(Display(enabled=False))
  assert capsys.readouterr() == ("", "")


def test_speeds_with_more_tokens_sampled_than_trained_and_without_time():
  assert speeds(METRICS | {"tokens/sampled": 6000.0}).startswith("sampling 6,000 tokens/s 50%")
  no_time = dict.fromkeys(("time/sample", "time/reward", "time/update", "time/step"), 0.0)
  assert speeds(METRICS | no_time) == "sampling 0%, reward 0%, update 0%"


def test_a_sparkline_is_scaled_to_its_largest_value():
  assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
  assert sparkline([]) == ""
  assert sparkline([0.0]) == "▁"
  assert sparkline([float("nan"), 1.0]) == "▁█"
