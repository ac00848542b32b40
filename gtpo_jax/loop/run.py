"""The components of one run, and the operations that the training loop calls on them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
from etils import epath

from gtpo_jax.api.inputs import Inputs
from gtpo_jax.api.policy import TrainedPolicy
from gtpo_jax.api.results import Result
from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.checkpoint.provenance import check_provenance, provenance_of
from gtpo_jax.checkpoint.runs import frozen_params
from gtpo_jax.config import Config
from gtpo_jax.config.mesh_choice import check_divisible, proposing_mesh
from gtpo_jax.config.trainer import run_optimizer, run_update
from gtpo_jax.config.workloads import GUIDE, run_workloads
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.evaluation.evaluate import evaluate_run
from gtpo_jax.evaluation.results import Evaluation
from gtpo_jax.logs.compiles import describe_compiles
from gtpo_jax.logs.credit import repair_credit, write_credit
from gtpo_jax.logs.credit_scores import step_metrics
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.sessions import SessionRecord
from gtpo_jax.logs.summary import describe_evaluation, describe_run, evaluated_accuracy, summarize
from gtpo_jax.logs.trackers import WeightsAndBiases, check_trackers
from gtpo_jax.loop.guards import Guards
from gtpo_jax.loop.repair import repair_evaluations
from gtpo_jax.models.params import Params
from gtpo_jax.report.curves import draw_curves
from gtpo_jax.report.timeline import step_timeline
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.experience import Experience
from gtpo_jax.rollout.frozen import check_frozen, load_frozen
from gtpo_jax.rollout.policies import check_weights
from gtpo_jax.rollout.problems import eval_label, held_out_problems, training_problems
from gtpo_jax.rollout.scoring import RewardManager
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.compiling import StoppableProgram
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.distributed import fetch, is_first_process
from gtpo_jax.runtime.errors import FunctionError, UserError
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.inventory import count_kinds, reachable, warm_up
from gtpo_jax.storage.spool import Logs
from gtpo_jax.training.state import TrainState, init_state
from gtpo_jax.warm_start import Teacher, base_model, check_prompts, make_teacher


class Run:
  """The components of one run, and the operations that `learn` calls on them.

  Attributes:
    config: the run's config.
    folder: the workdir, or a temporary folder.
    keep: whether the folder survives the run; if not, no checkpoints are written.
    logs: where the log files are written.
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
    logs: Logs,
    check_lock: Callable[[], None],
    display: Display,
    stopping: Callable[[], bool],
    worker: RolloutWorker,
    reward_manager: RewardManager,
    teacher: Teacher | None,
    held_out: Sequence[Problem],
  ):
    self.config = config
    self.folder = folder
    self.keep = keep
    self.logs = logs
    self._check_lock = check_lock
    self.display = display
    self.stopping = stopping
    self.worker = worker
    self._reward_manager = reward_manager
    self._teacher = teacher
    self._held_out = held_out
    self._began = time.monotonic()
    self._optimizer = run_optimizer(config)
    update = run_update(config, worker.model, self._optimizer)
    self._compiled_update = StoppableProgram(update)

  @phase("set-up")
  def set_up(self, problems: Sequence[tuple[Problems, float]]) -> TrainState:
    """Makes everything that the loop uses, and restores or makes the state that it starts from."""
    config = self.config
    for line in describe_run(config, self.worker):
      self.display.say(line)
    self._checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
    saved = self._checkpoints.restore(
      self.worker.model,
      self._optimizer,
      self.display.say,
      lambda: frozen_params(self.folder, self.worker.model),
    )
    if saved:
      state = saved.state
      self.display.say(f"resumed at step {int(state.step)} of {config.steps} from {self.folder}")
    else:
      base = base_model(
        config, self.worker, self.folder, self.display, self.stopping, self._teacher
      )
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
    self.collector = Collector(config, self.worker, self._reward_manager, problems, frozen, start)
    if saved and saved.leftovers:
      self.collector.restore(saved.leftovers)
    if config.sampling.warm_up:
      self._warm_up(self.worker.policy(state.params), frozen.guide)
    self._open_logs(start)
    return state

  def _warm_up(self, policy: Policy, guide: Policy | None) -> None:
    """Compiles every program that sampling and evaluation may need."""
    workloads = run_workloads(self.config, len(self._held_out))
    guided = [workloads.pop(GUIDE)] if GUIDE in workloads else []
    sampled = [(policy, list(workloads.values()))]
    if guide:
      sampled.append((guide, guided))
    found = [reachable(policy.engine.programs, of_policy) for policy, of_policy in sampled]
    total = sum(count_kinds(programs)["decode"] for programs in found)
    numbers = itertools.count(1)
    with self.display.counting("shapes of sampling and evaluation compiled", total) as count:
      for policy, of_policy in sampled:
        warm_up(policy.engine.programs, policy.params, of_policy, lambda: count(next(numbers)))
    self.display.say(describe_compiles())

  def _open_logs(self, start: int) -> None:
    config = self.config
    log = config.log
    folder = self.logs.folder
    name = self.folder.name
    make_trackers = lambda: [WeightsAndBiases(folder, config, name)] if log.wandb else []
    self._journal = Journal(
      folder, start, log.tensorboard, make_trackers, log.samples, self.display.say
    )
    if is_first_process():
      keeps = lambda step: log.keeps_credit(step, config.steps)
      for line in repair_credit(self.folder, start, keeps):
        self.display.say(line)
    self._evaluated_before = self._journal.removed_evaluations()
    self._session = SessionRecord(folder, start, self._began)
    rows = self._journal.read()
    limit = config.guards.skipped
    self.guards = Guards(limit, self.folder, rows, self.display.say, self._checkpoints.wait)
    if start == 0 and not rows:
      self._journal.write(0, {})  # the row of step 0, to which the base model's evaluation is added

  def update(self, state: TrainState, batch: Experience) -> tuple[TrainState, dict[str, float]]:
    """Returns the next state and the update's metrics. The old state's memory is reused."""
    with jax.profiler.TraceAnnotation("update"), phase("update"):
      state, metrics = self._compiled_update(state, batch.rollouts, batch.rewards)
      metrics = {name: float(value) for name, value in fetch(metrics).items()}
      return state, metrics | step_metrics(self.config.resolved_algorithm, batch)

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
      timeline = step_timeline(batch.spans, metrics)
      write_credit(self.logs.folder, step, batch, self.worker.chat, log.credit_groups, timeline)

  def save(self, state: TrainState) -> None:
    """Starts saving a checkpoint in the background, after the logs up to its step."""
    if self.keep:
      self._check_lock()
      self.logs.flush()
      with jax.profiler.TraceAnnotation("save"):
        self._checkpoints.save(state, self.collector.leftovers(), self._metadata)
        self._session.update(int(state.step))

  def saved_error(self, error: FunctionError, state: TrainState) -> FunctionError:
    """Saves the state and returns the error, with what is saved added to its message."""
    self.save(state)
    self._checkpoints.close()
    self._journal.close()
    saved = f"; step {int(state.step)} is saved" if self.keep else ""
    return FunctionError(f"{error}{saved}; fix the function, then run the same command again")

  def evaluate_if_due(self, state: TrainState) -> dict[str, float]:
    """Evaluates at step 0, every `eval.every` steps and at the end, and amends metrics.jsonl.

    Returns the metrics; {} if no evaluation is due, if the step has one already, or if the run is
    asked to stop. A resumed run repeats an evaluation that was interrupted.
    """
    config = self.config
    step = int(state.step)
    due = config.eval.is_due(step, config.steps) or step in self._evaluated_before
    if not due or self._journal.has_evaluation(step):
      return {}
    began = time.perf_counter()
    try:
      evaluation = self._evaluate(state.params)
    except Stopped:
      return {}
    except FunctionError as error:
      raise self.saved_error(error, state) from error
    except UserError:  # nothing was judged
      if step:
        self.save(state)
        self._checkpoints.wait()
      raise
    seconds = time.perf_counter() - began
    metrics = evaluation.metrics()
    problems = len(self._held_out)
    line = describe_evaluation(config, step, metrics, eval_label(config), problems, seconds)
    self.display.say(line)
    earlier = [evaluated_accuracy(row) or 0.0 for row in self._journal.read("eval/")]
    if config.checkpoint.best and evaluated_accuracy(metrics) > max(earlier, default=0.0):
      best = Checkpoints(self.folder / "best", keep=1)
      best.save_params(state.params, step)
      best.close()
    self._journal.write_evaluation(step, evaluation.summary(), metrics)
    return metrics

  def repair_evaluations(self) -> None:
    """Restores evaluations that damaged log files have lost. See `repair`."""
    config = self.config
    with contextlib.suppress(Stopped):
      repair_evaluations(
        config, self.worker, self.folder, self._journal, self._evaluate, self.display.say
      )

  def _evaluate(self, params: Params) -> Evaluation:
    with jax.profiler.TraceAnnotation("evaluate"), phase("evaluation"):
      return evaluate_run(
        self.config,
        self.worker,
        self._reward_manager,
        params,
        self._held_out,
        stopping=self.stopping,
        counting=self.display.counting,
      )

  def finish(self, state: TrainState) -> Result:
    """Saves the last state, closes the logs and draws the curves."""
    config = self.config
    with phase("saving"):
      self.save(state)
      self._checkpoints.close()
    self.display.end()
    saved_at = time.monotonic() if self.keep else None
    self._journal.close()
    rows = self._journal.read()
    if is_first_process():
      title = f"{config.algorithm.name} on {config.data.train}, seed {config.seed}"
      draw_curves(rows, title, self.logs.folder / "curves.png")
    step = int(state.step)
    policy = TrainedPolicy(self.worker, state.params)
    finished = step >= config.steps
    stopped = f"stopped at step {step} of {config.steps}{'; saved' if self.keep else ''}"
    summary = summarize(config, rows) if finished else stopped
    return Result(step, finished, summary, rows, policy, saved_at)


def prepare(
  inputs: Inputs, display: Display
) -> tuple[
  RolloutWorker, RewardManager, Teacher | None, list[tuple[Problems, float]], list[Problem]
]:
  """Validates the inputs and loads the problems, before anything is written or compiled.

  Returns the worker, the reward manager, the teacher of the warm start if there is one, and the
  problems to train on and to evaluate on.
  """
  config = inputs.config
  config.check_training()
  with proposing_mesh(config):
    worker = RolloutWorker(config)
    check_divisible(config, worker.model)
  reward_manager = RewardManager(config, inputs.reward)
  teacher = make_teacher(config, worker, display.say, inputs.records)
  check_prompts(config, worker, teacher)
  check_frozen(config, worker)
  check_weights(worker)
  check_trackers(config)
  train_set = training_problems(config, worker, display.say, inputs.records)
  eval_set = held_out_problems(config, worker, display.say, inputs.records)
  return worker, reward_manager, teacher, train_set, eval_set
