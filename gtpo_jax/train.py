"""The main job, as the paper's Algorithm 1: prompts, rollouts, verdicts, update; then log, evaluate, save."""
from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from gtpo_jax.checkpoint import Checkpoints
from gtpo_jax.config import Config, difference, freeze, to_dict
from gtpo_jax.data.pipeline import Batches, held_out
from gtpo_jax.data.records import Problem
from gtpo_jax.errors import UserError
from gtpo_jax.evaluation import Evaluation, evaluate
from gtpo_jax.models.qwen2 import Params, init_params
from gtpo_jax.parallel import fetch
from gtpo_jax.reporting.compiles import compile_count
from gtpo_jax.reporting.curves import draw_curves
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.rollout import Actor, Completions
from gtpo_jax.training.state import init_state, make_optimizer
from gtpo_jax.training.update import check_divides, make_update
from gtpo_jax.warm_start import warm_start

INIT, SAMPLE, EVALUATE = range(3)  # streams of random keys, folded from the seed


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended."""

  step: int
  finished: bool   # False where it was asked to stop
  summary: str     # one line for the user


def train(config: Config, workdir: Path, display: Display, stopping: Callable[[], bool] = lambda: False) -> Result:
  """Trains to `config.steps`, from the newest checkpoint in `workdir` where there is one.

  Args:
    config: the run.
    workdir: its folder; claimed for this config.
    display: what the user sees.
    stopping: asked at every step boundary; True saves and returns.
  """
  compile_count()
  actor, seed = Actor(config), jax.random.key(config.seed)
  check_divides("batch.prompts", config.batch.prompts, config.batch.micro_batches, actor.model)
  check_divides("warm_start.batch", config.warm_start.batch, 1, actor.model)
  claim(workdir, config)
  algorithm, optimizer = config.algorithm_object, make_optimizer(config.optimizer, config.steps)
  update = make_update(actor.model, algorithm, optimizer, temperature=config.sampling.temperature,
                       micro_batches=config.batch.micro_batches, head_chunk=config.batch.head_chunk)
  batches = Batches(config.train_task, config.batch.prompts, config.seed)
  checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)

  display.say(f"{algorithm.name} on {config.data.train}: {config.steps} steps of {config.batch.prompts} prompts x {config.batch.group} "
              f"completions, model {config.model.preset}, mesh {dict(actor.model.mesh.shape)}")
  if checkpoints.latest is None:
    base = base_model(config, actor, workdir, display, stopping)
    if base is None:
      return Result(0, False, "stopped during the warm start; nothing was lost but its seconds")
    state = init_state(base, optimizer, actor.model)
  else:
    state = checkpoints.restore(actor.model, optimizer)
    display.say(f"resumed at step {int(state.step)} of {config.steps} from {workdir}")

  start = int(state.step)
  journal = Journal(workdir, start, config.log.tensorboard)
  if not journal.read():
    journal.write(0, _evaluation(config, actor, state.params, display, base_name(config)).metrics())
  display.begin(algorithm.name, config.steps, start)
  for step in range(start, config.steps):
    began = time.perf_counter()
    problems = batches[step]
    rollouts = actor.answer(actor.engine.layout(state.params), problems, key_for(seed, SAMPLE, step), config.batch.group, config.sampler)
    sampled = time.perf_counter()
    completions = actor.judge(rollouts, problems)
    verdicts = actor.verdicts(completions, config)
    judged = time.perf_counter()
    state, metrics = update(state, rollouts, verdicts)
    metrics = {name: float(value) for name, value in fetch(metrics).items()}
    ended = time.perf_counter()

    metrics |= {"time/sample": sampled - began, "time/reward": judged - sampled, "time/update": ended - judged,
                "time/step": ended - began, "tokens/s": metrics["tokens/completion"] / (ended - began), "compiles": compile_count()}
    last = step + 1 == config.steps
    display.step(step + 1, metrics, line=step == start or last or (step + 1) % 5 == 0)
    if last or (config.eval.every and (step + 1) % config.eval.every == 0):
      metrics |= _evaluation(config, actor, state.params, display, f"step {step + 1}").metrics()
      display.sample(*_sample(problems, completions, 0))
    journal.write(step + 1, metrics)
    for i in range(min(config.log.samples, len(problems))):
      journal.write_sample(step + 1, *_sample(problems, completions, i))
    stop = stopping() and not last
    if last or stop or (step + 1) % config.checkpoint.every == 0:
      checkpoints.save(state)
    if stop:
      break
  display.end()
  checkpoints.close()
  journal.close()
  reached = int(state.step)
  draw_curves(journal.read(), f"{algorithm.name} on {config.data.train}, seed {config.seed}", workdir / "curves.png")
  if reached < config.steps:
    return Result(reached, False, f"stopped at step {reached} of {config.steps}; saved")
  return Result(reached, True, summarize(config, journal))


def key_for(seed: jax.Array, stream: int, step: int) -> jax.Array:
  """The random key of one use at one step."""
  return jax.random.fold_in(jax.random.fold_in(seed, stream), step)


def base_model(config: Config, actor: Actor, workdir: Path, display: Display, stopping: Callable[[], bool]) -> Params | None:
  """The policy that RL starts from: random, or warm-started once and kept in WORKDIR/base. None where asked to stop."""
  keep = Checkpoints(workdir / "base")
  if keep.latest is not None:
    params = keep.restore_params(actor.model)
  else:
    params = init_params(actor.model, key_for(jax.random.key(config.seed), INIT, 0))
    if config.warm_start.steps:
      params = warm_start(config, actor, params, display, stopping)
    if params is not None:
      keep.save_params(params)
  keep.close()
  return params


def base_name(config: Config) -> str:
  """What the policy at step 0 is called."""
  return "warm-started base model" if config.warm_start.steps else "random base model"


def claim(workdir: Path, config: Config) -> None:
  """Makes the workdir and writes its config.json, or checks that the one there is of the same run.

  Raises:
    UserError: not a folder, not writable, or written by a config that differs in more than what may change on resume.
  """
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"workdir {str(workdir)!r} is a file; name a folder")
  file = workdir / "config.json"
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if file.exists() and any(workdir.glob("base/*")):  # a config that never made a model may be mended
      changed = {key: values for key, values in difference(load_config(workdir), config).items() if not _may_change(key)}
      if changed:
        shown = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
        raise UserError(f"workdir {str(workdir)!r} belongs to another config ({shown}); name another workdir, or remove this one")
    file.write_text(json.dumps(to_dict(config), indent=2) + "\n")
  except OSError as error:
    raise UserError(f"cannot write into workdir {str(workdir)!r}: {error.strerror or error}") from error


def load_config(workdir: Path) -> Config:
  """The config that a workdir was written by.

  Raises:
    UserError: the folder holds no run, or its config.json is damaged.
  """
  file = workdir / "config.json"
  if not file.is_file():
    raise UserError(f"no run in {str(workdir)!r}: it has no config.json; name the workdir of a `gtpo train`")
  try:
    return freeze(json.loads(file.read_text()))
  except json.JSONDecodeError as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {error}") from error


def summarize(config: Config, journal: Journal) -> str:
  """What was gained, in one line."""
  rows = journal.read()
  key = next(key for key in rows[0] if key.startswith("eval/") and "/mean@" in key)
  last = [row for row in rows if key in row][-1]  # a run cut short by fewer steps may end on a step that was not evaluated
  seconds = sum(row.get("time/step", 0.0) for row in rows)
  return (f"{config.algorithm.name}: held-out pass@1 {rows[0][key]:.1%} ({base_name(config)}) -> {last[key]:.1%} after "
          f"{last['step']} steps, {100 * (last[key] - rows[0][key]):+.1f} points; {seconds:.0f} s of sampling, reward and update")


def _may_change(key: str) -> bool:
  return key == "steps" or key.split(".")[0] in ("mesh", "eval", "checkpoint", "log")


def _evaluation(config: Config, actor: Actor, params: Params, display: Display, what: str) -> Evaluation:
  began, name = time.perf_counter(), config.data.eval or config.data.train
  problems = held_out(config.eval_task, config.eval.problems)
  key = key_for(jax.random.key(config.seed), EVALUATE, 0)
  result = evaluate(actor, actor.engine.layout(params), name, problems, key, samples=config.eval.samples, batch=config.eval.batch,
                    sampler=config.eval_sampler)
  display.say(f"{what}: held-out pass@1 {result.mean:.1%}, greedy {result.greedy.mean():.1%}, "
              f"pass@{config.eval.samples} {result.pass_at(config.eval.samples):.1%} "
              f"({len(problems)} problems x {config.eval.samples} samples, {time.perf_counter() - began:.1f} s)")
  return result


def _sample(problems: Sequence[Problem], completions: Completions, i: int) -> tuple[str, str, bool]:
  """Problem i, its first completion, and whether that is right."""
  return problems[i].messages[-1]["content"], completions.texts[i][0], bool(completions.correct[i, 0])
