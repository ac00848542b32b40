"""The training loop (Algorithm 1 of the paper): prompts, rollouts, rewards, update.

`learn` is the algorithm. `train` and `steps` are the public entry points: they check the inputs,
lock the workdir and build the `Run` (`run.py`), which holds the components that `learn` uses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.api.inputs import Records, resolve_inputs
from gtpo_jax.api.policy import TrainedPolicy
from gtpo_jax.api.results import Result, Step
from gtpo_jax.checkpoint.workdir import claim, open_workdir
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problems
from gtpo_jax.logs.compiles import compile_count
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.profile import trace_window
from gtpo_jax.loop.run import Run, prepare
from gtpo_jax.rollout.user_functions import RewardFunction
from gtpo_jax.runtime.compiling import stoppable_compiles
from gtpo_jax.runtime.distributed import any_process, is_first_process
from gtpo_jax.runtime.errors import FunctionError
from gtpo_jax.runtime.signals import Interrupts, Stopped, Watchdog
from gtpo_jax.runtime.startup import prepare_devices
from gtpo_jax.storage.spool import open_logs

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
  demonstrations: Records | None = None,
) -> Result:
  """Trains to `config.steps` and returns the result. Arguments and exceptions are as in `steps`."""
  run = steps(
    config,
    workdir,
    display,
    stopping,
    reward=reward,
    data=data,
    held_out=held_out,
    demonstrations=demonstrations,
  )
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
  demonstrations: Records | None = None,
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
    demonstrations: dicts for the warm start to imitate, instead of `config.warm_start.data`:
      {"prompt": ..., "completion": ...}. `config.warm_start.steps` is the number of updates.

  Raises:
    UserError: the config cannot run here, the workdir belongs to another run or is in use, or one
      of the inputs cannot be used.
    RunError: updates were skipped too often, or a checkpoint cannot be written.
  """
  prepare_devices()
  compile_count()  # the first call registers the listener that counts compilations
  inputs = resolve_inputs(config, reward, data, held_out, demonstrations)
  display = display or Display(is_first_process())
  interrupts = Interrupts(display.notice)
  signals = interrupts if stopping is None else contextlib.nullcontext()
  stopping = stopping or interrupts.requested
  with display.waiting("reading the model and the data", line=False):
    worker, reward_manager, teacher, train_set, eval_set = prepare(inputs, display)
  config = inputs.config
  with (
    open_workdir(workdir) as folder,
    claim(folder, config, display.say) as check_lock,
    open_logs(folder) as logs,
    contextlib.closing(reward_manager),
    Watchdog(config.guards.stall_s, lambda: any_process(stopping())) as watchdog,
    stoppable_compiles(watchdog),
  ):
    run = Run(
      config,
      folder,
      workdir is not None,
      logs,
      check_lock,
      display,
      watchdog,
      worker,
      reward_manager,
      teacher,
      eval_set,
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
  run.repair_evaluations()
  run.evaluate_if_due(state)
  run.display.begin(config.algorithm.name, config.steps, start)
  window = config.profile.window
  for i in trace_window(window, range(start, config.steps), run.logs.folder / "profile"):
    if run.stopping():
      break
    step = i + 1
    began = time.perf_counter()
    try:  # rollouts and their rewards; shaped credit, gradient, optimizer
      batch = run.collector.collect(state.params, i, run.display.say, run.stopping)
      collected = time.perf_counter()
      state, metrics = run.update(state, batch)
    except Stopped:
      run.collector.discard()  # the next run samples this batch again
      break
    except FunctionError as error:
      run.collector.discard()
      raise run.saved_error(error, state) from error
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
