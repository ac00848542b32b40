"""Evaluation: samples and scores completions of held-out problems, and one greedy one of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.evaluation.results import Evaluation, ScoredCompletions, concatenate
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.keys import KeyStream, key_for
from gtpo_jax.rollout.problems import eval_label
from gtpo_jax.rollout.scoring import PendingRewards, RewardManager
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def evaluate_run(
  config: Config,
  worker: RolloutWorker,
  reward_manager: RewardManager,
  params: Params,
  problems: Sequence[Problem],
  samples: int | None = None,
  stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
  """Evaluates `params` with the settings of `config.eval`; every step uses the same random keys.

  Args:
    config: the run's config.
    worker: the run's rollout worker.
    reward_manager: scores the completions.
    params: the parameters of the policy.
    problems: from `held_out_problems`.
    samples: completions per problem; None for `eval.samples`.
    stopping: called between chunks of tokens; True stops the evaluation.

  Raises:
    Stopped: `stopping` returned True.
  """
  return evaluate(
    worker,
    reward_manager,
    worker.policy(params),
    eval_label(config),
    problems,
    key_for(config.seed, KeyStream.EVALUATE),
    samples=samples or config.eval.samples,
    batch=config.eval.batch,
    sampling_params=config.eval_sampling_params,
    stopping=stopping,
  )


def warm_up_evaluation(config: Config, policy: Policy, problems: Sequence[Problem]) -> None:
  """Compiles every program that `evaluate_run` may need with `config.eval.samples` samples."""
  batch = min(config.eval.batch, len(problems))
  for group, sampling_params in ((config.eval.samples, config.eval_sampling_params), (1, GREEDY)):
    policy.engine.programs.warm_up(
      policy.params, batch, group=group, sampling_params=sampling_params
    )


def evaluate(
  worker: RolloutWorker,
  reward_manager: RewardManager,
  policy: Policy,
  name: str,
  problems: Sequence[Problem],
  key: jax.Array,
  *,
  samples: int,
  batch: int,
  sampling_params: SamplingParams,
  stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
  """Samples and scores `samples` completions and one greedy completion of every problem.

  Problems are processed `batch` at a time; the last batch is padded.

  Raises:
    Stopped: `stopping`, which is called between chunks of tokens, returned True.
  """
  batch = min(batch, len(problems))

  def complete_batch(start: int, group: int, sampling_params: SamplingParams) -> ScoredCompletions:
    if stopping():
      raise Stopped
    real = problems[start : start + batch]
    n = len(real)
    padded = [*real, *[real[-1]] * (batch - n)]
    pending = PendingRewards(reward_manager, padded, group, worker.chat.decode)
    batch_key = jax.random.fold_in(key, start)
    worker.generate(policy, padded, batch_key, group, sampling_params, pending, stopping=stopping)
    result = pending.result(stopping)
    return ScoredCompletions(
      texts=pending.texts[:n],
      correct=result.correct[:n],
      scored=result.scored[:n],
      reward=result.reward[:n],
      lengths=pending.lengths[:n],
      finished=pending.finished[:n],
    )

  def complete_all(group: int, sampling_params: SamplingParams) -> ScoredCompletions:
    starts = range(0, len(problems), batch)
    return concatenate([complete_batch(start, group, sampling_params) for start in starts])

  sampled = complete_all(samples, sampling_params)
  greedy = complete_all(1, GREEDY)
  return Evaluation(name, problems, sampled, greedy)
