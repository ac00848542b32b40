"""The figure of episodes as rows of turns, with credit and truth."""

import dataclasses
import shutil

import numpy as np
import pytest

from gtpo_jax.cli.report.credit_figures import CHARS, turn_texts, turns_figure
from gtpo_jax.cli.report.report import make_report
from gtpo_jax.cli.report.runs import group_runs, read_run
from gtpo_jax.logs.credit import credit_files, read_credit, save_credit, shaped_and_advantages
from gtpo_jax.rollout.scoring.turn_signals import first_tokens


@pytest.fixture(scope="module")
def known(runs, tmp_path_factory):
  """A copy of a run in whose records every third token was read and turns have random truths."""
  folder = tmp_path_factory.mktemp("turns") / "gtpo-0"
  shutil.copytree(runs / "gtpo-0", folder)
  rng = np.random.default_rng(0)
  for file in credit_files(folder).values():
    record = read_credit(file)
    mask = record.mask & (np.arange(record.mask.shape[-1]) % 3 > 0)
    number = np.maximum(np.cumsum(first_tokens(mask), -1) - 1, 0)
    values = rng.normal(size=mask.shape).astype(np.float32)
    truth = np.where(mask, np.take_along_axis(values, number, -1), np.float32(np.nan))
    save_credit(folder, dataclasses.replace(record, mask=mask, turn_truth=truth))
  return folder


def test_rows_are_turns_with_their_credit_and_truth(known):
  (group,) = group_runs([read_run(known)])
  run = group.runs[0]
  record = read_credit(next(iter(credit_files(known).values())))
  _, advantages = shaped_and_advantages(run.algorithm, record.signals(run.algorithm))
  shown = record.shown[0]
  expected = []
  for j in range(min(8, record.mask.shape[1])):
    turns = []
    before = False
    for k, drawn in enumerate(record.mask[shown, j]):
      if drawn and not before:
        turns.append(([], record.turn_truth[shown, j, k]))
      if drawn:
        turns[-1][0].append(float(advantages[shown, j, k]))
      before = drawn
    verdict = "right" if record.correct[shown, j] else "wrong"
    for i, (credit, truth) in enumerate(turns[:8]):
      numbers = [f"{x:+.2f}".replace("-", "−") for x in (np.mean(credit), truth)]
      expected.append([f"{j + 1}, {verdict}", i + 1, *numbers])
  figure = turns_figure([group])
  assert [[*row[:2], *row[3:]] for row in figure["rows"]] == expected
  assert all(len(row[2]) <= CHARS for row in figure["rows"]) and len(expected) > 8
  assert figure["svg"].count("<path") == len(expected) + 1  # a box each, and the background


def test_texts_of_turns(known):
  record = read_credit(next(iter(credit_files(known).values())))
  pieces = ["1", "$6", "<|im_end|>", "\n", "more", " than thirteen"]
  mask = np.zeros_like(record.mask)
  mask[record.shown[0], 0, [0, 1, 2, 5, 6, 7]] = True
  piece = np.zeros_like(record.piece)
  piece[0, 0, :8] = [0, 1, 2, 3, 3, 3, 4, 5]
  record = dataclasses.replace(record, mask=mask, piece=piece, pieces=pieces)
  assert turn_texts(record, 0, 0) == ["1$6", "more than th…"]


def test_the_page_has_the_figure_only_where_truth_is_known(known, runs):
  page = make_report([known])
  assert 'id="turns"' in page and "Which turns were paid" in page
  assert 'id="turns"' not in make_report([runs / "gtpo-0"])
