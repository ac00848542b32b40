"""The forecast of the share of mixed groups, before the first update."""

import numpy as np
import pytest

import gtpo_jax
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import freeze
from gtpo_jax.data.records import Problem, user
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.summary import describe_forecast
from gtpo_jax.loop.evaluation.estimators import most_mixed
from gtpo_jax.loop.evaluation.evaluate import expected_mixed_share
from gtpo_jax.loop.evaluation.outcome import Evaluation, ScoredCompletions

CONFIG = {
  "steps": 1,
  "data": {"max_prompt_tokens": 20},
  "model": {"preset": "tiny"},
  "batch": {"prompts": 2, "group": 4},
  "sampling": {"max_tokens": 8, "stop": ("a", "e", "i", "o")},
  "eval": {"problems": 4, "samples": 4, "batch": 4},
  "log": {"tensorboard": False},
}
ROWS = [{"prompt": f"{i}+1:", "answer": str(i + 1)} for i in range(9)]


def evaluation(correct, scored=None):
  """An evaluation with these verdicts, bool[n, g]."""
  correct = np.array(correct)
  texts = [[""] * row.size for row in correct]
  reward = correct.astype(np.float32)
  scored = np.ones_like(correct) if scored is None else np.array(scored)
  sampled = ScoredCompletions(texts, correct, scored, reward, correct * 1, scored, texts)
  problems = [Problem(str(i), user("?"), "", "") for i in range(len(correct))]
  return Evaluation("held", problems, sampled, sampled)


def test_what_is_counted():
  """Two of four problems are mixed. A completion without a verdict is no sample."""
  config = freeze(CONFIG)
  verdicts = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]]
  assert expected_mixed_share(config, evaluation(np.array(verdicts, bool))) == 0.5
  scored = np.ones((2, 5), bool)
  scored[0, 0] = False
  verdicts = [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
  # The second problem: of five subsets of four, four have the correct one.
  share = expected_mixed_share(config, evaluation(np.array(verdicts, bool), scored))
  assert share == pytest.approx((0 + 4 / 5) / 2)


def test_there_is_none_without_correctness_or_if_it_would_mean_something_else():
  verdicts = np.array([[1, 0, 0, 0], [1, 1, 0, 1]], bool)
  assert expected_mixed_share(freeze(CONFIG), evaluation(verdicts)) == 1
  grpo = {"algorithm": {"name": "grpo"}}
  for changes in (
    {**grpo, "reward": {"parts": "verifier"}},
    {**grpo, "reward": {"parts": "correct*0,verifier"}},
    {"algorithm": {"name": "dapo_mixed", "guide_completions": 1}},
    {"eval": {"temperature": 0.0}},
  ):
    assert np.isnan(expected_mixed_share(freeze(CONFIG | changes), evaluation(verdicts))), changes
  assert np.isnan(expected_mixed_share(freeze(CONFIG), evaluation(verdicts[:, :1])))


def test_the_lines():
  config = freeze(CONFIG | {"batch": {"group": 8}})
  say = lambda share, accuracy=0.2, greedy=0.3, cut_off=0.2: describe_forecast(
    config, share, 0.37, accuracy, greedy, cut_off
  )
  assert say(0.341) == "about 34% of the groups of 8 will have both correct and wrong completions"
  assert say(0.1) == "about 10% of the groups of 8 will have both correct and wrong completions"
  low = say(0.0312)
  assert low == (
    "warning: about 3.1% of the groups of 8 (at most 37%) will have both correct and wrong "
    "completions, and the others have nothing to compare: use easier problems, a larger "
    "batch.group, another data.template or data.system, or a longer warm start from demonstrations "
    "(warm_start.steps)"
  )
  assert say(0.0312, 0.9).endswith("use harder problems, or a larger batch.group")
  assert "about 0.0% of the groups of 8 (at most 37%)" in say(0.0, 0.0)
  assert "compare: greedy decoding is right in 38%, so lower sampling.temperature, or use" in say(
    0.0, 0.0, 0.38
  )
  assert "compare: 94% are cut off, so raise sampling.max_tokens, or use easier" in say(
    0.0, cut_off=0.9375
  )


@pytest.mark.parametrize(
  ("rate", "samples", "group", "expected"),
  [
    # No success in n: (1 - p)^n = 0.025.
    (0.0, 64, 8, 1 - 0.025 ** (8 / 64) - (1 - 0.025 ** (1 / 64)) ** 8),
    (1.0, 64, 8, 1 - 0.025 ** (8 / 64) - (1 - 0.025 ** (1 / 64)) ** 8),
    (0.5, 10, 4, 1 - 2 * 0.5**4),
    # Five of 100: the interval's end of Clopper and Pearson is 0.11283.
    (0.05, 100, 2, 2 * 0.11283491 * (1 - 0.11283491)),
  ],
)
def test_the_largest_plausible_share(rate, samples, group, expected):
  assert most_mixed(rate, samples, group) == pytest.approx(expected, abs=1e-7)


def said_about_groups(printed):
  return [line for line in printed.splitlines() if "will have both correct and wrong" in line]


def test_a_run_prints_and_logs_it(finished_run):
  """Before the first step, and only then."""
  workdir, printed = finished_run
  config = load_config(workdir)
  base, *others = read_jsonl(workdir / "metrics.jsonl")
  share = base["groups/mixed_expected"]
  assert 0 <= share <= 1 and not any("groups/mixed_expected" in row for row in others)
  (line,) = said_about_groups(printed)
  (evaluation, *_) = read_jsonl(workdir / "evaluations.jsonl")
  accuracies = (base["eval/sums/mean@2"], base["eval/sums/greedy"], evaluation["eval/sums/cut_off"])
  most = most_mixed(accuracies[0], config.eval.problems * 2, config.batch.group)
  assert describe_forecast(config, share, most, *accuracies) in line
  positions = [printed.index(text) for text in ("held-out pass@1", line, "step 1")]
  assert positions == sorted(positions)


@pytest.mark.slow
def test_a_resumed_run(tmp_path, capsys):
  """It says nothing again, and restores the forecast with an evaluation that a file has lost."""
  even = lambda prompts, completions, *_: [len(text) % 2 == 0 for text in completions]
  never = lambda prompts, completions, *_: [0.0 for _ in completions]

  def run(steps, name, reward):
    settings = CONFIG | {"steps": steps}
    gtpo_jax.train(settings, tmp_path / name, Display(), reward=reward, data=ROWS, held_out=ROWS)
    return said_about_groups(capsys.readouterr().out)

  assert len(run(1, "even", even)) == 1
  assert not run(2, "even", even)
  file = tmp_path / "even" / "metrics.jsonl"
  before = read_jsonl(file)[0]
  assert before["groups/mixed_expected"] > 0
  file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
  assert not run(3, "even", even)
  assert read_jsonl(file)[0] == before
  (line,) = run(1, "never", never)
  assert "warning: about 0.0% of the groups of 4 (at most " in line
