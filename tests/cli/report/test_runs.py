"""Runs read from their workdirs, grouped by config and smoothed."""

import dataclasses
import json

import numpy as np
import pytest
from run_rows import make_run, rewards

from gtpo_jax.algorithms import make
from gtpo_jax.cli.report.runs import RunGroup, group_runs, number, read_run, run_label, smoothed
from gtpo_jax.config import Config, to_dict
from gtpo_jax.runtime.errors import UserError


def test_runs_that_differ_only_in_seed_are_one_group(tmp_path):
  fields = [(3, "gtpo", -1), (0, "grpo", -1), (1, "gtpo", 2)]
  runs = [
    make_run(tmp_path / str(i), rewards(0.5), seed=seed, algorithm__name=name, mesh__data=mesh)
    for i, (seed, name, mesh) in enumerate(fields)
  ]
  groups = group_runs(runs)
  assert [group.label for group in groups] == ["gtpo", "grpo"]
  assert [[run.config["seed"] for run in group.runs] for group in groups] == [[1, 3], [0]]
  labels = [run_label(group, run) for group in groups for run in group.runs]
  assert labels == ["gtpo, seed 1", "gtpo, seed 3", "grpo"]


def test_a_group_is_labelled_by_the_fields_that_differ(tmp_path):
  groups = group_runs(
    [
      make_run(tmp_path / "a", rewards(0.5)),
      make_run(tmp_path / "b", rewards(0.5), algorithm__compare="matrix"),
      make_run(tmp_path / "c", rewards(0.5), batch__group=8),
    ]
  )
  assert [group.label for group in groups] == [
    "gtpo, batch.group=16",
    "gtpo, compare=matrix, batch.group=16",
    "gtpo, batch.group=8",
  ]


def test_more_groups_than_colors_are_rejected(tmp_path):
  runs = [make_run(tmp_path / str(i), rewards(0.5), batch__group=i + 2) for i in range(9)]
  message = "9 different configs are too many for one report; pass runs of at most 8"
  with pytest.raises(UserError, match=message):
    group_runs(runs)


def test_a_series_covers_the_steps_that_all_seeds_have(tmp_path):
  group = RunGroup(
    "gtpo",
    (
      make_run(tmp_path / "a", rewards(0.25, None, 0.75)),
      make_run(tmp_path / "b", rewards(0.5, "high"), seed=1),
    ),
  )
  steps, values = group.series("reward/mean")
  assert steps.tolist() == [1, 2]
  np.testing.assert_array_equal(values, [[0.25, np.nan], [0.5, np.nan]])
  assert np.isnan(number({"x": True}, "x"))


def test_smoothing_by_hand():
  np.testing.assert_allclose(
    smoothed(np.array([1.0, 3.0, 5.0]), 2),
    [1, (0.5 * 1 + 3) / 1.5, (0.25 * 1 + 0.5 * 3 + 5) / 1.75],
  )
  # A span of at most one value returns the values unchanged.
  np.testing.assert_array_equal(smoothed(np.array([[2.0, 7.0, -1.0]]), 0.2), [[2, 7, -1]])
  np.testing.assert_allclose(smoothed(np.array([4.0, np.nan, 4.0]), 9), [4, np.nan, 4])
  np.testing.assert_allclose(smoothed(np.full(50, 0.3), 10), 0.3)  # no bias at the start


def test_a_run_is_read_from_its_workdir_alone(tmp_path):
  """The model that the run started from may no longer exist."""
  config = to_dict(dataclasses.replace(Config(), seed=5))
  config["model"]["path"] = "nobody/nothing"
  config["algorithm"]["alpha2"] = 0.25
  del config["log"]  # an older version had no such section; defaults apply
  (tmp_path / "config.json").write_text(json.dumps(config))
  row = {"reward/mean": 0.5, "entropy/mean": 0.25, "time/step": 1.0}
  rows = [
    {"step": 0, "eval/sums/mean@2": 0.125},
    {"step": 1, **row},
    {"step": 2, **row, "eval/sums/mean@2": 0.5},
    ["no row"],
  ]
  (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"st')
  (tmp_path / "evaluations.jsonl").write_text(
    json.dumps({"step": 2, "eval/sums/pass@1": 0.5, "intervals": {}}) + "\n"
  )
  run = read_run(tmp_path)
  assert (run.config["seed"], run.steps, sorted(run.rows)) == (5, 2, [0, 1, 2])
  assert run.algorithm == make("gtpo", alpha2=0.25)
  assert run.config["log.samples"] == 4
  assert run.evaluations == {
    0: {"eval/sums/mean@2": 0.125},
    2: {"eval/sums/mean@2": 0.5, "eval/sums/pass@1": 0.5, "step": 2, "intervals": {}},
  }
