"""One step over time: from spans to the record, and from the record to the figure."""

import dataclasses
import re
import shutil

import numpy as np
import pytest

from gtpo_jax.cli.report.credit_figures import timeline_figure
from gtpo_jax.cli.report.runs import group_runs, read_run
from gtpo_jax.logs.credit import PHASES, credit_files, read_credit, save_credit, step_timeline
from gtpo_jax.sampling.spans import Span

SPANS = [
  Span("prefill", 0.0, 1.0, 0.0),
  Span("decode", 1.0, 4.0, 1.0),
  Span("decode", 4.0, 5.0, 0.2),
  Span("reward", 5.0, 5.5, 0.0),
]


def test_a_timeline_by_hand():
  timeline = step_timeline(SPANS, {"time/step": 10.0, "time/update": 2.5})
  assert PHASES == ("prefill", "decode", "reward", "update")
  expected = [[0, 0, 1, 0], [1, 1, 4, 1], [1, 4, 5, 0.2], [2, 5, 5.5, 0], [3, 7.5, 10, 0]]
  np.testing.assert_allclose(timeline, expected, rtol=1e-6)


@pytest.fixture
def timed(runs, tmp_path):
  """A copy of a run whose last credit record has the timeline of `SPANS`."""
  folder = tmp_path / "gtpo-0"
  shutil.copytree(runs / "gtpo-0", folder)
  file = list(credit_files(folder).values())[-1]
  timeline = step_timeline(SPANS, {"time/step": 10.0, "time/update": 2.5})
  save_credit(folder, dataclasses.replace(read_credit(file), timeline=timeline))
  return folder


def test_the_numbers_of_the_figure(timed):
  figure = timeline_figure(group_runs([read_run(timed)]))
  assert figure["heads"][2:] == [
    "seconds",
    "prefill",
    "decode",
    "reward",
    "update",
    "idle",
    "slots busy",
  ]
  ((_, _, *numbers),) = figure["rows"]
  assert numbers == ["10", "10%", "40%", "5%", "25%", "20%", "80%"]
  assert "<svg" in figure["svg"] and len(re.findall("<path", figure["svg"])) > len(SPANS)


def test_records_without_a_timeline_have_no_figure(timed):
  for file in credit_files(timed).values():
    record = read_credit(file)
    save_credit(timed, dataclasses.replace(record, timeline=np.zeros((0, 4), np.float32)))
  assert timeline_figure(group_runs([read_run(timed)])) is None
