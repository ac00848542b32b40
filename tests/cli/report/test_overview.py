"""The top of a report: the verdict, the facts about the execution, and samples."""

import dataclasses
import json

import numpy as np
import pytest
from run_rows import make_run

from gtpo_jax.cli.report.overview import (
  against,
  describe_seconds,
  execution,
  samples,
  settings,
  verdict,
)
from gtpo_jax.cli.report.runs import RunGroup

KEY = "eval/sums/mean@8"


def group(*pairs, steps=50, last=50, intervals=None):
  """Returns a run group with one run for each pair of accuracies before and after training."""
  runs = []
  for seed, (before, after) in enumerate(pairs):
    rows = [{"reward/accuracy": before}] * (last - 1) + [{"reward/accuracy": after}]
    ends = intervals or ([None, None], [None, None])
    evaluations = {
      0: {KEY: before, "intervals": {KEY: ends[0]}},
      last: {KEY: after, "intervals": {KEY: ends[1]}},
    }
    runs.append(make_run(None, rows, evaluations, seed=seed, steps=steps))
  return RunGroup("gtpo", tuple(runs))


def test_the_verdict_names_the_change():
  apart = ([0.17, 0.22], [0.93, 0.96])
  assert verdict(group((0.196, 0.948), intervals=apart)) == (
    "Held-out accuracy rose from 19.6% to 94.8% in 50 steps; the 95 % intervals do not overlap."
  )
  near = ([0.17, 0.25], [0.15, 0.22])
  assert verdict(group((0.2, 0.18), intervals=near)) == (
    "Held-out accuracy fell from 20.0% to 18.0% in 50 steps; the 95 % intervals overlap."
  )
  assert verdict(group((0.2, 0.2))) == "Held-out accuracy stayed at 20.0% in 50 steps."


def test_the_verdict_of_several_seeds_and_of_an_unfinished_run():
  assert verdict(group((0.1, 0.5), (0.3, 0.7))) == (
    "Held-out accuracy rose from 20.0% to 60.0% in 50 steps, mean of 2 seeds."
  )
  assert verdict(group((0.1, 0.5), last=12)) == (
    "Held-out accuracy rose from 10.0% to 50.0% in 12 of 50 steps so far."
  )


def test_groups_of_one_base_are_compared_in_pairs_of_seeds():
  """Differences of 10, 14 and 12 points: 12 +- 4.303 x 2 / sqrt(3)."""
  first = group((0.1, 0.5), (0.1, 0.6), (0.1, 0.4))
  other = group((0.1, 0.6), (0.1, 0.74), (0.1, 0.52), (0.1, 0.9))
  assert against(first, other) == (
    " Against gtpo: +12.0 points at step 50 (3 pairs of seeds, 95 % interval +7.0 to +17.0)."
  )
  assert against(group((0.1, 0.5)), group((0.1, 0.45))) == (
    " Against gtpo: -5.0 points at step 50 (one pair of seeds, so without an interval)."
  )
  other_model = [dataclasses.replace(x, config=x.config | {"model.path": "x"}) for x in other.runs]
  assert against(first, RunGroup("grpo", tuple(other_model))) == ""
  assert against(first, group((0.1, 0.5), last=12)) == ""  # no step that both have evaluated


def test_the_verdict_without_evaluations():
  rows = [{"reward/accuracy": 0.25}, {"reward/accuracy": 0.5}]
  run = make_run(None, rows, steps=2)
  assert verdict(RunGroup("gtpo", (run,))) == (
    "Accuracy in training went from 25.0% in step 1 to 50.0% (2 steps); there is no held-out "
    "evaluation before and after."
  )
  other = dataclasses.replace(run, left_out=(0,))
  assert verdict(RunGroup("gtpo", (other,))).endswith(
    "no held-out evaluation with equal settings before and after."
  )
  none = make_run(None, [{"reward/accuracy": float("nan")}] * 2, steps=2)
  assert verdict(RunGroup("gtpo", (none,))).startswith("There is no held-out evaluation")


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(9.4, "9 s"), (141, "2 min 21 s"), (3600, "1 h 0 min"), (90061, "25 h 1 min")],
)
def test_durations(seconds, text):
  assert describe_seconds(seconds) == text


def test_samples_of_the_first_and_the_last_step(tmp_path):
  rows = [
    {"step": step, "prompt": "1+2:", "completion": f"<b>{step}\u202e", "correct": correct}
    for step, correct in ((1, False), (1, None), (2, True), (3, True))
  ]
  lines = [*map(json.dumps, rows), '{"step": 4}', "[]", "{"]
  (tmp_path / "samples.jsonl").write_text("\n".join(lines))
  before, after = samples(make_run(tmp_path, [{}] * 3))
  assert before["title"] == "Before training (sampled in step 1)"
  assert [row["verdict"] for row in before["rows"]] == ["wrong", "no verdict"]
  assert after["title"] == "Step 3"
  assert after["rows"] == [{"prompt": "1+2:", "completion": "<b>3‹U+202E›", "verdict": "correct"}]
  (tmp_path / "samples.jsonl").unlink()
  assert samples(make_run(tmp_path, [{}])) == []


def test_a_run_without_a_record_of_its_execution(tmp_path):
  assert execution(make_run(tmp_path, [{}])) == []


def test_settings_that_no_algorithm_reads_are_left_out():
  gtpo = make_run(None, [{}], algorithm__alpha1=1.0)
  dapo = make_run(None, [{}], algorithm__name="dapo")
  tables = settings([RunGroup("gtpo", (gtpo,)), RunGroup("dapo", (dapo,))])
  rows = dict(tables["settings"])
  assert rows["algorithm.alpha1"] == ["1.0", "not read"]
  assert "algorithm.beta1" not in rows
  assert np.all([value != "–" for values in rows.values() for value in values])
  assert {key for key, _ in tables["differing"]} == {"algorithm.name", "algorithm.alpha1"}
