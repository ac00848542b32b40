"""The training loop (Algorithm 1 of the paper): prompts, rollouts, rewards, update.

`learn` is the algorithm. `train` and `steps` are the public entry points: they check the inputs,
lock the workdir and build the `Run`, which holds the components that `learn` uses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from gtpo_jax.api.inputs import Inputs, Records, resolve_inputs
from gtpo_jax.api.policy import TrainedPolicy
from gtpo_jax.api.results import Result, Step
from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.checkpoint.provenance import check_provenance, provenance_of
from gtpo_jax.checkpoint.workdir import claim, open_workdir
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.evaluation.evaluate import evaluate_run, warm_up_evaluation
from gtpo_jax.reporting.compiles import compile_count, describe_compiles
from gtpo_jax.reporting.credit import write_credit
from gtpo_jax.reporting.curves import draw_curves
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.reporting.profile import trace_window
from gtpo_jax.reporting.summary import (
  describe_evaluation,
  describe_run,
  evaluated_accuracy,
  summarize,
)
from gtpo_jax.reporting.trackers import WeightsAndBiases, check_trackers
from gtpo_jax.rollout.experience import Collector, Experience
from gtpo_jax.rollout.frozen import check_frozen, load_frozen
from gtpo_jax.rollout.policies import check_weights
from gtpo_jax.rollout.problems import eval_label, held_out_problems, training_problems
from gtpo_jax.rollout.scoring import RewardManager
from gtpo_jax.rollout.user_functions import RewardFunction
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.compiling import StoppableProgram, stoppable_compiles
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.distributed import any_process, fetch, is_first_process
from gtpo_jax.runtime.guards import Guards
from gtpo_jax.runtime.signals import Interrupts, Stopped, Watchdog
from gtpo_jax.training.micro_batches import check_batch_divisible, check_positions_divisible
from gtpo_jax.training.state import TrainState, init_state, make_optimizer
from gtpo_jax.training.update import make_update
from gtpo_jax.warm_start import base_model, check_prompts

PRINT_EVERY = 5  # steps between lines of a plain log


def train(
  config: Config | Mapping[str, Any],
  workdir: str | Path | None = None,
  display: Display | None = None,
  stopping: Callable[[], bool] | None = None,
  *,
  reward: RewardFunction | None = None,
  data: Records | None = None,
  held_out: Records | None = None,
) -> Result:
  """Trains to `config.steps` and returns the result. Arguments and exceptions are as in `steps`."""
  run = steps(config, workdir, display, stopping, reward=reward, data=data, held_out=held_out)
  while True:
    try:
      next(run)
    except StopIteration as end:
      return end.value


def steps(
  config: Config | Mapping[str, Any],
  workdir: str | Path | None = None,
  display: Display | None = None,
  stopping: Callable[[], bool] | None = None,
  *,
  reward: RewardFunction | None = None,
  data: Records | None = None,
  held_out: Records | None = None,
) -> Generator[Step, None, Result]:
  """Trains to `config.steps` and yields each step.

  Starts from the newest intact checkpoint in `workdir`, if there is one. If the caller stops
  iterating early (`break`, `close()`, an exception in the body of its loop), the run is saved as it
  is after a stop request.

  Args:
    config: a `Config`, an ml_collections ConfigDict as `default_config()` returns, or nested dicts
      of the fields to change.
    workdir: the run's folder, locked while it runs. None uses a temporary folder, so the run cannot
      be resumed.
    display: the console output; None prints log lines, with a live panel on a terminal.
    stopping: polled during the run; when it returns True, the run is saved and ends. If None,
      Ctrl-C (or interrupting the notebook kernel) requests this; a second one raises
      KeyboardInterrupt.
    reward: a function of (prompts, completions, answers, extras), four lists of equal length, that
      returns a number or bool for each completion, or None for no verdict; above 0.5 is correct. It
      replaces the verifier that each problem's kind selects.
    data: dicts to train on, like the rows of a file: {"prompt": ..., "answer": ...}. They replace
      `config.data.train`.
    held_out: dicts to evaluate on. Without them and without `config.data.eval`, a tenth of `data`
      is held out.

  Raises:
    UserError: the config cannot run here, the workdir belongs to another run or is in use, or one
      of the inputs cannot be used.
    RunError: updates were skipped too often, or a checkpoint cannot be written.
  """
  compile_count()  # the first call registers the listener that counts compilations
  inputs = resolve_inputs(config, reward, data, held_out)
  display = display or Display(is_first_process())
  interrupts = Interrupts()
  signals = interrupts if stopping is None else contextlib.nullcontext()
  stopping = stopping or interrupts.requested
  worker, reward_manager, train_set, eval_set = _prepare(inputs, display)
  config = inputs.config
  with (
    open_workdir(workdir) as folder,
    claim(folder, config, display.say),
    contextlib.closing(reward_manager),
    Watchdog(config.guards.stall_s, lambda: any_process(stopping())) as watchdog,
    stoppable_compiles(watchdog),
  ):
    run = Run(
      config, folder, workdir is not None, display, watchdog, worker, reward_manager, eval_set
    )
    learning = learn(run, train_set)
    try:
      while True:
        with signals:
          try:
            step = next(learning)
          except StopIteration as end:
            return end.value
        with watchdog.paused():  # time in the caller's loop body is not a stall
          yield step
    finally:
      with signals:
        learning.close()
      display.end()


def learn(run: Run, problems: Sequence[tuple[Problems, float]]) -> Generator[Step, None, Result]:
  """Runs Algorithm 1 of the paper.

  Each step samples g completions of each prompt with their entropies and scores them
  (`Collector.collect`). It then shapes the rewards by entropy, normalises them to advantages and
  makes the gradient updates (`training.update`).

  Args:
    run: the run's components.
    problems: the sources to train on, with their mixing weights.
  """
  try:
    state = run.set_up(problems)
  except Stopped as error:
    return Result(0, False, f"stopped {error}")
  config = run.config
  start = int(state.step)
  run.evaluate_if_due(state)
  run.display.begin(config.algorithm.name, config.steps, start)
  for i in trace_window(config.profile.window, range(start, config.steps), run.folder / "profile"):
    if run.stopping():
      break
    step = i + 1
    began = time.perf_counter()
    try:  # rollouts and their rewards; shaped credit, gradient, optimizer
      batch = run.collector.collect(state.params, run.display.say, run.stopping)
      collected = time.perf_counter()
      state, metrics = run.update(state, batch)
    except Stopped:
      run.collector.discard()  # the next run samples this batch again
      break
    ended = time.perf_counter()

    metrics = batch.add_metrics(metrics)
    tokens = metrics.get("tokens/sampled", metrics["tokens/completion"])
    metrics |= {
      "time/update": ended - collected,
      "time/step": ended - began,
      "tokens/s": tokens / (ended - began),
      "compiles": compile_count(),
    }
    run.log(step, metrics, batch, print_line=i == start or step % PRINT_EVERY == 0)
    run.guards.check(step, metrics, batch.to_arrays)
    if step % config.checkpoint.every == 0 and not run.guards.skipped:
      run.save(state)
    if evaluation := run.evaluate_if_due(state):
      run.display.sample(*batch.first_completion(0))
    try:
      yield Step(step, metrics | evaluation, batch, TrainedPolicy(run.worker, state.params))
    except GeneratorExit:  # the caller stopped iterating
      break
  return run.finish(state)


class Run:
  """The components of one run, and the operations that `learn` calls on them.

  Attributes:
    config: the run's config.
    folder: the workdir, or a temporary folder.
    keep: whether the folder survives the run; if not, no checkpoints are written.
    display: the console output.
    stopping: polled between steps and inside long phases; True requests that the run end.
    worker: samples completions.
    collector, guards: made by `set_up`.
  """

  def __init__(
    self,
    config: Config,
    folder: epath.Path,
    keep: bool,
    display: Display,
    stopping: Callable[[], bool],
    worker: RolloutWorker,
    reward_manager: RewardManager,
    held_out: Sequence[Problem],
  ):
    self.config = config
    self.folder = folder
    self.keep = keep
    self.display = display
    self.stopping = stopping
    self.worker = worker
    self._reward_manager = reward_manager
    self._held_out = held_out
    coef = config.resolved_algorithm.initial_entropy_coef
    self._optimizer = make_optimizer(config.optimizer, config.steps, config.batch.updates, coef)
    update = make_update(
      worker.model,
      config.resolved_algorithm,
      self._optimizer,
      temperature=config.sampling.temperature,
      minibatches=config.batch.minibatches,
      epochs=config.batch.epochs,
      micro_batches=config.batch.micro_batches,
      head_chunk=config.batch.head_chunk,
    )
    self._compiled_update = StoppableProgram(update)

  @phase("set-up")
  def set_up(self, problems: Sequence[tuple[Problems, float]]) -> TrainState:
    """Makes everything that the loop uses, and restores or makes the state that it starts from."""
    config = self.config
    for line in describe_run(config, self.worker):
      self.display.say(line)
    self._checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
    saved = self._checkpoints.restore(self.worker.model, self._optimizer, self.display.say)
    if saved:
      state = saved.state
      self.display.say(f"resumed at step {int(state.step)} of {config.steps} from {self.folder}")
    else:
      base = base_model(config, self.worker, self.folder, self.display, self.stopping)
      if base is None:
        raise Stopped("during the warm start, which the next run starts over")
      state = init_state(base, self._optimizer, self.worker.model)
    start = int(state.step)
    metadata = saved.metadata if saved else {}
    accept_changes = config.checkpoint.accept_changes
    frozen_steps = {} if accept_changes else metadata.get("steps", {})
    frozen = load_frozen(config, self.worker, self.folder, frozen_steps)
    provenance = provenance_of(config, problems, self._held_out, frozen.digests)
    check_provenance(metadata.get("identity", {}), provenance, accept_changes, self.display.say)
    self._metadata = {"identity": provenance, "steps": frozen.steps}
    self.collector = Collector(
      config, self.worker, self._reward_manager, problems, frozen, drawn=start
    )
    if saved and saved.leftovers:
      self.collector.restore(saved.leftovers)
    if config.sampling.warm_up:
      policy = self.worker.policy(state.params)
      self.collector.warm_up(policy)
      warm_up_evaluation(config, policy, self._held_out)
      self.display.say(describe_compiles())
    self._open_logs(start)
    return state

  def _open_logs(self, start: int) -> None:
    config = self.config
    make_trackers = lambda: [WeightsAndBiases(self.folder, config)] if config.log.wandb else []
    self._journal = Journal(self.folder, start, config.log.tensorboard, make_trackers)
    rows = self._journal.read()
    limit = config.guards.skipped
    self.guards = Guards(limit, self.folder, rows, self.display.say, self._checkpoints.wait)
    if start == 0 and not rows:
      self._journal.write(0, {})  # the row of step 0, to which the base model's evaluation is added

  def update(self, state: TrainState, batch: Experience) -> tuple[TrainState, dict[str, float]]:
    """Returns the next state and the update's metrics. The old state's memory is reused."""
    with jax.profiler.TraceAnnotation("update"), phase("update"):
      state, metrics = self._compiled_update(state, batch.rollouts, batch.rewards)
      return state, {name: float(value) for name, value in fetch(metrics).items()}

  def log(
    self, step: int, metrics: Mapping[str, float], batch: Experience, print_line: bool
  ) -> None:
    """Displays a step and writes its metrics, some completions, and its token-level credit."""
    log = self.config.log
    self.display.step(step, metrics, batch.first_completion(0), line=print_line)
    self._journal.write(step, metrics)
    for i in range(min(log.samples, len(batch.problems))):
      self._journal.write_sample(step, *batch.first_completion(i))
    if log.keeps_credit(step, self.config.steps):
      write_credit(self.folder, step, batch, self.worker.chat, log.credit_groups)

  def save(self, state: TrainState) -> None:
    """Starts saving a checkpoint in the background."""
    if self.keep:
      with jax.profiler.TraceAnnotation("save"):
        self._checkpoints.save(state, self.collector.leftovers(), self._metadata)

  def evaluate_if_due(self, state: TrainState) -> dict[str, float]:
    """Evaluates at step 0, every `eval.every` steps and at the end, and amends metrics.jsonl.

    Returns the metrics; {} if no evaluation is due, if the step has one already, or if the run is
    asked to stop. A resumed run repeats an evaluation that was interrupted.
    """
    config = self.config
    step = int(state.step)
    every = config.eval.every
    if step not in (0, config.steps) and not (every and step % every == 0):
      return {}
    rows = self._journal.read("eval/")
    row = next((row for row in reversed(rows) if row["step"] == step), None)
    if row is None or evaluated_accuracy(row) is not None:
      return {}
    began = time.perf_counter()
    try:
      with jax.profiler.TraceAnnotation("evaluate"), phase("evaluation"):
        evaluation = evaluate_run(
          config,
          self.worker,
          self._reward_manager,
          state.params,
          self._held_out,
          stopping=self.stopping,
        )
    except Stopped:
      return {}
    seconds = time.perf_counter() - began
    metrics = evaluation.metrics()
    problems = len(self._held_out)
    line = describe_evaluation(config, step, metrics, eval_label(config), problems, seconds)
    self.display.say(line)
    earlier = [evaluated_accuracy(row) or 0.0 for row in rows]
    if config.checkpoint.best and evaluated_accuracy(metrics) > max(earlier, default=0.0):
      best = Checkpoints(self.folder / "best", keep=1)
      best.save_params(state.params, step)
      best.close()
    self._journal.write_evaluation(step, evaluation.summary())
    self._journal.amend(step, metrics)
    return metrics

  def finish(self, state: TrainState) -> Result:
    """Saves the last state, closes the logs and draws the curves."""
    config = self.config
    self.display.end()
    self.save(state)
    self._checkpoints.close()
    saved_at = time.monotonic() if self.keep else None
    self._journal.close()
    rows = self._journal.read()
    if is_first_process():
      title = f"{config.algorithm.name} on {config.data.train}, seed {config.seed}"
      draw_curves(rows, title, self.folder / "curves.png")
    step = int(state.step)
    policy = TrainedPolicy(self.worker, state.params)
    finished = step >= config.steps
    stopped = f"stopped at step {step} of {config.steps}{'; saved' if self.keep else ''}"
    summary = summarize(config, rows) if finished else stopped
    return Result(step, finished, summary, rows, policy, saved_at)


def _prepare(
  inputs: Inputs, display: Display
) -> tuple[RolloutWorker, RewardManager, list[tuple[Problems, float]], list[Problem]]:
  """Validates the inputs and loads the problems, before anything is written or compiled.

  Returns the worker, the reward manager, and the problems to train on and to evaluate on.
  """
  config = inputs.config
  worker = RolloutWorker(config)
  reward_manager = RewardManager(config, inputs.reward)
  check_batch_divisible("batch.prompts", config.batch.prompts, config.batch.parts, worker.model)
  check_positions_divisible(config.sampling.max_tokens, worker.model)
  check_prompts(config, worker)
  check_frozen(config, worker)
  check_weights(worker)
  check_trackers(config)
  train_set = training_problems(config, worker, display.say, inputs.records)
  eval_set = held_out_problems(config, worker, display.say, inputs.records)
  return worker, reward_manager, train_set, eval_set
