"""When a run resumes, restores the evaluations that its damaged log files have lost."""

from __future__ import annotations

from collections.abc import Callable

import jax
from etils import epath

from gtpo_jax.checkpoint.runs import run_params
from gtpo_jax.config import Config
from gtpo_jax.evaluation.results import Evaluation, metrics_of_summary
from gtpo_jax.logs.journal import Journal
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import RunError, UserError, first_line


def repair_evaluations(
  config: Config,
  worker: RolloutWorker,
  folder: epath.Path,
  journal: Journal,
  evaluate: Callable[[Params], Evaluation],
  say: Callable[[str], None],
) -> None:
  """Restores the evaluations of earlier steps that metrics.jsonl or evaluations.jsonl has lost.

  Evaluations of the base model and of steps with a checkpoint are computed again. The results are
  the same, because every evaluation uses the same random keys. For the other evaluations, each file
  gets what the other one still contains. Anything that remains lost is reported through `say`.

  Args:
    config: the run's config.
    worker: the run's rollout worker.
    folder: the workdir.
    journal: the run's log files, open.
    evaluate: evaluates parameters as the run does.
    say: shows a message to the user.

  Raises:
    Stopped: the run was asked to stop. The next resume continues.
  """
  for step in journal.lost_evaluations(lambda step: config.eval.is_due(step, config.steps)):
    known = journal.evaluation(step)
    name = f"the evaluation of step {step}"
    try:
      evaluation = evaluate(_params_at(config, worker, folder, step))
    except (UserError, RunError, jax.errors.JaxRuntimeError) as error:
      if known:
        journal.restore_evaluation(step, known, metrics_of_summary(known))
      missing = "its intervals are" if known else "it is"
      say(f"{name} was damaged, and {missing} lost: {first_line(error)}")
    else:
      journal.restore_evaluation(step, evaluation.summary(), evaluation.metrics())
      say(f"{name} was damaged, and was computed again")


def _params_at(config: Config, worker: RolloutWorker, folder: epath.Path, step: int) -> Params:
  if step == 0 and config.model.path and not config.warm_start.steps:
    return initial_params(config, worker)
  return run_params(folder, worker.model, step)[0]
