"""The figures of a report: the selected curves and the drawn SVG."""

import re

import numpy as np
import pytest
from run_rows import make_run, rewards

from gtpo_jax.cli.report.figures import (
  composition_figures,
  evaluation_figures,
  step_figures,
  time_split,
)
from gtpo_jax.cli.report.inline_svg import Line, curve_figure
from gtpo_jax.cli.report.runs import RunGroup


def test_time_is_split_by_the_median_step_without_the_first(tmp_path):
  names = ("time/sample", "time/reward", "time/update", "time/step")
  step = lambda *seconds: dict(zip(names, seconds, strict=True))
  rows = [step(90, 9, 90, 200), step(1, 0, 2, 4), step(2, 1, 3, 7), step(3, 2, 4, 10)]
  group = RunGroup("gtpo", (make_run(tmp_path, rows),))
  assert time_split(group) == {"sampling": 2, "reward": 1, "update": 3, "other": 1}
  one_step = RunGroup("gtpo", (make_run(tmp_path, rows[1:2]),))
  assert time_split(one_step) == {"sampling": 1, "reward": 0, "update": 2, "other": 1}


def test_a_curve_of_several_seeds_has_a_band(tmp_path):
  runs = (
    make_run(tmp_path / "a", rewards(0.2, 0.4)),
    make_run(tmp_path / "b", rewards(0.4, 0.8), seed=1),
  )
  (figure,) = step_figures([RunGroup("gtpo", runs)])
  (line,) = figure["lines"]
  assert figure["title"] == "Mean reward"
  assert line["x"] == [1, 2]
  assert line["y"] == pytest.approx([0.3, 0.6])
  assert figure["svg"].count('class="raw color0"') == 2
  assert figure["svg"].count('class="smooth color0"') == 2  # the band and the mean


def test_truth_is_drawn_where_it_is_known(tmp_path):
  """A class without tokens, such as the filler of a task that has none, has no curve."""
  keys = [f"truth/entropy/{name}" for name in ("decisive", "copied", "filler")]
  row = lambda x: dict(zip(keys, (x, x, None), strict=True))
  (figure,) = step_figures([RunGroup("gtpo", (make_run(tmp_path, [row(0.7), row(0.6)]),))])
  assert (figure["title"], figure["section"]) == ("Entropy by token class", "Truth")
  assert [line["name"] for line in figure["lines"]] == ["decisive", "copied"]


def test_long_runs_are_drawn_with_few_points(tmp_path):
  values = np.arange(10_000) % 2
  (figure,) = step_figures([RunGroup("gtpo", (make_run(tmp_path, rewards(*values.tolist())),))])
  (line,) = figure["lines"]
  assert len(line["x"]) == 589  # 17 steps each
  assert line["x"][:2] == [9, 26]
  assert line["y"][0] == pytest.approx(8 / 17)
  assert len(figure["svg"]) < 60_000


def test_pass_at_k_has_the_interval_of_its_evaluation(tmp_path):
  row = lambda a, b: {
    "eval/sums/pass@1": a,
    "eval/sums/pass@2": b,
    "eval/sums/mean@2": a,
    "intervals": {"eval/sums/pass@1": [a - 0.1, a + 0.1], "eval/sums/pass@2": [b - 0.1, None]},
  }
  evaluations = {0: row(0.2, 0.3), 4: row(0.6, 0.8)}
  group = RunGroup("gtpo", (make_run(tmp_path, rewards(0.5), evaluations),))
  steps, values, intervals = group.evaluated("eval/sums/pass@1")
  assert steps.tolist() == [0, 4]
  assert values.tolist() == [[0.2, 0.6]]
  np.testing.assert_allclose(intervals, [[[0.1, 0.3], [0.5, 0.7]]])
  held_out, pass_at_k = evaluation_figures([group])
  assert (held_out["title"], pass_at_k["title"]) == ("Held-out accuracy", "pass@k")
  lines = [(line["name"], line["x"], line["y"]) for line in pass_at_k["lines"]]
  assert lines == [("step 4", [1, 2], [0.6, 0.8]), ("step 0", [1, 2], [0.2, 0.3])]
  assert pass_at_k["over"] == "k"
  assert pass_at_k["svg"].count("smooth color0") == 2  # two bands


def test_group_shares_add_up_to_one(tmp_path):
  rows = [
    {"groups/all_correct": 0.25, "groups/all_wrong": 0.5},
    {"groups/all_correct": 1.0, "groups/all_wrong": 0.0},
  ]
  (figure,) = composition_figures([RunGroup("gtpo", (make_run(tmp_path, rows),))])
  assert {line["name"]: line["y"] for line in figure["lines"]} == {
    "all correct": [0.25, 1],
    "mixed": [0.25, 0],
    "all wrong": [0.5, 0],
  }


def test_figures_use_the_colors_of_the_page_and_share_no_ids():
  y = np.arange(4) / 3
  line = Line(
    color=3, dash=1, name="O−", x=np.arange(4), y=y, raw=y[None], band=np.full((2, 4), np.nan)
  )
  drawn = [curve_figure(title, "nats", "Policy", [line])["svg"] for title in ("one", "two")]
  for svg in drawn:
    assert svg.startswith("<svg viewBox=")
    assert "var(--color3)" in svg
    assert "var(--ink-2)" in svg
    assert not re.search(r"#[ab]000\d\d", svg)
    assert "<metadata" not in svg
    assert "DOCTYPE" not in svg
  ids = [name for svg in drawn for name in re.findall(r' id="([^"]+)"', svg)]
  assert len(set(ids)) == len(ids)


def test_a_metric_without_numbers_has_no_figure(tmp_path):
  assert step_figures([RunGroup("gtpo", (make_run(tmp_path, rewards(None, None)),))]) == []
  assert evaluation_figures([RunGroup("gtpo", (make_run(tmp_path, rewards(0.5)),))]) == []


def test_several_sources_have_figures_of_their_own(tmp_path):
  row = lambda a, b: {"source/rg:gcd/accuracy": a, "source/sums/accuracy": b}
  group = RunGroup("gtpo", (make_run(tmp_path, [row(0.1, 0.5), row(0.2, None)]),))
  first, second = step_figures([group])
  assert first["title"] == "Accuracy in training on rg:gcd"
  assert second["title"] == "Accuracy in training on sums"


def test_the_evaluation_of_all_sources_comes_first(tmp_path):
  keys = ("eval/all/mean@2", "eval/aime/mean@2", "eval/sums/mean@2")
  evaluations = {step: dict.fromkeys(keys, 0.5) for step in (0, 1)}
  group = RunGroup("gtpo", (make_run(tmp_path, rewards(1.0), evaluations),))
  assert group.eval_keys[0] == "eval/all/mean@2"
  titles = [figure["title"] for figure in evaluation_figures([group])]
  assert titles == [f"Held-out accuracy on {name}" for name in ("all", "aime", "sums")]
