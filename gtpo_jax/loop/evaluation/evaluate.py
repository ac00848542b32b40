"""Evaluation: samples completions of held-out problems, plus a greedy one each, and scores them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from gtpo_jax.arrays import KeyStream, key_for
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.data.records import Problem
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.loop.evaluation.estimators import mixed_share
from gtpo_jax.loop.evaluation.outcome import Evaluation, ScoredCompletions, concatenate
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.problems import eval_label
from gtpo_jax.rollout.sample import EVALUATION, sample_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.settings import GREEDY, SamplingParams

# (what is counted, how many there are) -> a context that yields a function to report how many are
# done, such as `Display.counting`.
Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


# The fields of a config that decide what an evaluation measures.
MEASURED_BY = (
  "eval.problems",
  "eval.samples",
  "eval.temperature",
  "eval.top_p",
  "data.eval",
  "data.system",
  "data.template",
  "data.chat",
  "reward.verifier",
  "reward.math_rule",
  "reward.instructions",
  "reward.gym_answer",
  "sampling.max_tokens",
  "sampling.stop",
)
JUDGED_BY = tuple(
  f"reward.judge.{name}"
  for name in (
    "model",
    "template",
    "questions",
    "pattern",
    "scale",
    "threshold",
    "max_tokens",
    "temperature",
    "request",
  )
)


def evaluation_settings(config: Config) -> dict[str, Any]:
  """Returns the fields of a config that decide what its evaluations measure, by dotted name."""
  values = flatten(to_dict(config)) | {"data.eval": config.data.eval_name}
  names = [*MEASURED_BY]
  if config.reward.judge_decides:
    names += JUDGED_BY
  if config.env.is_used:
    names += [name for name in values if name.startswith("env.") and name != "env.workers"]
  as_in_json = lambda value: list(value) if isinstance(value, tuple) else value
  return {name: as_in_json(values[name]) for name in names}


def uncounted(name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
  """A `Counting` that shows no progress."""
  return contextlib.nullcontext(lambda done: None)


def evaluate_run(
  config: Config,
  worker: RolloutWorker,
  reward_manager: RewardManager,
  params: Params,
  problems: Sequence[Problem],
  samples: int | None = None,
  stopping: Callable[[], bool] = lambda: False,
  counting: Counting = uncounted,
) -> Evaluation:
  """Samples and scores `samples` completions and one greedy completion of every problem.

  `eval.batch` problems are sampled at a time. Every step uses the same random keys.

  Args:
    config: the run's config.
    worker: the run's rollout worker.
    reward_manager: scores the completions.
    params: the parameters of the policy.
    problems: from `held_out_problems`.
    samples: completions per problem; None for `eval.samples`.
    stopping: called between chunks of tokens; True stops the evaluation.
    counting: shows the progress.

  Raises:
    Stopped: `stopping` returned True.
    UserError: no completion that ended has a verdict.
  """
  policy = worker.policy(params)
  key = key_for(config.seed, KeyStream.EVALUATE)
  samples = samples or config.eval.samples
  batch = min(config.eval.batch, len(problems))
  complete = 0  # completions of earlier batches
  tallies: list[Tallies] = []  # metrics of the judge and of episodes

  def complete_batch(start: int, group: int, sampling_params: SamplingParams) -> ScoredCompletions:
    nonlocal complete
    if stopping():
      raise Stopped
    part = problems[start : start + batch]
    n = len(part)
    by_group = {(EVALUATION, start + i): problem for i, problem in enumerate(part)}
    pending = PendingRewards(reward_manager, by_group, group, worker.decode, evaluates=True)
    batch_key = jax.random.fold_in(key, start)
    keys = policy.engine.completion_keys(batch_key, batch, group)

    def counted() -> bool:
      count(complete + pending.ended)
      return stopping()

    turns = Turns(worker, group, config.seed, worker.evaluated_episodes)
    rows = sample_problems(turns, policy, part, keys, sampling_params, pending, counted, start)
    result = pending.result(stopping)
    complete += n * group
    kept = ("judge/",) if sampling_params == GREEDY else ("judge/", "env/")
    tallies.append(result.tallies.only(kept))
    return ScoredCompletions(
      texts=[[completion.text for completion in row] for row in rows],
      correct=result.correct,
      scored=result.scored,
      reward=result.reward,
      lengths=np.asarray([[completion.drawn for completion in row] for row in rows], np.int32),
      finished=np.asarray([[completion.finished for completion in row] for row in rows]),
      answers=[[completion.answer for completion in row] for row in rows],
    )

  def complete_all(group: int, sampling_params: SamplingParams) -> ScoredCompletions:
    starts = range(0, len(problems), batch)
    return concatenate([complete_batch(start, group, sampling_params) for start in starts])

  with counting("evaluated completions", len(problems) * (samples + 1)) as count:
    sampled = complete_all(samples, config.eval.sampling_params)
    greedy = complete_all(1, GREEDY)
  settings = evaluation_settings(config) | {"eval.samples": samples}
  judge = Tallies.total(tallies).metrics
  evaluation = Evaluation(eval_label(config), problems, sampled, greedy, settings, judge)
  if not evaluation.judged:
    raise UserError(_nothing_judged(config, evaluation.sampled.finished.size, judge))
  return evaluation


def expected_mixed_share(config: Config, evaluation: Evaluation) -> float:
  """Forecasts the share of training groups with both correct and wrong completions.

  It assumes that the held-out problems are as difficult as training problems, and that
  `eval.temperature` and `eval.top_p` draw as training does. See `mixed_share` for the estimate.

  Args:
    config: the run's config.
    evaluation: of the policy that training starts from.

  Returns:
    NaN if there is nothing to forecast: correctness is no part of the reward, a guide writes a part
    of each group, the evaluation is greedy, or it has too few samples.
  """
  weights = dict(config.reward.weighted)
  group = config.batch.group
  if not weights.get("correct") or config.policy_completions < group or not config.eval.temperature:
    return math.nan
  sampled = evaluation.sampled
  return mixed_share((sampled.correct & sampled.scored).sum(1), sampled.scored.sum(1), group)


def _nothing_judged(config: Config, count: int, metrics: Mapping[str, float]) -> str:
  section = config.reward
  failed = metrics.get("env/stop/env_error", 0.0) + metrics.get("env/stop/timeout", 0.0)
  if failed:
    return (
      f"none of {count} evaluated completions has a verdict: the environment failed in "
      f"{failed:.0%} of the episodes; the first failure is shown above"
    )
  if section.judge_decides:
    return (
      f"none of {count} evaluated completions has a verdict: the judge at {section.judge.base_url} "
      "graded none of them; the first failure is shown above"
    )
  names = [section.verifier, *(name for name, _ in section.weighted)]
  functions = [name for name in names if ":" in name]
  if functions:
    return (
      f"none of {count} evaluated completions has a verdict: a reward function "
      f"({', '.join(functions)}) failed or returned None for all of them; fix it, then run the "
      "same command again"
    )
  return (
    f"none of {count} evaluated completions has a verdict: their verification failed or took "
    f"longer than reward.timeout_s = {section.timeout_s:g}; check the problems' answers and kinds"
  )
