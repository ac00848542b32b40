"""Tests the training loop on a small model: files, exact resume, no compilation after warm-up."""

import json
import re
import shutil
import struct

import jax
import numpy as np
import pytest
from etils import epath
from toys import lasting, small_run

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.integrity import check_integrity
from gtpo_jax.checkpoint.opening import run_params
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.cli.report.runs import read_run
from gtpo_jax.config import difference
from gtpo_jax.logs import display
from gtpo_jax.logs.credit import credit_files, read_credit
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train
from gtpo_jax.rewards import VERIFIERS
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import RunError
from gtpo_jax.training.state import make_optimizer

PROMISED = [
  "step",
  "reward/mean",
  "reward/accuracy",
  "entropy/mean",
  "entropy/correct",
  "entropy/incorrect",
  "length/mean",
  "length/cut_off",
  "loss",
  "grad_norm",
  "clip/low",
  "clip/high",
  "mismatch/max_abs_logp",
  "mismatch/kl",
  "groups/all_correct",
  "groups/all_wrong",
  "time/sample",
  "time/reward",
  "time/update",
  "time/step",
  "tokens/s",
]


EIGHT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}  # devices


def small_config(**changes):
  common = {
    "steps": 4,
    "model.compute_dtype": "float32",  # as a run records it
    "sampling.max_tokens": 18,
    "batch.micro_batches": 2,
    "warm_start.steps": 10,
    "warm_start.batch": 8,
    "eval.every": 2,
    "eval.problems": 12,
    "eval.samples": 2,
    "checkpoint.every": 2,
    "log.tensorboard": True,
  }
  return small_run(**{**common, **changes})


def run(config, workdir, stopping=lambda: False):
  return train(config, workdir, Display(enabled=False), stopping)


def final_params(config, workdir):
  return jax.device_get(
    Checkpoints(workdir / "checkpoints").restore_params(RolloutWorker(config).model)
  )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  return workdir, run(small_config(), workdir)


def test_the_files_of_a_run(whole):
  workdir, result = whole
  assert result.finished and result.step == 4
  assert "held-out pass@1" in result.summary and "after 4 steps" in result.summary
  rows = read_jsonl(workdir / "metrics.jsonl")
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  for row in rows[1:]:
    assert set(PROMISED) <= row.keys()
    # For example, the batch may have no correct completion, or no token that decides.
    empty_side = {key for key, value in row.items() if value is None}
    of_token_classes = {key for key in empty_side if key.startswith(("truth/", "credit/"))}
    of_updates = set()
    if row["update/empty"] == 1:  # no token is in the loss
      assert row["loss"] is None
      prefixes = ("loss", "grad_norm", "covariance/", "ratio/", "clip/")
      of_updates = {key for key in empty_side if key.startswith(prefixes)}
    assert empty_side - of_token_classes - of_updates <= {
      "entropy/correct",
      "entropy/incorrect",
      "advantage/correct",
      "advantage/incorrect",
    }
    assert all(
      isinstance(value, int | float) and np.isfinite(value)
      for key, value in row.items()
      if key not in empty_side
    )
    assert row["mismatch/max_abs_logp"] <= 1e-4
  for row in rows[0], rows[2], rows[4]:
    assert {
      "eval/sums/mean@2",
      "eval/sums/pass@1",
      "eval/sums/pass@2",
      "eval/sums/greedy",
    } <= row.keys()
  assert not any(key.startswith("eval/") for key in rows[1])
  picture = (workdir / "curves.png").read_bytes()
  assert (
    picture[:8] == b"\x89PNG\r\n\x1a\n"
    and min(struct.unpack(">II", picture[16:24])) > 300
    and len(picture) > 20_000
  )
  samples = read_jsonl(workdir / "samples.jsonl")
  assert {row["step"] for row in samples} == {1, 2, 3, 4} and "+" in samples[0]["prompt"]
  assert list(credit_files(workdir)) == [1, 4]
  evaluations = read_jsonl(workdir / "evaluations.jsonl")
  assert [row["step"] for row in evaluations] == [0, 2, 4]
  for row in evaluations:
    lower, upper = row["intervals"]["eval/sums/pass@2"]
    assert (
      lower <= row["eval/sums/pass@2"] <= upper
      and row["eval/sums/pass@2"] == rows[row["step"]]["eval/sums/pass@2"]
    )
  assert list(workdir.glob("events.*"))
  # "auto" is recorded as what it stood for.
  assert difference(load_config(workdir), small_config()) == {"model.remat": ("full", "auto")}
  assert Checkpoints(workdir / "checkpoints").latest == 4


def test_resume_is_exact(whole, tmp_path):
  """A run stopped after two steps and resumed ends bit for bit like an uninterrupted one."""
  workdir = tmp_path / "halves"

  def stop_in_step_two():
    rows = read_jsonl(workdir / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] == 2

  first = run(small_config(), workdir, stop_in_step_two)
  assert not first.finished and first.step == 2
  assert [row["step"] for row in read_jsonl(workdir / "metrics.jsonl")] == [0, 1, 2]
  # The state that a kill after the checkpoint leaves.
  with (workdir / "metrics.jsonl").open("a") as out:
    out.write(json.dumps({"step": 3, "loss": 1.0}) + "\n" + '{"step": 4, "lo')
  assert run(small_config(), workdir).finished

  assert lasting(read_jsonl(workdir / "metrics.jsonl")) == lasting(
    read_jsonl(whole[0] / "metrics.jsonl")
  )
  assert read_jsonl(workdir / "evaluations.jsonl") == read_jsonl(whole[0] / "evaluations.jsonl")
  for step in (1, 4):
    one, other = (vars(read_credit(credit_files(folder)[step])) for folder in (workdir, whole[0]))
    assert one.pop("timeline").shape[1] == other.pop("timeline").shape[1] == 4
    jax.tree.map(np.testing.assert_array_equal, one, other)
  jax.tree.map(
    np.testing.assert_array_equal,
    final_params(small_config(), workdir),
    final_params(small_config(), whole[0]),
  )


@pytest.mark.slow
def test_a_finished_run_stays_finished_until_it_gets_more_steps(whole):
  workdir, _ = whole
  before = read_jsonl(workdir / "metrics.jsonl")
  assert run(small_config(), workdir).finished
  assert read_jsonl(workdir / "metrics.jsonl") == before
  other = small_config(**{"steps": 5, "eval.temperature": 0.5})
  result = run(other, workdir)
  assert result.step == 5
  assert "which cannot be compared with the warm-started base model" in result.summary
  assert "eval.temperature was 1.0, then 0.5" in result.summary
  rows = read_jsonl(workdir / "metrics.jsonl")
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
  report = read_run(workdir)
  assert list(report.evaluations) == [5] and report.left_out == (0, 2, 4)


@pytest.mark.devices
@pytest.mark.slow
def test_a_warm_run_compiles_nothing_later(tmp_path, monkeypatch, capsys):
  """On eight devices. Neither sampling nor evaluation compiles; the warm-up shows progress."""
  monkeypatch.setattr(display, "QUIET_S", 0.0)
  settings = {"sampling.warm_up": True, "eval.every": 1, "checkpoint.every": 1}
  settings |= {"warm_start.steps": 0, "warm_start.batch": 16, "eval.problems": 8, "eval.samples": 4}
  train(small_config(steps=3, **EIGHT, **settings), tmp_path, Display())
  out = capsys.readouterr().out
  for kind in ("sampling and evaluation", "the update"):
    counted = re.findall(rf"programs of {kind} compiled: (\d+) of (\d+)", out)
    total = int(counted[0][1])
    assert [(int(ready), int(of)) for ready, of in counted] == [(i, total) for i in range(1, total)]
  assert (
    len({row["compiles"] for row in read_jsonl(tmp_path / "metrics.jsonl") if row["step"] > 1}) == 1
  )


def test_updates_that_are_not_finite_stop_the_run_before_it_is_saved(whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  checkpoints = Checkpoints(workdir / "checkpoints", keep=2)
  last = checkpoints.steps()[-1]
  worker = RolloutWorker(small_config())
  config = small_config()
  optimizer = make_optimizer(config.optimizer, config.steps)
  state = checkpoints.restore(worker.model, optimizer).state
  broken = state.replace(
    step=state.step + 1, params=jax.tree.map(lambda x: x * np.nan, state.params)
  )
  checkpoints.save(broken)  # simulates a bug elsewhere
  checkpoints.close()
  message = f"updates were skipped in 3 consecutive steps, up to step {last + 4}"
  with pytest.raises(RunError, match=message):
    run(small_config(steps=last + 6, **{"eval.every": 0, "checkpoint.every": 1}), workdir)
  assert Checkpoints(workdir / "checkpoints").steps() == [last, last + 1]
  rows = read_jsonl(workdir / "metrics.jsonl")
  assert [row["update/skipped"] for row in rows[-3:]] == [1, 1, 1] and rows[-4].get(
    "update/skipped"
  ) == 0
  assert sorted(file.name for file in (workdir / "skipped").iterdir()) == [
    f"step_{i}.npz" for i in range(last + 2, last + 5)
  ]


@pytest.mark.slow
def test_the_best_evaluation_is_kept(tmp_path, monkeypatch):
  """With a learning rate that ruins the model, the best evaluation is not the last."""
  monkeypatch.setitem(
    VERIFIERS, "last_number", lambda completions, *_: [len(text) % 2 == 0 for text in completions]
  )
  config = small_config(
    steps=2,
    **{
      "checkpoint.best": True,
      "checkpoint.keep": 1,
      "eval.every": 1,
      "optimizer.learning_rate": 0.5,
    },
  )
  workdir = tmp_path / "run"
  run(config, workdir)
  means = [row["eval/sums/mean@2"] for row in read_jsonl(workdir / "metrics.jsonl")]
  best = means.index(max(means))
  assert max(means) > 0 and Checkpoints(workdir / "best").steps() == [best]
  assert run_params(workdir, RolloutWorker(config).model, best or None)[1] == best or best == 0
  digests = check_integrity(epath.Path(workdir / "best" / str(best)), ["params"]).leaves["params"]
  kept = epath.Path(workdir / ("base/0" if best == 0 else "checkpoints/2"))
  assert (digests == check_integrity(kept, ["params"]).leaves["params"]) == (best in (0, 2))
