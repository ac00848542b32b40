"""How well credit orders segments as values that continuations measure do."""

import numpy as np
import pytest
from toys import ADDITIONS, even, lasting

import gtpo_jax
from gtpo_jax.logs.credit_scores import segment_metrics
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.truth import Segments

NAN = np.nan


def test_scores_of_segments():
  """Three segments gain 0.5, -0.25 and 0.75, two others 0 and 1, and one is unknown."""
  number = np.array([[0, 0, 1, 2, -1], [0, 1, 1, 2, 2], [-1] * 5])
  gain = np.float32([[0.5, 0.5, -0.25, 0.75, NAN], [0, 1, 1, NAN, NAN], [NAN] * 5])
  segments = Segments(0, number, gain, 0.125, 77)
  of = lambda credit: segment_metrics(segments, np.float32([*credit, [9.0] * 5]))
  # The means are 2, 1, 3 and 1, 4: all five pairs within completions are in order.
  right = of([[1, 3, 1, 3, 8], [1, 5, 3, 7, 7]])
  assert right == {
    "truth/mc_rank": 1.0,
    "truth/mc_rank_group": (9 - 0) / 10,  # of ten pairs, one is a tie of credit: -0.25 and 0
    "truth/mc_error": 0.125,
    "truth/mc_tokens": 77.0,
  }
  uniform = of([[2] * 5, [-2] * 5])
  assert uniform["truth/mc_rank"] == 0
  # Of the six pairs between the completions, -0.25 > 0 and all pairs with 1 are out of order.
  assert uniform["truth/mc_rank_group"] == (2 - 4) / 10
  wrong = of([[-1, -3, -1, -3, 8], [-1, -5, -3, 7, 7]])
  assert wrong["truth/mc_rank"] == -1
  empty = segments._replace(number=np.full((3, 5), -1))
  assert np.isnan(segment_metrics(empty, np.zeros((3, 5)))["truth/mc_rank"])


@pytest.mark.slow
def test_a_run_that_measures_values(tmp_path):
  """It measures them at each record, and everything else is as without it."""
  rows = {}
  for count in (0, 4):
    config = {
      "steps": 3,
      "model": {"preset": "tiny"},
      "algorithm": {"name": "gtpo"},
      "data": {"max_prompt_tokens": 20},
      "batch": {"prompts": 4, "group": 4},
      "sampling": {"max_tokens": 16, "stop": ("e", "1", "an")},
      "eval": {"problems": 2, "samples": 2, "batch": 2},
      "log": {"tensorboard": False, "credit_every": 2, "continuations": count},
    }
    folder = tmp_path / str(count)
    quiet = Display(enabled=False)
    gtpo_jax.train({**config, "steps": 1}, folder, quiet, reward=even, data=ADDITIONS)
    gtpo_jax.train(config, folder, quiet, reward=even, data=ADDITIONS)
    rows[count] = lasting(read_jsonl(folder / "metrics.jsonl"))
  measured = [{key for key in row if key.startswith("truth/mc_")} for row in rows[4]]
  assert [len(x) for x in measured] == [0, 4, 4, 4]
  for plain, row in zip(rows[0], rows[4], strict=True):
    mc = {key: value for key, value in row.items() if key.startswith("truth/mc_")}
    without = {key: x for key, x in row.items() if key not in mc}
    assert {k: x for k, x in without.items() if not k.startswith("sampling/")} == {
      k: x for k, x in plain.items() if not k.startswith("sampling/")
    }
    if mc:
      assert mc["truth/mc_tokens"] > 0 and 0 < mc["truth/mc_error"] < 0.5
      assert -1 <= mc["truth/mc_rank"] <= 1


@pytest.mark.slow
def test_a_run_with_measured_values_resumes_exactly(tmp_path):
  rows = {}
  for name, stops in (("whole", (3,)), ("resumed", (1, 3))):
    for steps in stops:
      config = {
        "steps": steps,
        "model": {"preset": "tiny"},
        "algorithm": {"name": "spo_chain", "continuations": 3},
        "data": {"max_prompt_tokens": 20},
        "batch": {"prompts": 4, "group": 4},
        "sampling": {"max_tokens": 16, "stop": ("e", "1", "an")},
        "eval": {"problems": 2, "samples": 2, "batch": 2},
        "log": {"tensorboard": False, "credit_every": 0},
      }
      gtpo_jax.train(config, tmp_path / name, Display(enabled=False), reward=even, data=ADDITIONS)
    rows[name] = lasting(read_jsonl(tmp_path / name / "metrics.jsonl"))
  known = lambda row: {k: x for k, x in row.items() if not k.startswith("eval/")}
  assert list(map(known, rows["whole"])) == list(map(known, rows["resumed"]))
  assert all(row["continuations/tokens"] > 0 and row["loss"] for row in rows["whole"][1:])
