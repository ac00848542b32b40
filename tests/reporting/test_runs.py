"""Runs read and put together, their curves, and what is drawn of them, without a browser."""

import base64
import dataclasses
import gzip
import json
import re

import numpy as np
import pytest

from gtpo_jax.algorithms import make
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.reporting.figures import (
  Line,
  composition_figures,
  evaluation_figures,
  figure,
  step_figures,
  time_split,
)
from gtpo_jax.reporting.runs import Kind, Run, kinds_of, number, read_run, run_label, smoothed
from gtpo_jax.reporting.viewer import pack, visible
from gtpo_jax.runtime.errors import UserError


def run(workdir, rows, evaluations=None, **changes):
  config = flatten(to_dict(Config())) | {
    key.replace("__", "."): value for key, value in changes.items()
  }
  return Run(workdir, config, {i + 1: row for i, row in enumerate(rows)}, evaluations or {})


def rewards(*values):
  return [{"reward/mean": value} for value in values]


def test_runs_that_differ_in_their_seed_alone_are_one_kind(tmp_path):
  runs = [
    run(tmp_path / str(i), rewards(0.5), seed=seed, algorithm__name=name, mesh__data=mesh)
    for i, (seed, name, mesh) in enumerate([(3, "gtpo", -1), (0, "grpo", -1), (1, "gtpo", 2)])
  ]
  kinds = kinds_of(runs)
  assert [kind.label for kind in kinds] == ["gtpo", "grpo"]
  assert [[run.config["seed"] for run in kind.runs] for kind in kinds] == [[1, 3], [0]]
  assert [run_label(kind, run) for kind in kinds for run in kind.runs] == [
    "gtpo, seed 1",
    "gtpo, seed 3",
    "grpo",
  ]


def test_a_kind_is_called_by_what_sets_it_apart(tmp_path):
  kinds = kinds_of(
    [
      run(tmp_path / "a", rewards(0.5)),
      run(tmp_path / "b", rewards(0.5), algorithm__compare="matrix"),
      run(tmp_path / "c", rewards(0.5), batch__group=8),
    ]
  )
  assert [kind.label for kind in kinds] == [
    "gtpo, batch.group=16",
    "gtpo, compare=matrix, batch.group=16",
    "gtpo, batch.group=8",
  ]


def test_more_kinds_than_colours_are_refused(tmp_path):
  with pytest.raises(
    UserError, match="9 kinds of run side by side cannot be told apart; name those of 8 at most"
  ):
    kinds_of([run(tmp_path / str(i), rewards(0.5), batch__group=i + 2) for i in range(9)])


def test_a_series_is_of_the_steps_that_all_seeds_have(tmp_path):
  kind = Kind(
    "gtpo",
    (
      run(tmp_path / "a", rewards(0.25, None, 0.75)),
      run(tmp_path / "b", rewards(0.5, "high"), seed=1),
    ),
  )
  steps, values = kind.series("reward/mean")
  assert steps.tolist() == [1, 2]
  np.testing.assert_array_equal(values, [[0.25, np.nan], [0.5, np.nan]])
  assert np.isnan(number({"x": True}, "x"))


def test_smoothing_by_hand():
  np.testing.assert_allclose(
    smoothed(np.array([1.0, 3.0, 5.0]), 2),
    [1, (0.5 * 1 + 3) / 1.5, (0.25 * 1 + 0.5 * 3 + 5) / 1.75],
  )
  np.testing.assert_array_equal(
    smoothed(np.array([[2.0, 7.0, -1.0]]), 0.2), [[2, 7, -1]]
  )  # shorter than two steps: as it is
  np.testing.assert_allclose(smoothed(np.array([4.0, np.nan, 4.0]), 9), [4, np.nan, 4])
  np.testing.assert_allclose(smoothed(np.full(50, 0.3), 10), 0.3)  # no bias at the start


def test_time_is_split_by_the_median_step_without_the_first(tmp_path):
  step = lambda sample, reward, update, whole: {
    "time/sample": sample,
    "time/reward": reward,
    "time/update": update,
    "time/step": whole,
  }
  kind = Kind(
    "gtpo",
    (run(tmp_path, [step(90, 9, 90, 200), step(1, 0, 2, 4), step(2, 1, 3, 7), step(3, 2, 4, 10)]),),
  )
  assert time_split(kind) == {"sampling": 2, "reward": 1, "update": 3, "other": 1}
  alone = Kind("gtpo", (run(tmp_path, [step(1, 0, 2, 4)]),))
  assert time_split(alone) == {"sampling": 1, "reward": 0, "update": 2, "other": 1}


def test_a_curve_of_seeds_has_a_band(tmp_path):
  kinds = [
    Kind(
      "gtpo",
      (run(tmp_path / "a", rewards(0.2, 0.4)), run(tmp_path / "b", rewards(0.4, 0.8), seed=1)),
    )
  ]
  (drawn,) = step_figures(kinds)
  assert drawn["title"] == "Mean reward" and drawn["lines"][0]["x"] == [1, 2]
  assert drawn["lines"][0]["y"] == pytest.approx([0.3, 0.6])
  assert (
    drawn["svg"].count('class="raw kind0"') == 2 and drawn["svg"].count('class="smooth kind0"') == 2
  )  # a band and the mean


def test_long_runs_are_drawn_in_few_points(tmp_path):
  values = np.arange(10_000) % 2
  (drawn,) = step_figures([Kind("gtpo", (run(tmp_path, rewards(*values.tolist())),))])
  line = drawn["lines"][0]
  assert (
    len(line["x"]) == 589 and line["x"][:2] == [9, 26] and line["y"][0] == pytest.approx(8 / 17)
  )  # 17 steps a point
  assert len(drawn["svg"]) < 60_000


def test_pass_at_k_has_the_interval_of_its_evaluation(tmp_path):
  row = lambda a, b: {
    "eval/sums/pass@1": a,
    "eval/sums/pass@2": b,
    "eval/sums/mean@2": a,
    "intervals": {"eval/sums/pass@1": [a - 0.1, a + 0.1], "eval/sums/pass@2": [b - 0.1, None]},
  }
  kind = Kind("gtpo", (run(tmp_path, rewards(0.5), {0: row(0.2, 0.3), 4: row(0.6, 0.8)}),))
  steps, values, ends = kind.evaluated("eval/sums/pass@1")
  assert steps.tolist() == [0, 4] and values.tolist() == [[0.2, 0.6]]
  np.testing.assert_allclose(ends, [[[0.1, 0.3], [0.5, 0.7]]])
  held_out, at_k = evaluation_figures([kind])
  assert (held_out["title"], at_k["title"]) == ("Held-out accuracy", "pass@k")
  found = [(line["name"], line["x"], line["y"]) for line in at_k["lines"]]
  assert found == [("step 4", [1, 2], [0.6, 0.8]), ("step 0", [1, 2], [0.2, 0.3])]
  assert at_k["over"] == "k" and at_k["svg"].count("smooth kind0") == 2  # two bands


def test_groups_add_up_to_one(tmp_path):
  rows = [
    {"groups/all_correct": 0.25, "groups/all_wrong": 0.5},
    {"groups/all_correct": 1.0, "groups/all_wrong": 0.0},
  ]
  (drawn,) = composition_figures([Kind("gtpo", (run(tmp_path, rows),))])
  assert {line["name"]: line["y"] for line in drawn["lines"]} == {
    "all correct": [0.25, 1],
    "mixed": [0.25, 0],
    "all wrong": [0.5, 0],
  }


def test_pictures_are_coloured_by_the_page_and_fit_into_one():
  line = Line(
    3, 1, "O−", np.arange(4), np.arange(4) / 3, np.arange(4)[None] / 3, np.full((2, 4), np.nan)
  )
  drawn = [figure(title, "nats", "Policy", [line])["svg"] for title in ("one", "two")]
  for svg in drawn:
    assert svg.startswith("<svg viewBox=") and "var(--kind3)" in svg and "var(--ink-2)" in svg
    assert not re.search(r"#[ab]000\d\d", svg) and "<metadata" not in svg and "DOCTYPE" not in svg
  ids = [name for svg in drawn for name in re.findall(r' id="([^"]+)"', svg)]
  assert len(set(ids)) == len(ids)


def test_nothing_finite_draws_nothing(tmp_path):
  assert step_figures([Kind("gtpo", (run(tmp_path, rewards(None, None)),))]) == []
  assert evaluation_figures([Kind("gtpo", (run(tmp_path, rewards(0.5)),))]) == []


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    ("a b", "a b"),
    ("\n", "⏎"),
    ("\t\r", "⇥␍"),
    ("\x00\x1b\x7f", "␀␛␡"),
    ("\u202e\u2066\u200f", "‹U+202E›‹U+2066›‹U+200F›"),
    ("\ud800\ufffe\ue000", "‹U+D800›‹U+FFFE›‹U+E000›"),
    ("\u2028\u2029", "‹U+2028›‹U+2029›"),
    ("\u200d\u200b", "‹ZWJ›‹ZWSP›"),
    ("日本é🙂\ufffd", "日本é🙂\ufffd"),
    ("", ""),
  ],
)
def test_what_steers_text_is_shown_as_a_sign(text, shown):
  assert visible(text) == shown
  assert visible("a\n" + text, "\n\t\r").startswith("a\n")


def test_packed_numbers_keep_five_digits():
  rng = np.random.default_rng(0)
  whole = rng.integers(-5, 2**31 - 1, 1000).astype(np.int32)
  real = rng.normal(size=1000) * 10.0 ** rng.integers(-30, 30, 1000)
  real = np.append(real[:-3], [0.0, np.inf, 1.0]).astype(np.float32)
  raw = gzip.decompress(base64.b64decode(pack([whole, real])))
  words = np.frombuffer(raw, np.uint8).reshape(4, -1).T.copy().view("<u4").reshape(2, -1)
  np.testing.assert_array_equal(words[0].view("<i4"), whole)
  np.testing.assert_allclose(words[1].view("<f4"), real, rtol=2**-16)
  assert words[1].view("<f4")[-3:].tolist() == [0.0, np.inf, 1.0]


def test_a_run_is_read_back(tmp_path):
  """From its workdir alone: the model that it began with may be out of reach."""
  config = to_dict(dataclasses.replace(Config(), seed=5))
  config["model"]["path"], config["algorithm"]["alpha2"] = "nobody/nothing", 0.25
  del config["log"]  # of an older version: the default
  (tmp_path / "config.json").write_text(json.dumps(config))
  row = {"reward/mean": 0.5, "entropy/mean": 0.25, "time/step": 1.0}
  (tmp_path / "metrics.jsonl").write_text(
    "\n".join(
      map(
        json.dumps,
        [
          {"step": 0, "eval/sums/mean@2": 0.125},
          {"step": 1, **row},
          {"step": 2, **row, "eval/sums/mean@2": 0.5},
          ["no row"],
        ],
      )
    )
    + '\n{"st'
  )
  (tmp_path / "evaluations.jsonl").write_text(
    json.dumps({"step": 2, "eval/sums/pass@1": 0.5, "intervals": {}}) + "\n"
  )
  read = read_run(tmp_path)
  assert (read.config["seed"], read.steps, sorted(read.rows)) == (5, 2, [0, 1, 2])
  assert read.algorithm == make("gtpo", alpha2=0.25) and read.config["log.samples"] == 4
  assert read.evaluations == {
    0: {"eval/sums/mean@2": 0.125},
    2: {"eval/sums/mean@2": 0.5, "eval/sums/pass@1": 0.5, "step": 2, "intervals": {}},
  }
