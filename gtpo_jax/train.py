"""The main job, as the paper's Algorithm 1: prompts, rollouts, verdicts, update; then log, save, evaluate."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gtpo_jax.checkpoint import Checkpoints
from gtpo_jax.collect import Collector, Experience
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.evaluation import Stopped, evaluate_run
from gtpo_jax.frozen import check_frozen, check_weights, initial_params, load_frozen
from gtpo_jax.guards import Guards
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.parallel import any_process, fetch, is_first
from gtpo_jax.problems import held_out_problems, training_problems
from gtpo_jax.reporting.compiles import compile_count
from gtpo_jax.reporting.credit import write_credit
from gtpo_jax.reporting.curves import draw_curves
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.rollout import Actor
from gtpo_jax.stopping import Watchdog
from gtpo_jax.training.micro_batches import check_divides
from gtpo_jax.training.state import TrainState, init_state, make_optimizer
from gtpo_jax.training.update import make_update
from gtpo_jax.warm_start import check_prompts, warm_start
from gtpo_jax.workdir import claim


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended."""

  step: int
  finished: bool   # False where it was asked to stop
  summary: str     # one line for the user


def train(config: Config, workdir: Path, display: Display, stopping: Callable[[], bool] = lambda: False) -> Result:
  """Trains to `config.steps`, from the newest checkpoint in `workdir` that is whole, where there is one.

  Args:
    config: the run.
    workdir: its folder; claimed for this config.
    display: what the user sees.
    stopping: asked at every step boundary; True saves and returns.

  Raises:
    UserError: the config cannot run here, or the workdir is not its own or in use.
    RunError: updates were skipped too often, or a checkpoint cannot be written.
  """
  compile_count()
  actor = Actor(config)
  check_divides("batch.prompts", config.batch.prompts, config.batch.parts, actor.model)
  check_prompts(config, actor)
  check_frozen(config, actor)
  check_weights(config)
  problems, held_out = training_problems(config, actor, display.say), held_out_problems(config, actor, display.say)
  with claim(workdir, config), Watchdog(config.guards.stall_s, lambda: any_process(stopping())) as asked:
    return learn(config, workdir, display, asked, actor, problems, held_out)


def learn(config: Config, workdir: Path, display: Display, stopping: Callable[[], bool], actor: Actor,
          problems: Sequence[tuple[Problems, float]], held_out: Sequence[Problem]) -> Result:
  """Algorithm 1, in a workdir that is this run's, on `problems` with their weights."""
  algorithm, optimizer = config.algorithm_object, make_optimizer(config.optimizer, config.steps, config.batch.updates)
  update = make_update(actor.model, algorithm, optimizer, temperature=config.sampling.temperature,
                       minibatches=config.batch.minibatches, epochs=config.batch.epochs, micro_batches=config.batch.micro_batches,
                       head_chunk=config.batch.head_chunk)
  display.say(f"{algorithm.name} on {config.data.train}: {config.steps} steps of {config.batch.prompts} prompts x {config.batch.group} "
              f"completions, model {config.model.path or config.model.preset}, mesh {dict(actor.model.mesh.shape)}")
  display.say(f"sampling {actor.engine.described()}")
  checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
  if saved := checkpoints.restore(actor.model, optimizer, display.say):
    state = saved.state
    display.say(f"resumed at step {int(state.step)} of {config.steps} from {workdir}")
  else:
    base = base_model(config, actor, workdir, display, stopping)
    if base is None:
      return Result(0, False, "stopped during the warm start, which is not saved and begins anew")
    state = init_state(base, optimizer, actor.model)

  start, frozen = int(state.step), load_frozen(config, actor, workdir)
  collector = Collector(config, actor, problems, frozen, drawn=start)
  if saved:
    frozen.check(saved.facts)
    if saved.leftovers:
      collector.restore(saved.leftovers)
  save = lambda: checkpoints.save(state, collector.leftovers(), frozen.identity)
  if config.sampling.warm_up:
    actor.engine.warm_up(actor.policy(state.params).params, config.batch.prompts, group=config.own_group, sampler=config.sampler)
  journal = Journal(workdir, start, config.log.tensorboard)
  guards = Guards(config.guards.skipped, workdir, rows := journal.read(), display.say, checkpoints.wait)
  if start == 0 and not rows:
    journal.write(0, {})
  evaluate_if_due(config, actor, state, held_out, workdir, journal, display, stopping)
  display.begin(algorithm.name, config.steps, start)
  for step in range(start, config.steps):
    if stopping():
      break
    began = time.perf_counter()
    batch = collector.collect(state.params, display.say)
    collected = time.perf_counter()
    state, metrics = update(state, batch.rollouts, batch.verdicts)
    metrics = {name: float(value) for name, value in fetch(metrics).items()}
    ended = time.perf_counter()

    metrics |= batch.metrics | {"time/update": ended - collected, "time/step": ended - began, "compiles": compile_count(),
                                "tokens/s": batch.metrics.get("tokens/sampled", metrics["tokens/completion"]) / (ended - began)}
    display.step(step + 1, metrics, line=step == start or (step + 1) % 5 == 0)
    journal.write(step + 1, metrics)
    for i in range(min(config.log.samples, len(batch.problems))):
      journal.write_sample(step + 1, *_sample(batch, i))
    if config.log.keeps_credit(step + 1, config.steps):
      write_credit(workdir, step + 1, batch, actor.chat, config.log.credit_groups)
    guards.check(step + 1, metrics, batch)
    if (step + 1) % config.checkpoint.every == 0 and not guards.skipped:
      save()
    if evaluate_if_due(config, actor, state, held_out, workdir, journal, display, stopping):
      display.sample(*_sample(batch, 0))
  display.end()
  save()
  checkpoints.close()
  journal.close()
  reached = int(state.step)
  rows = journal.read()
  if is_first():
    draw_curves(rows, f"{algorithm.name} on {config.data.train}, seed {config.seed}", workdir / "curves.png")
  if reached < config.steps:
    return Result(reached, False, f"stopped at step {reached} of {config.steps}; saved")
  return Result(reached, True, summarize(config, journal))


def base_model(config: Config, actor: Actor, workdir: Path, display: Display, stopping: Callable[[], bool]) -> Params | None:
  """The policy that RL starts from. What a folder does not hold is kept in WORKDIR/base: random weights, or those of a warm start.

  None where asked to stop.
  """
  if config.model.path and not config.warm_start.steps:
    return initial_params(config, actor.model)
  kept = Checkpoints(workdir / "base", keep=1)
  params = kept.newest_params(actor.model, display.say)
  if params is None:
    params = initial_params(config, actor.model)
    if config.warm_start.steps:
      params = warm_start(config, actor, params, display, stopping)
    if params is not None:
      kept.save_params(params)
  kept.close()
  return params


def evaluate_if_due(config: Config, actor: Actor, state: TrainState, held_out: Sequence[Problem], workdir: Path, journal: Journal,
                    display: Display, stopping: Callable[[], bool]) -> bool:
  """Evaluates the state into its step's line: at first, at last and every `eval.every` steps.

  False where it is not due, or done, or asked to stop: then it is made good when the run is taken up again.
  """
  step, began = int(state.step), time.perf_counter()
  due = step in (0, config.steps) or (config.eval.every and step % config.eval.every == 0)
  if not due:
    return False
  rows = journal.read()
  row = next((row for row in reversed(rows) if row["step"] == step), None)
  if row is None or _accuracy(row) is not None:
    return False
  try:
    result, samples = evaluate_run(config, actor, state.params, held_out, stopping=stopping), config.eval.samples
  except Stopped:
    return False
  metrics, shown = result.metrics(), (f"mean@{samples}", "greedy", f"pass@{samples}", "no_verdict")
  sampled, greedy, best, missing = (metrics[f"eval/{result.name}/{key}"] for key in shown)
  what = f"step {step}" if step else base_name(config)
  display.say(f"{what}: held-out pass@1 {sampled:.1%}, greedy {greedy:.1%}, pass@{samples} {best:.1%} ({len(held_out)} problems x "
              f"{samples} samples, {f'{missing:.0f} without a verdict, ' if missing else ''}{time.perf_counter() - began:.1f} s)")
  if config.checkpoint.best and sampled > max((_accuracy(row) or 0.0 for row in rows), default=0.0):
    kept = Checkpoints(workdir / "best", keep=1)
    kept.save_params(state.params, step)
    kept.close()
  journal.write_evaluation(step, result.summary())
  journal.amend(step, metrics)
  return True


def base_name(config: Config) -> str:
  """What the policy at step 0 is called."""
  if config.warm_start.steps:
    return "warm-started base model"
  return "base model" if config.model.path else "random base model"


def summarize(config: Config, journal: Journal) -> str:
  """What was gained, in one line."""
  rows = journal.read()
  evaluated = [(row["step"], _accuracy(row)) for row in rows if _accuracy(row) is not None]
  seconds = sum(row.get("time/step", 0.0) for row in rows)
  spent = f"{seconds:.0f} s of sampling, reward and update"
  if not evaluated or evaluated[0][0] != 0:
    return f"{config.algorithm.name}: {rows[-1]['step'] if rows else 0} steps; {spent}"
  (_, before), (step, after) = evaluated[0], evaluated[-1]
  return (f"{config.algorithm.name}: held-out pass@1 {before:.1%} ({base_name(config)}) -> {after:.1%} after {step} steps, "
          f"{100 * (after - before):+.1f} points; {spent}")


def _accuracy(row: dict[str, float]) -> float | None:
  """The mean@n of a line that was evaluated, whatever its n."""
  return next((value for key, value in row.items() if key.startswith("eval/") and "/mean@" in key), None)


def _sample(batch: Experience, i: int) -> tuple[str, str, bool]:
  """Problem i, its first completion, and whether that is right."""
  return batch.problems[i].messages[-1]["content"], batch.texts[i][0], bool(batch.correct[i, 0])
