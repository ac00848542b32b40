"""The components of one run, and the operations that the training loop calls on them."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
from etils import epath

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.opening import frozen_params
from gtpo_jax.checkpoint.provenance import check_provenance
from gtpo_jax.checkpoint.workdir import Claim
from gtpo_jax.config import Config
from gtpo_jax.config.updates import run_optimizer, run_update
from gtpo_jax.logs.credit import repair_credit, step_timeline, write_credit
from gtpo_jax.logs.credit_scores import step_metrics
from gtpo_jax.logs.curves import draw_curves
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.profile import compile_count, trace_window
from gtpo_jax.logs.sessions import SessionRecord
from gtpo_jax.logs.spool import Logs
from gtpo_jax.logs.summary import (
  corrected,
  describe_expected,
  describe_run,
  expected_of,
  summarize,
  without_other_evaluations,
)
from gtpo_jax.logs.trackers import make_trackers
from gtpo_jax.logs.truth import Segments, batch_truth, segment_truth
from gtpo_jax.loop.evaluations import Evaluations
from gtpo_jax.loop.guards import Guards
from gtpo_jax.loop.policy import TrainedPolicy
from gtpo_jax.loop.prepare import Parts
from gtpo_jax.loop.results import Result
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.loop.warm_up import warm_up_sampling, warm_up_training
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.forecast import Observer
from gtpo_jax.rollout.frozen import load_frozen
from gtpo_jax.runtime.compiling import StoppableProgram
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.distributed import fetch, is_first_process
from gtpo_jax.runtime.errors import FunctionError, JudgeError
from gtpo_jax.runtime.resource_limits import return_freed_memory
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.training.state import TrainState, init_state

MEASURED_STEPS = 3  # that compile nothing, after which the expected time is corrected
COMPILING_STEPS = 2  # of a run, which say nothing about the time of others
PRINT_EVERY = 5  # steps between lines of a plain log


class Place(NamedTuple):
  """Where a run writes."""

  folder: epath.Path  # the workdir, or a temporary folder
  keep: bool  # whether the folder survives the run; if not, no checkpoints are written
  logs: Logs  # where the log files are written
  claim: Claim  # the claim on the workdir


class Run:
  """The components of one run, and the operations that `learn` calls on them.

  Args:
    config: the run's config.
    parts: what it works with.
    place: where it writes.
    display: the console output.
    stopping: polled between steps and inside long phases; True requests that the run end.

  Attributes:
    config: the run's config.
    worker: samples completions.
    display: the console output.
    state: the state of the last update, which an interrupted run saves; None before `set_up`.
    collector, evaluations, guards: made by `set_up`.
  """

  def __init__(
    self, config: Config, parts: Parts, place: Place, display: Display, stopping: Callable[[], bool]
  ):
    self.config = config
    self.worker = parts.worker
    self.display = display
    self.state: TrainState | None = None
    self._parts = parts
    self._place = place
    self._stopping = stopping
    self._began = time.monotonic()
    self._optimizer = run_optimizer(config, parts.worker.model)
    update = run_update(config, parts.worker.model, self._optimizer, parts.worker.teacher)
    self._compiled_update = StoppableProgram(update)

  @phase("set-up")
  def set_up(self) -> TrainState:
    """Makes everything that the loop uses, and restores or makes the state that it starts from."""
    config = self.config
    worker, folder, say = self.worker, self._place.folder, self.display.say
    for line in describe_run(config, worker):
      say(line)
    self._expected = expected_of(config, worker, len(self._parts.held_out))
    self._step_seconds: list[float] = []  # of steps that compiled nothing
    self._compiles = 0.0
    self._observer: Observer | None = None
    self._checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    untrained = functools.partial(frozen_params, folder, worker.model, config.model.path)
    saved = self._checkpoints.restore(worker.model, self._optimizer, say, untrained)
    if self._expected:
      say(describe_expected(self._expected, config, int(saved.state.step) if saved else 0))
    if saved:
      state = saved.state
      say(f"resumed at step {int(state.step)} of {config.steps} from {folder}")
    else:
      base = base_model(config, worker, folder, self.display, self._stopping, self._parts.teacher)
      if base is None:
        raise Stopped("during the warm start, which the next run starts over")
      state = init_state(base, self._optimizer, worker.model)
    start = int(state.step)
    metadata = saved.metadata if saved else {}
    accept_changes = config.checkpoint.accept_changes
    frozen_steps = {} if accept_changes else metadata.get("steps", {})
    frozen = load_frozen(config, worker, folder, frozen_steps, state.params)
    self._teacher = () if frozen.matched is None else (frozen.matched,)  # arguments of the update
    problems = self._parts.problems
    provenance = {**self._parts.provenance, **frozen.digests}
    check_provenance(metadata.get("identity", {}), provenance, accept_changes, say)
    self._metadata = {"identity": provenance, "steps": frozen.steps}
    reward_manager = self._parts.reward_manager
    self.collector = Collector(config, worker, reward_manager, problems, frozen, start)
    if saved and saved.leftovers:
      self.collector.restore(saved.leftovers)
    if config.sampling.warm_up:
      policies = (worker.policy(state.params), frozen.guide)
      held_out = len(self._parts.held_out)
      warm_up_sampling(config, policies, held_out, self.display)
      placement = self.collector.placement
      warm_up_training(self._compiled_update, placement, state, self._teacher, self.display)
    self._place.claim.record_config()
    self._open_logs(start)
    self.state = state
    return state

  def _open_logs(self, start: int) -> None:
    config = self.config
    log = config.log
    workdir = self._place.folder
    folder = self._place.logs.folder
    say = self.display.say
    self._parts.reward_manager.grader.use_cache(folder)
    further = lambda: make_trackers(folder, config, workdir.name, say)
    self._journal = Journal(folder, start, log.tensorboard, further, log.samples, say)
    if is_first_process():
      keeps = lambda step: log.keeps_credit(step, config.steps)
      for line in repair_credit(workdir, start, keeps):
        say(line)
    self._session = SessionRecord(folder, start, self._began)
    rows = self._journal.read()
    self.guards = Guards(config.guards.skipped, workdir, rows, say, self._checkpoints.wait)
    if start == 0 and not rows:
      self._journal.write(0, {})  # the row of step 0, to which the base model's evaluation is added
    save = functools.partial(self.save, wait=True)
    self.evaluations = Evaluations(
      config, self._parts, workdir, self._journal, self.display, self._stopping, save
    )

  def remaining_steps(self) -> Iterator[int]:
    """Yields the indices of the steps from the current one on, until the run is asked to stop.

    The steps of `profile.window` are traced.
    """
    config = self.config
    start = int(self.state.step)
    self.display.begin(config.algorithm.name, config.steps, start)
    self._printed_from = start + 1
    window = config.profile.window
    steps = range(start, config.steps)
    for i in trace_window(window, steps, self._place.logs.folder / "profile"):
      if self._stopping():
        return
      yield i

  def collect(self, params: Params, step: int) -> Batch:
    """Samples and scores the completions of a step."""
    self._step_began = time.perf_counter()
    with _sampled_again(self.collector):
      return self.collector.collect(params, step, self.display.say, self._stopping)

  def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """Returns the next state and the metrics of the step. The old state's memory is reused."""
    segments = self._measured_segments(state, batch)
    collected = time.perf_counter()
    return_freed_memory()
    with _sampled_again(self.collector), jax.profiler.TraceAnnotation("update"), phase("update"):
      state, metrics = self._compiled_update(state, batch.rollouts, batch.rewards, *self._teacher)
      metrics = {name: float(value) for name, value in fetch(metrics).items()}
      own_verifier = self._parts.reward_manager.has_own_verifier
      truth = batch_truth(batch, self.worker, own_verifier)
      self._truth = truth._replace(segments=segments)
      metrics |= step_metrics(self.config.resolved_algorithm, batch, self._truth)
    ended = time.perf_counter()
    self.state = state
    metrics = batch.add_metrics(metrics)
    tokens = metrics.get("tokens/sampled", metrics["tokens/completion"])
    return state, metrics | {
      "time/update": ended - collected,
      "time/step": ended - self._step_began,
      "tokens/s": tokens / (ended - self._step_began),
      "compiles": compile_count(),
    }

  def _measured_segments(self, state: TrainState, batch: Batch) -> Segments | None:
    """Measures values with the policy that sampled the batch, at steps with a credit record."""
    config = self.config
    step = int(state.step) + 1
    if not config.log.continuations or not config.log.keeps_credit(step, config.steps):
      return None
    manager = self._parts.reward_manager
    with _sampled_again(self.collector), phase("sampling"):
      return segment_truth(config, batch, self.worker, manager, state.params, self._stopping)

  def log(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
    """Displays a step and writes its metrics, some completions, and its token-level credit.

    Raises:
      RunError: the updates of too many steps were skipped (`Guards`).
    """
    log = self.config.log
    line = step == self._printed_from or step % PRINT_EVERY == 0
    self.display.step(step, metrics, batch.first_completion(0), line=line)
    if self._observer is None:
      self._observer = Observer(self.config, self.worker.engine, step + COMPILING_STEPS)
    if pays := self._observer.observe(step, batch.groups, metrics):
      self.display.say(pays)
    if metrics["compiles"] == self._compiles:
      self._step_seconds.append(metrics["time/step"])
      if self._expected and len(self._step_seconds) == MEASURED_STEPS and step < self.config.steps:
        seconds = statistics.median(self._step_seconds)
        self.display.say(corrected(self._expected, self.config, step, seconds))
    self._compiles = metrics["compiles"]
    self._journal.write(step, metrics)
    for i in range(min(log.samples, len(batch.problems))):
      episodes = batch.episodes[i]
      episode = episodes[0] if episodes else None
      answer = batch.problems[i].answer
      self._journal.write_sample(step, *batch.first_completion(i), episode, answer)
    if log.keeps_credit(step, self.config.steps):
      timeline = step_timeline(batch.spans, metrics)
      folder = self._place.logs.folder
      chat = self.worker.chat
      write_credit(folder, step, batch, self._truth, chat, log.credit_groups, timeline)
    self.guards.check(step, metrics, batch.to_arrays)

  def save(self, state: TrainState, wait: bool = False) -> None:
    """Starts saving a checkpoint in the background, after the logs up to its step.

    Args:
      state: the state.
      wait: whether to return only when it is on disk.

    Raises:
      RunError: it cannot be saved, or the run has lost the lock of its workdir.
    """
    if self._place.keep:
      self._place.claim.check_lock()
      self._place.logs.flush()
      with jax.profiler.TraceAnnotation("save"):
        leftovers = self.collector.leftovers()
        self._checkpoints.save(state, leftovers, self._metadata, self.worker.model)
        self._session.update(int(state.step))
    if wait:
      self._checkpoints.wait()

  def export_if_due(self, state: TrainState) -> None:
    """Writes the policy as a Hugging Face folder every `checkpoint.export_every` steps.

    A resumed run replaces the folders of the steps that it repeats.
    """
    section = self.config.checkpoint
    step = int(state.step)
    if not self._place.keep or not section.export_every or step % section.export_every:
      return
    exports = epath.Path(self._place.folder) / "exports"
    if is_first_process() and exports.exists():
      for entry in exports.iterdir():
        if entry.name.isdecimal() and int(entry.name) >= step:
          entry.rmtree()
    out = exports / str(step)
    with phase("saving"):
      TrainedPolicy(self.worker, state.params).save(out)
    if is_first_process():
      written = [entry for entry in exports.iterdir() if entry.name.isdecimal()]
      for entry in sorted(written, key=lambda entry: int(entry.name))[: -section.keep]:
        entry.rmtree()
    self.display.say(f"step {step} is exported to {str(out)!r}")

  def saved_error(self, error: FunctionError) -> FunctionError:
    """Saves the state and returns the error, with what is saved added to its message."""
    self.save(self.state)
    self._checkpoints.close()
    self._journal.close()
    saved = f"; step {int(self.state.step)} is saved" if self._place.keep else ""
    fix = "start its server again" if isinstance(error, JudgeError) else "fix the function"
    return FunctionError(f"{error}{saved}; {fix}, then run the same command again")

  def finish(self) -> Result:
    """Saves the last state, closes the logs and draws the curves."""
    config = self.config
    state = self.state
    keep = self._place.keep
    with phase("saving"):
      self.save(state)
      self._checkpoints.close()
    self.display.end()
    saved_at = time.monotonic() if keep else None
    self._journal.close()
    rows = self._journal.read()
    settings = self._journal.evaluations.settings()
    if is_first_process():
      title = f"{config.algorithm.name} on {config.data.train}, seed {config.seed}"
      compared = without_other_evaluations(rows, settings)
      draw_curves(compared, title, self._place.logs.folder / "curves.png")
    step = int(state.step)
    policy = TrainedPolicy(self.worker, state.params)
    finished = step >= config.steps
    stopped = f"stopped at step {step} of {config.steps}{'; saved' if keep else ''}"
    summary = summarize(config, rows, settings) if finished else stopped
    return Result(step, finished, summary, rows, policy, saved_at)


@contextlib.contextmanager
def _sampled_again(collector: Collector) -> Iterator[None]:
  """If the run is interrupted in the body, the next one samples the batch of this step again."""
  try:
    yield
  except (Stopped, FunctionError):
    collector.discard()
    raise
