"""The held-out evaluations of a run: when they are due, and which ones damaged logs have lost."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import jax
from etils import epath

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.opening import run_params
from gtpo_jax.config import Config
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.summary import describe_evaluation, describe_forecast, evaluated_accuracy
from gtpo_jax.loop.evaluation.estimators import most_mixed
from gtpo_jax.loop.evaluation.evaluate import (
  evaluate_run,
  evaluation_settings,
  expected_mixed_share,
)
from gtpo_jax.loop.evaluation.outcome import Evaluation, metrics_of_summary
from gtpo_jax.loop.prepare import Parts
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.problems import eval_label
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.training.state import TrainState

MIXED = "groups/mixed_expected"


class Evaluations:
  """Evaluates the policy of a run at the steps that its config asks for.

  Args:
    config: the run's config.
    parts: the run's parts; see `prepare`.
    folder: the workdir.
    journal: the run's log files, open.
    display: the console output.
    stopping: polled during an evaluation; True ends it.
    save: saves a state, and returns when it is on disk.
  """

  def __init__(
    self,
    config: Config,
    parts: Parts,
    folder: epath.Path,
    journal: Journal,
    display: Display,
    stopping: Callable[[], bool],
    save: Callable[[TrainState], None],
  ):
    self._config = config
    self._parts = parts
    self._folder = folder
    self._journal = journal
    self._display = display
    self._stopping = stopping
    self._save = save
    self._repeated = journal.evaluations.removed()

  def if_due(self, state: TrainState) -> dict[str, float]:
    """Evaluates at step 0, every `eval.every` steps and at the end, and amends metrics.jsonl.

    Returns the metrics; {} if no evaluation is due, if the step has one already, or if the run is
    asked to stop. A resumed run repeats an evaluation that was interrupted.
    """
    config = self._config
    step = int(state.step)
    due = config.eval.is_due(step, config.steps) or step in self._repeated
    if not due or self._journal.evaluations.has(step):
      return {}
    began = time.perf_counter()
    try:
      evaluation = self._evaluate(state.params)
    except Stopped:
      return {}
    except UserError:  # nothing was judged
      if step:
        self._save(state)
      raise
    seconds = time.perf_counter() - began
    metrics = self._metrics(evaluation, step)
    problems = len(self._parts.held_out)
    line = describe_evaluation(config, step, metrics, eval_label(config), problems, seconds)
    self._display.say(line)
    if MIXED in metrics:
      accuracy = evaluated_accuracy(metrics)
      greedy = metrics[f"eval/{eval_label(config)}/greedy"]
      cut_off = 1 - evaluation.sampled.finished.mean()
      most = most_mixed(accuracy, problems * config.eval.samples, config.batch.group)
      forecast = describe_forecast(config, metrics[MIXED], most, accuracy, greedy, cut_off)
      self._display.say(forecast)
    if config.checkpoint.best and evaluated_accuracy(metrics) > self._best_so_far():
      best = Checkpoints(self._folder / "best", keep=1)
      best.save_params(state.params, step, model=self._parts.worker.model)
      best.close()
    self._journal.write_evaluation(step, evaluation.summary(), metrics)
    return metrics

  def _metrics(self, evaluation: Evaluation, step: int) -> dict[str, float]:
    """Returns the metrics of an evaluation; at step 0 also the forecast, if there is one."""
    metrics = evaluation.metrics()
    share = expected_mixed_share(self._config, evaluation) if step == 0 else math.nan
    return metrics if math.isnan(share) else metrics | {MIXED: share}

  def _best_so_far(self) -> float:
    """Returns the highest accuracy of the evaluations with the settings of this config, or 0."""
    settings = self._journal.evaluations.settings()
    current = evaluation_settings(self._config)
    rows = [row for row in self._journal.read("eval/") if settings.get(row["step"]) == current]
    return max((evaluated_accuracy(row) or 0.0 for row in rows), default=0.0)

  def repair(self) -> None:
    """Restores the evaluations of earlier steps that metrics.jsonl or evaluations.jsonl has lost.

    Evaluations of the base model and of steps with a checkpoint are computed again. The results are
    the same, because every evaluation uses the same random keys. For the other evaluations, each
    file gets what the other one still contains. The display says what remains lost. A stop request
    ends the repair; the next resume continues it.
    """
    config = self._config
    evaluations = self._journal.evaluations
    with contextlib.suppress(Stopped):
      for step in evaluations.lost(lambda step: config.eval.is_due(step, config.steps)):
        known = evaluations.known(step)
        name = f"the evaluation of step {step}"
        try:
          evaluation = self._evaluate(_params_at(config, self._parts.worker, self._folder, step))
        except (UserError, RunError, jax.errors.JaxRuntimeError) as error:
          if known:
            evaluations.restore(step, known, metrics_of_summary(known))
          missing = "its intervals are" if known else "it is"
          self._display.say(f"{name} was damaged, and {missing} lost: {first_line(error)}")
        else:
          evaluations.restore(step, evaluation.summary(), self._metrics(evaluation, step))
          self._display.say(f"{name} was damaged, and was computed again")

  def _evaluate(self, params: Params) -> Evaluation:
    with jax.profiler.TraceAnnotation("evaluate"), phase("evaluation"):
      return evaluate_run(
        self._config,
        self._parts.worker,
        self._parts.reward_manager,
        params,
        self._parts.held_out,
        stopping=self._stopping,
        counting=self._display.counting,
      )


def _params_at(config: Config, worker: RolloutWorker, folder: epath.Path, step: int) -> Params:
  if step == 0 and config.model.path and not config.warm_start.steps:
    return initial_params(config, worker)
  return run_params(folder, worker.model, step)[0]
