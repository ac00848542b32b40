"""The parts of benchmarks/credit_real.py: stored results, sketches, statistics and problems."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.arrays import Signals
from gtpo_jax.runtime.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def benchmarks_folder():
  folder = str(Path(__file__).parents[1] / "benchmarks")
  sys.path.insert(0, folder)
  yield
  sys.path.remove(folder)


def test_results_are_computed_once_and_only_within_pattern_and_budget(tmp_path):
  from credit_cells import Cells

  now = [0.0]
  made = []

  def make():
    made.append(now[0])
    now[0] += 40.0
    return {"x": [1 / 3, float(len(made))]}

  cells = lambda **more: Cells(tmp_path / "out", tmp_path / "old", clock=lambda: now[0], **more)
  first = cells().compute("run-a", {"seed": 0}, make)
  assert first["x"] == [0.333333, 1.0] and first["settings"] == {"seed": 0}
  assert cells().compute("run-a", {"seed": 0}, make) == first and len(made) == 1
  with pytest.raises(UserError, match="other settings"):
    cells().compute("run-a", {"seed": 1}, make)

  some = cells(patterns=["run-b*"], budget_s=100.0)
  assert [some.compute(f"run-{name}", {}, make) is None for name in ("b1", "c", "b2", "b3")] == [
    False,
    True,
    False,
    True,  # 80 of 100 seconds are used, and a run takes 40
  ]
  assert some.left == ["run-c", "run-b3"]

  (tmp_path / "old").mkdir()
  (tmp_path / "old" / "run-d.json").write_text(json.dumps({"settings": {}, "x": 7}))
  assert cells().compute("run-d", {}, make)["x"] == 7 and len(made) == 3


def test_sketches_keep_inner_products():
  from credit_sketch import SKETCH, sketch

  rng = np.random.default_rng(0)
  a, b = (
    {"first": rng.normal(size=(300, 500)), "second": rng.normal(size=SKETCH + 7)} for _ in "ab"
  )
  b = {key: 0.5 * a[key] + b[key] for key in a}
  exact = sum(float((a[key] * b[key]).sum()) for key in a)
  size = lambda x: np.sqrt(sum(float((leaf**2).sum()) for leaf in x.values()))
  sketches = [
    np.asarray(sketch({key: jnp.asarray(x, jnp.float32) for key, x in tree.items()}), float)
    for tree in (a, b)
  ]
  error = sketches[0] @ sketches[1] - exact
  assert abs(error) < 4 * np.sqrt(2 / SKETCH) * size(a) * size(b)
  assert exact > 20 * abs(error)


def test_the_reference_of_a_batch_is_the_mean_of_the_others():
  from credit_sketch import REFERENCE_NAME, Sketches, probe_result

  rng = np.random.default_rng(0)
  names = ["arm", REFERENCE_NAME]
  values = rng.normal(1.0, 1.0, (5, 2, 8)).astype(np.float32)
  batches = [Sketches(names, values[i], {"accuracy": 0.1 * i}) for i in range(3)]
  batches += [Sketches([REFERENCE_NAME], values[i, 1:], {"accuracy": 0.1 * i}) for i in (3, 4)]
  found = probe_result(batches, 3)
  for i in range(3):
    other = sum(values[j, 1].astype(float) for j in range(5) if j != i) / 4
    own = values[i, 0].astype(float)
    expected = own @ other / np.sqrt((own @ own) * (other @ other))
    assert found["arms"]["arm"]["cosine"][i] == pytest.approx(expected, rel=1e-6)
  assert found["signals"]["accuracy"] == pytest.approx(0.2)


def test_two_words_need_the_topic_and_both_words(tmp_path):
  from credit_tasks import HELD_OUT, TRAINING_PROBLEMS, two_words, write_problems

  extra = {"topic": "whale", "first": "rope", "second": "lamp"}
  texts = (
    "The whale carried a rope and a lamp.",
    "The whale carried a rope and a coin.",
    "The ship carried a rope and a lamp.",
  )
  assert two_words(texts, texts, texts, [extra] * 3) == [True, False, False]
  write_problems(tmp_path)
  held_out, training = (
    [
      json.loads(line)["prompt"]
      for line in (tmp_path / f"words-{x}.jsonl").read_text().splitlines()
    ]
    for x in ("eval", "train")
  )
  assert len(set(held_out)) == HELD_OUT and len(set(training)) == TRAINING_PROBLEMS
  assert not set(held_out) & set(training)


def test_shuffled_entropies_stay_within_a_verdict():
  from credit_arms import ArmBatch, shuffled_within_verdict

  rng = np.random.default_rng(0)
  mask = np.arange(6) < rng.integers(2, 7, (3, 4, 1))
  entropy = np.where(mask, rng.random(mask.shape), 0.0).astype(np.float32)
  correct = np.array([[True, False, True, False]] * 3)
  signals = Signals(mask=mask, entropy=entropy, correct=correct)
  shuffled = shuffled_within_verdict(ArmBatch(None, signals, np.zeros(mask.shape), 0, lambda: None))
  for group in range(3):
    for verdict in (False, True):
      side = mask[group] & (correct[group] == verdict)[:, None]
      np.testing.assert_array_equal(np.sort(shuffled[group][side]), np.sort(entropy[group][side]))
  assert not (shuffled == entropy)[mask].all() and not shuffled[~mask].any()
