"""The lines of the live panel."""

import pytest
from test_display import METRICS

from gtpo_jax.logs.display import one_line, packed, panel_lines, shortened, sparkline, speeds


@pytest.mark.parametrize("steps", [1, 5, 32])
@pytest.mark.parametrize("width", [30, 40, 60, 78, 80, 140])
def test_lines_are_never_wider_than_the_terminal(width, steps):
  sample = ("p" * 200, "c" * 200, True)
  lines = panel_lines(METRICS, [0.25] * steps, [0.5] * steps, sample, width)
  assert max(map(len, lines)) <= width
  assert "accuracy 25%" in lines[0]
  assert any("entropy 0.500" in line for line in lines)


def test_accuracy_stands_beside_entropy_where_there_is_room():
  sample = ("1+2:", "3", True)
  wide = panel_lines(METRICS, [0.0, 1.0], [1.0, 0.5], sample, 60)
  assert wide[0] == "accuracy 100% ▁█  entropy 0.500 █▅"
  narrow = panel_lines(METRICS, [0.0] * 32, [1.0] * 32, sample, 40)
  assert narrow[0].startswith("accuracy 0% ▁") and narrow[1].startswith("entropy 1.000 █")


def test_parts_are_packed_into_lines():
  assert packed(["aaa", "bbb", "c"], 8) == ["aaa  bbb", "c"]
  assert packed(["too long for it", "b"], 4) == ["too long for it", "b"]


def test_a_long_sample_keeps_its_verdict():
  assert shortened(("1+2:", "3", True), 40) == "1+2: 3  (right)"
  assert shortened(("1+2:", "3" * 40, False), 20) == "1+2: 33333…  (wrong)"
  assert shortened(("1+2:", "三" * 40, False), 20) == "1+2: 三三…  (wrong)"
  assert one_line(("1+2:", "3", None)) == "1+2: 3  (no verdict)"
  assert one_line(("a\nb", "c", True)) == "a\\nb c  (right)"


def test_speeds_with_more_tokens_sampled_than_trained_and_without_time():
  assert speeds(METRICS | {"tokens/sampled": 6000.0})[0] == "sampling 50% at 6,000 tokens/s"
  no_time = dict.fromkeys(("time/sample", "time/reward", "time/update", "time/step"), 0.0)
  assert speeds(METRICS | no_time) == ["sampling 0%", "reward 0%", "update 0%"]


def test_a_sparkline_is_scaled_to_its_largest_value():
  assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
  assert sparkline([0.25, 0.5], top=1.0) == "▃▅"
  assert sparkline([]) == ""
  assert sparkline([0.0]) == "▁"
  assert sparkline([float("nan"), 1.0]) == "▁█"


def test_turns_and_calls_of_episodes_are_shown():
  metrics = METRICS | {"env/turns": 2.25, "env/calls": 1.0}
  lines = panel_lines(metrics, [0.5], [0.5], ("1+2:", "3", True), 100)
  assert any("turns 2.2  calls 1.0" in line for line in lines)
