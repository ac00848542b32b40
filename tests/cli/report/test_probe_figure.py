"""The probe of recipes in a report."""

import json
import shutil

import numpy as np

from gtpo_jax.cli.probe import table
from gtpo_jax.cli.probing.statistics import Moments, compare, result_of_arm, verdict
from gtpo_jax.cli.report.credit_figures import draw_probe
from gtpo_jax.cli.report.report import make_report


def result():
  """A probe of three arms with random gradients, one of them half as noisy."""
  rng = np.random.default_rng(0)
  draw = lambda count, noise: 1 + noise * rng.normal(size=(count, 30))
  reference = Moments()
  for vector in draw(40, 1.0):
    reference.add(vector)
  noises = {"grpo": 1.0, "gtpo(alpha2=1)": 0.5, "<b>": 1.0}
  arms = {
    name: result_of_arm(draw(8, noise), reference, np.full((8, 2), 0.5))
    for name, noise in noises.items()
  }
  compare(arms, " shuffled")
  return {"verdict": verdict(arms, 8), "batches": 8, "reference": 40, "arms": arms}


def test_a_probe_is_a_figure_and_a_table():
  probe = result()
  figure = draw_probe(probe)
  assert figure["text"].startswith("Verdict: gtpo(alpha2=1) is better than grpo")
  assert figure["heads"] == [
    *("arm", "cosine", "difference", "alignment", "noise", "groups", "tokens", "p (Holm)")
  ]
  middle, low, high = probe["arms"]["gtpo(alpha2=1)"]["difference"]
  assert figure["rows"][1][2] == f"{middle:.3g} [{low:.3g}, {high:.3g}]"
  assert figure["rows"][0][2] == figure["rows"][0][-1] == ""
  lines = table(probe["arms"])
  assert len({line.index("[") for line in lines[1:]}) <= 2 and len(lines) == 4


def test_a_report_shows_the_probe_of_its_workdir(runs, tmp_path):
  folder = tmp_path / "gtpo-0"
  shutil.copytree(runs / "gtpo-0", folder)
  assert "Which recipe has the better gradient" not in make_report([folder])
  (folder / "probe.json").write_text(json.dumps(result()))
  page = make_report([folder])
  assert "Which recipe has the better gradient" in page and "&lt;b&gt;" in page
