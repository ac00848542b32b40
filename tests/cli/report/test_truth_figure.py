"""The truth in a report: the figure of credit by token class, and the marks in the viewer."""

import dataclasses
import shutil

import numpy as np
import pytest

from gtpo_jax.algorithms import RECIPES, make
from gtpo_jax.cli.report.credit_figures import MARKERS, distinct_algorithms, truth_figure
from gtpo_jax.cli.report.runs import group_runs, read_run
from gtpo_jax.logs.credit import credit_files, read_credit, save_credit
from gtpo_jax.logs.truth import CLASSES


@pytest.fixture(scope="module")
def marked(runs, tmp_path_factory):
  """A copy of a run whose credit records have random truth codes."""
  folder = tmp_path_factory.mktemp("truth") / "gtpo-0"
  shutil.copytree(runs / "gtpo-0", folder)
  rng = np.random.default_rng(0)
  for file in credit_files(folder).values():
    record = read_credit(file)
    codes = rng.choice(np.uint8([1, 2, 3, 4, 11, 12]), record.entropy.shape)
    save_credit(folder, dataclasses.replace(record, truth=np.where(record.mask, codes, 0)))
  return folder


def test_every_class_has_a_marker():
  assert set(MARKERS) == set(CLASSES)


def test_algorithms_that_share_their_credit_share_a_row():
  rows = dict(distinct_algorithms())
  assert {"gtpo", "gtpo_v1", "grpo_s", "dapo_forking", "entropy_advantage"} <= rows.keys()
  (plain,) = [name for name in rows if name.startswith("grpo, dapo")]
  named, more = plain.rsplit(" and ", 1)
  recipes = RECIPES.values()
  left_out = sum(bool(x.guide.guide_completions or x.distillation or x.needs) for x in recipes)
  assert len(rows) - 1 + len(named.split(", ")) + int(more.split()[0]) == len(RECIPES) - left_out


def test_weights_of_a_record_by_a_slow_loop(marked):
  figure = truth_figure(group_runs([read_run(marked)]))
  assert figure["heads"][:5] == ["algorithm", "decisive", "copied", "filler", "inert"]
  rows = {row[0]: row[1:] for row in figure["rows"]}
  record = read_credit(next(iter(credit_files(marked).values())))
  advantages = np.asarray(make("gtpo").advantages(record.signals(make("gtpo"))))
  by_class = {0: [], 1: [], 2: [], 3: [], 4: []}
  for i, j, k in np.ndindex(advantages.shape):
    code = record.truth[i, j, k] % 8
    if code and record.valid[i, j] and (advantages[i] != 0).any():
      for name in (0, code):
        by_class[name].append((record.correct[i, j], advantages[i, j, k]))
  weights = {}
  for name, pairs in by_class.items():
    right = [x for correct, x in pairs if correct]
    wrong = [x for correct, x in pairs if not correct]
    weights[name] = np.mean(right) - np.mean(wrong)
  for cell, name in zip(rows["gtpo"], (4, 3, 2, 1), strict=False):
    assert float(cell) == pytest.approx(weights[name] / weights[0], abs=0.006)
  uniform = next(cells for name, cells in rows.items() if name.startswith("grpo, dapo"))
  assert uniform[4:6] == ["0.50", "0.50"]


@pytest.mark.slow
def test_the_page_overlays_the_truth(opened, marked):
  page = opened(marked)
  assert page.locator("#truth svg").count() == 1
  assert page.locator("#truth tbody tr").count() == len(distinct_algorithms())
  page.wait_for_selector(".t")
  page.check("input[value=truth]")
  step = int(page.locator("#v-step option:checked").inner_text())
  record = read_credit(credit_files(marked)[step])
  group = record.shown[int(page.input_value("#v-group"))]
  codes = record.truth[group][record.mask[group]]
  right = np.broadcast_to(record.correct[group][:, None], record.truth[group].shape)
  right = right[record.mask[group]]
  wrong = codes >= 8
  decides = (codes % 8 >= 3) & ~wrong
  assert page.locator(".t.wrongly").count() == wrong.sum()
  assert page.locator(".t.decides").count() == decides.sum()
  assert page.locator(".t.plus").count() == (right & (codes % 8 >= 3)).sum()
  assert page.locator(".t.minus").count() == (~right & wrong).sum()
  page.locator(".t.wrongly").first.click()
  assert page.locator("[data-fact=truth]").inner_text().endswith(", wrong")


@pytest.mark.slow
def test_without_truth_nothing_is_said_of_it(opened, runs):
  page = opened(runs / "gtpo-0")
  assert page.locator("#truth").count() == 0
  page.wait_for_selector(".t")
  assert not page.locator("input[value=truth]").is_visible()
  assert page.locator(".t.decides, .t.wrongly").count() == 0
