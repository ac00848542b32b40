"""The main job, as the paper's Algorithm 1: prompts, rollouts, verdicts, update; then log, save, evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from gtpo_jax.api.inputs import Records, take
from gtpo_jax.api.policy import TrainedPolicy
from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.checkpoint.provenance import check_identity, identity_of
from gtpo_jax.checkpoint.workdir import claim
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.evaluation.evaluate import Stopped, evaluate_run, warm_up_evaluation
from gtpo_jax.models.causal import attention_kind
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.reporting.boards import WeightsAndBiases, check_boards
from gtpo_jax.reporting.compiles import compile_count
from gtpo_jax.reporting.credit import write_credit
from gtpo_jax.reporting.curves import draw_curves
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.reporting.profile import trace_window
from gtpo_jax.rollout.experience import Collector, Experience
from gtpo_jax.rollout.policies import check_frozen, check_weights, initial_params, load_frozen
from gtpo_jax.rollout.problems import held_out_problems, training_problems
from gtpo_jax.rollout.scoring import RewardFunction
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.distributed import any_process, fetch, is_first_process
from gtpo_jax.runtime.guards import Guards
from gtpo_jax.runtime.signals import Interrupts, Watchdog
from gtpo_jax.training.micro_batches import check_divides, check_positions
from gtpo_jax.training.state import TrainState, init_state, make_optimizer
from gtpo_jax.training.update import make_update
from gtpo_jax.warm_start import check_prompts, warm_start


@dataclasses.dataclass(frozen=True)
class Step:
  """What one step gave.

  Attributes:
    step: how many steps are behind, this one included.
    metrics: what metrics.jsonl has of it, by name; NaN where there is no number. With those of its evaluation, where there was one.
    batch: what was learned from: its `problems` (n), `texts` (n lists of g), `correct` bool[n, g], and as arrays `rollouts` and
      `verdicts`.
    policy: as it is now, until the next step is asked for, which takes its memory over.
  """

  step: int
  metrics: dict[str, float]
  batch: Experience = dataclasses.field(repr=False)
  policy: TrainedPolicy


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    step: how many steps are behind.
    finished: False where it was asked to stop.
    summary: one line for the user.
    history: every line of metrics.jsonl, the base model's (step 0) first.
    policy: what was learned; None where the run was stopped before the first step.
  """

  step: int
  finished: bool
  summary: str
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)
  policy: TrainedPolicy | None = None


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
  """Trains to `config.steps`, as `steps` does, and returns what was learned. `gtpo_jax.train(...)` is this function."""
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
  """Trains to `config.steps` and yields each step, from the newest checkpoint in `workdir` that is whole, where there is one.

  Left early (`break`, `close()`, an exception in the loop's body), the run is saved and let go of as if it had been asked to stop.

  Args:
    config: a `Config`, an ml_collections ConfigDict as `default_config()` gives, or nested dicts of the fields that differ from it.
    workdir: the run's folder, claimed for this config; None: nothing is kept, and the run cannot be taken up again.
    display: what the user sees; None prints lines, and a live display on a terminal.
    stopping: asked at every step boundary; True saves and returns. None: Ctrl-C (in a notebook, an interrupt) asks for that, and a
      second one raises KeyboardInterrupt.
    reward: a function of (prompts, completions, answers, extras), four lists of equal length, that returns a number or bool for each
      completion, or None where it has none; above 0.5 is right. Instead of the verifier of each problem's kind.
    data: dicts to learn from, as the rows of a file: {"prompt": ..., "answer": ...}. Instead of `config.data.train`.
    held_out: dicts to evaluate on. Where there are none, nor a `config.data.eval`, a tenth of `data` is held out.

  Raises:
    UserError: the config cannot run here, the workdir is not its own or in use, or what was handed over is of no use.
    RunError: updates were skipped too often, or a checkpoint cannot be written.
  """
  compile_count()
  given = take(config, reward, data, held_out)
  config = given.config
  display = display or Display(is_first_process())
  interrupts = Interrupts()
  signals = interrupts if stopping is None else contextlib.nullcontext()
  stopping = stopping or interrupts.asked
  worker = RolloutWorker(config, verifier=given.reward)
  check_divides("batch.prompts", config.batch.prompts, config.batch.parts, worker.model)
  check_positions(config.sampling.max_tokens, worker.model)
  check_prompts(config, worker)
  check_frozen(config, worker)
  check_weights(config)
  check_boards(config)
  problems = training_problems(config, worker, display.say, given.records)
  evaluated = held_out_problems(config, worker, display.say, given.records)
  with (
    _folder(workdir) as folder,
    claim(folder, config, display.say),
    contextlib.closing(worker),
    Watchdog(config.guards.stall_s, lambda: any_process(stopping())) as asked,
  ):
    run = learn(
      config, folder, display, asked, worker, problems, evaluated, keep=workdir is not None
    )
    try:
      while True:
        with signals:
          try:
            step = next(run)
          except StopIteration as end:
            return end.value
        with asked.paused():  # the caller's own time
          yield step
    finally:
      with signals:
        run.close()
      display.end()


@contextlib.contextmanager
def _folder(workdir: str | Path | None) -> Iterator[epath.Path]:
  """The run's folder, or one that goes with the run."""
  if workdir is not None:
    yield epath.Path(workdir)
  else:
    with tempfile.TemporaryDirectory(prefix="gtpo_") as folder:
      yield epath.Path(folder)


def learn(
  config: Config,
  workdir: Path,
  display: Display,
  stopping: Callable[[], bool],
  worker: RolloutWorker,
  problems: Sequence[tuple[Problems, float]],
  held_out: Sequence[Problem],
  keep: bool = True,
) -> Generator[Step, None, Result]:
  """Algorithm 1, in a workdir that is this run's, on `problems` with their weights; without `keep` its checkpoints are of no use."""
  algorithm = config.algorithm_built
  optimizer = make_optimizer(config.optimizer, config.steps, config.batch.updates)
  update = make_update(
    worker.model,
    algorithm,
    optimizer,
    temperature=config.sampling.temperature,
    minibatches=config.batch.minibatches,
    epochs=config.batch.epochs,
    micro_batches=config.batch.micro_batches,
    head_chunk=config.batch.head_chunk,
  )
  display.say(
    f"{algorithm.name} on {config.data.train}: {config.steps} steps of {config.batch.prompts} prompts x {config.batch.group} "
    f"completions, model {config.model.path or config.model.preset}, mesh {dict(worker.model.mesh.shape)}, "
    f"attention by {attention_kind(worker.model.config, worker.model.mesh)}"
  )
  display.say(f"sampling {worker.engine.described()}")
  display.say(
    "each program is compiled when it is first needed: the first evaluation and the first steps take longest"
  )
  checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
  if saved := checkpoints.restore(worker.model, optimizer, display.say):
    state = saved.state
    display.say(f"resumed at step {int(state.step)} of {config.steps} from {workdir}")
  else:
    base = base_model(config, worker, workdir, display, stopping)
    if base is None:
      return Result(0, False, "stopped during the warm start, which is not saved and begins anew")
    state = init_state(base, optimizer, worker.model)

  start = int(state.step)
  facts = saved.facts if saved else {}
  accept = config.checkpoint.accept_changes
  frozen = load_frozen(config, worker, workdir, {} if accept else facts.get("steps", {}))
  identity = identity_of(config, problems, held_out, frozen.identity)
  check_identity(facts.get("identity", {}), identity, accept, display.say)
  collector = Collector(config, worker, problems, frozen, drawn=start)
  if saved and saved.leftovers:
    collector.restore(saved.leftovers)

  def save() -> None:
    if keep:
      with jax.profiler.TraceAnnotation("save"):
        checkpoints.save(
          state, collector.leftovers(), {"identity": identity, "steps": frozen.steps}
        )

  if config.sampling.warm_up:
    warm_up(config, worker.policy(state.params), collector, held_out)
  journal = Journal(
    workdir,
    start,
    config.log.tensorboard,
    lambda: [WeightsAndBiases(workdir, config)] if config.log.wandb else [],
  )
  guards = Guards(
    config.guards.skipped, workdir, rows := journal.read(), display.say, checkpoints.wait
  )
  if start == 0 and not rows:
    journal.write(0, {})
  evaluate_if_due(config, worker, state, held_out, workdir, journal, display, stopping)
  display.begin(algorithm.name, config.steps, start)
  for step in trace_window(config.profile.window, range(start, config.steps), workdir / "profile"):
    if stopping():
      break
    began = time.perf_counter()
    batch = collector.collect(state.params, display.say)
    collected = time.perf_counter()
    with jax.profiler.TraceAnnotation("update"):
      state, metrics = update(state, batch.rollouts, batch.verdicts)
      metrics = {name: float(value) for name, value in fetch(metrics).items()}
    ended = time.perf_counter()

    metrics |= batch.metrics | {
      "time/update": ended - collected,
      "time/step": ended - began,
      "compiles": compile_count(),
      "tokens/s": batch.metrics.get("tokens/sampled", metrics["tokens/completion"])
      / (ended - began),
    }
    display.step(step + 1, metrics, _sample(batch, 0), line=step == start or (step + 1) % 5 == 0)
    journal.write(step + 1, metrics)
    for i in range(min(config.log.samples, len(batch.problems))):
      journal.write_sample(step + 1, *_sample(batch, i))
    if config.log.keeps_credit(step + 1, config.steps):
      write_credit(workdir, step + 1, batch, worker.chat, config.log.credit_groups)
    guards.check(step + 1, metrics, batch.to_arrays)
    if (step + 1) % config.checkpoint.every == 0 and not guards.skipped:
      save()
    if found := evaluate_if_due(
      config, worker, state, held_out, workdir, journal, display, stopping
    ):
      display.sample(*_sample(batch, 0))
    try:
      yield Step(step + 1, metrics | found, batch, TrainedPolicy(worker, state.params))
    except GeneratorExit:  # the caller left
      break
  display.end()
  save()
  checkpoints.close()
  journal.close()
  reached = int(state.step)
  rows = journal.read()
  if is_first_process():
    draw_curves(
      rows, f"{algorithm.name} on {config.data.train}, seed {config.seed}", workdir / "curves.png"
    )
  policy = TrainedPolicy(worker, state.params)
  if reached < config.steps:
    return Result(
      reached,
      False,
      f"stopped at step {reached} of {config.steps}{'; saved' if keep else ''}",
      rows,
      policy,
    )
  return Result(reached, True, summarize(config, rows), rows, policy)


def warm_up(
  config: Config, policy: Policy, collector: Collector, held_out: Sequence[Problem]
) -> None:
  """Compiles all that sampling may need, on one layout of the parameters, which goes when this returns."""
  collector.warm_up(policy)
  warm_up_evaluation(config, policy, held_out)


def base_model(
  config: Config,
  worker: RolloutWorker,
  workdir: Path,
  display: Display,
  stopping: Callable[[], bool],
) -> Params | None:
  """The policy that RL starts from. What a folder does not hold is kept in WORKDIR/base: random weights, or those of a warm start.

  None where asked to stop.
  """
  if config.model.path and not config.warm_start.steps:
    return initial_params(config, worker.model)
  kept = Checkpoints(workdir / "base", keep=1)
  params = kept.newest_params(worker.model, display.say)
  if params is None:
    params = initial_params(config, worker.model)
    if config.warm_start.steps:
      params = warm_start(config, worker, params, display, stopping)
    if params is not None:
      kept.save_params(params)
  kept.close()
  return params


def evaluate_if_due(
  config: Config,
  worker: RolloutWorker,
  state: TrainState,
  held_out: Sequence[Problem],
  workdir: Path,
  journal: Journal,
  display: Display,
  stopping: Callable[[], bool],
) -> dict[str, float]:
  """Evaluates the state into its step's line: at first, at last and every `eval.every` steps. Returns what was found.

  Nothing where it is not due, or done, or asked to stop: then it is made good when the run is taken up again.
  """
  step = int(state.step)
  began = time.perf_counter()
  due = step in (0, config.steps) or (config.eval.every and step % config.eval.every == 0)
  if not due:
    return {}
  rows = journal.read("eval/")
  row = next((row for row in reversed(rows) if row["step"] == step), None)
  if row is None or _accuracy(row) is not None:
    return {}
  try:
    with jax.profiler.TraceAnnotation("evaluate"):
      result = evaluate_run(config, worker, state.params, held_out, stopping=stopping)
      samples = config.eval.samples
  except Stopped:
    return {}
  metrics = result.metrics()
  shown = (f"mean@{samples}", "greedy", f"pass@{samples}", "no_verdict")
  sampled, greedy, best, missing = (metrics[f"eval/{result.name}/{key}"] for key in shown)
  what = f"step {step}" if step else base_name(config)
  display.say(
    f"{what}: held-out pass@1 {sampled:.1%}, greedy {greedy:.1%}, pass@{samples} {best:.1%} ({len(held_out)} problems x "
    f"{samples} samples, {f'{missing:.0f} without a verdict, ' if missing else ''}{time.perf_counter() - began:.1f} s)"
  )
  if config.checkpoint.best and sampled > max((_accuracy(row) or 0.0 for row in rows), default=0.0):
    kept = Checkpoints(workdir / "best", keep=1)
    kept.save_params(state.params, step)
    kept.close()
  journal.write_evaluation(step, result.summary())
  journal.amend(step, metrics)
  return metrics


def base_name(config: Config) -> str:
  """What the policy at step 0 is called."""
  if config.warm_start.steps:
    return "warm-started base model"
  return "base model" if config.model.path else "random base model"


def summarize(config: Config, rows: Sequence[Mapping[str, Any]]) -> str:
  """What was gained, in one line."""
  evaluated = [(row["step"], _accuracy(row)) for row in rows if _accuracy(row) is not None]
  seconds = sum(row.get("time/step", 0.0) for row in rows)
  spent = f"{seconds:.0f} s of sampling, reward and update"
  if not evaluated or evaluated[0][0] != 0:
    return f"{config.algorithm.name}: {rows[-1]['step'] if rows else 0} steps; {spent}"
  (_, before) = evaluated[0]
  (step, after) = evaluated[-1]
  return (
    f"{config.algorithm.name}: held-out pass@1 {before:.1%} ({base_name(config)}) -> {after:.1%} after {step} steps, "
    f"{100 * (after - before):+.1f} points; {spent}"
  )


def _accuracy(row: Mapping[str, Any]) -> float | None:
  """The mean@n of a line that was evaluated, whatever its n."""
  return next(
    (value for key, value in row.items() if key.startswith("eval/") and "/mean@" in key), None
  )


def _sample(batch: Experience, i: int) -> tuple[str, str, bool]:
  """Problem i, its first completion, and whether that is right."""
  return batch.problems[i].messages[-1]["content"], batch.texts[i][0], bool(batch.correct[i, 0])
