"""The training loop (Algorithm 1 of the paper): prompts, rollouts, rewards, update.

`learn` is the algorithm. `train` and `steps` are the public entry points: they check the inputs,
lock the workdir and build the `Run` (`run.py`), which holds the components that `learn` uses. What
a stop, or an error of a user's function, does to a run is in `interruptions.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.checkpoint.workdir import claim, open_workdir
from gtpo_jax.config import Config, flatten, resolved_dict, with_compute_dtype
from gtpo_jax.logs.display import Display, one_line
from gtpo_jax.logs.profile import compile_count
from gtpo_jax.logs.spool import open_logs
from gtpo_jax.loop.inputs import Agent, MakeEnvironment, Records, resolve_inputs
from gtpo_jax.loop.interruptions import closed_at_exit, saved_if_interrupted
from gtpo_jax.loop.policy import TrainedPolicy
from gtpo_jax.loop.prepare import dated, fit_here, prepare
from gtpo_jax.loop.results import Result, Step
from gtpo_jax.loop.run import Place, Run
from gtpo_jax.models.hf.folder import fingerprints
from gtpo_jax.rollout.scoring.functions import RewardFunction
from gtpo_jax.runtime.cluster.agreement import agree, process_identity
from gtpo_jax.runtime.compiling import stoppable_compiles
from gtpo_jax.runtime.distributed import any_process, is_first_process
from gtpo_jax.runtime.paths import absolute_path, storage_path
from gtpo_jax.runtime.signals import Interrupts, Watchdog
from gtpo_jax.runtime.startup import prepare_devices


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
  environment: MakeEnvironment | None = None,
  tools: Sequence[Callable[..., Any]] | None = None,
  agent: Agent | None = None,
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
    environment=environment,
    tools=tools,
    agent=agent,
  )
  while True:
    try:
      next(run)
    except StopIteration as end:
      return end.value


@closed_at_exit
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
  environment: MakeEnvironment | None = None,
  tools: Sequence[Callable[..., Any]] | None = None,
  agent: Agent | None = None,
) -> Generator[Step, None, Result]:
  """Trains to `config.steps` and yields each step.

  Starts from the newest intact checkpoint in `workdir`, if there is one. If the caller stops
  iterating early (`break`, `close()`, an exception in the body of its loop, or the end of its
  program), the run is saved as it is after a stop request.

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
    environment: a class with reset(row, seed) and step(turn), or what one of
      `environments.from_methods`, `from_gym` and `from_openenv` returns. Each completion has its
      own environment, which answers its turns. It replaces `config.env.make`.
    tools: functions with type hints and Google docstrings that the model may call. They replace
      `config.env.tools`.
    agent: async def run(row, client, seed), which sends requests to the policy with an
      `openai.AsyncOpenAI` and returns a reward, or `environments.Result`. It replaces
      `config.env.agent`.

  Raises:
    UserError: the config cannot run here, the workdir belongs to another run or is in use, or one
      of the inputs cannot be used.
    RunError: updates were skipped too often, or a checkpoint cannot be written.
  """
  prepare_devices()
  compile_count()  # the first call registers the listener that counts compilations
  inputs = resolve_inputs(config, reward, data, held_out, demonstrations, environment, tools, agent)
  place = "none" if workdir is None else str(absolute_path(storage_path(workdir)))
  settings = flatten(resolved_dict(inputs.config))
  agree({**process_identity(), "the workdir": place, **settings})
  display = display or Display(is_first_process())
  interrupts = Interrupts(display.notice)
  signals = interrupts if stopping is None else contextlib.nullcontext()
  stopping = stopping or interrupts.requested
  with display.waiting("reading the model and the data", line=False):
    inputs = dataclasses.replace(inputs, config=fit_here(inputs.config))
    config, is_new = dated(inputs.config, workdir)
    parts = prepare(dataclasses.replace(inputs, config=config), display)
  if not parts.worker.chat.template.reads_date:
    config = inputs.config
  elif is_new:
    display.say(
      f"the chat template reads the date: in this run it stays {config.data.date}, also when it is "
      "resumed, evaluated or served (data.date)"
    )
  config = with_compute_dtype(config, parts.worker.model.config.compute_dtype)
  dtype = {"model.compute_dtype": config.model.compute_dtype}
  agree({**dtype, **fingerprints(config.model.path), **parts.provenance})
  with (
    open_workdir(workdir) as folder,
    claim(folder, config, display.say) as claimed,
    open_logs(folder) as logs,
    contextlib.closing(parts.reward_manager),
    contextlib.closing(parts.worker),
    Watchdog(config.guards.stall_s, lambda: any_process(stopping())) as watchdog,
    stoppable_compiles(watchdog),
  ):
    place = Place(folder, workdir is not None, logs, claimed)
    run = Run(config, parts, place, display, watchdog)
    learning = saved_if_interrupted(learn(run), run)
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


def learn(run: Run) -> Generator[Step, None, Result]:
  """Runs Algorithm 1 of the paper.

  Each step samples g completions of each prompt with their entropies and scores them
  (`Collector.collect`). It then shapes the rewards by entropy, normalises them to advantages and
  makes the gradient updates (`training.update`). `saved_if_interrupted` handles what ends it early.
  """
  state = run.set_up()
  run.evaluations.repair()
  run.evaluations.if_due(state)
  every = run.config.checkpoint.every
  for i in run.remaining_steps():
    step = i + 1
    batch = run.collect(state.params, i)  # prompts, completions, entropies, rewards
    state, metrics = run.update(state, batch)  # shaped rewards, advantages, gradients
    run.log(step, metrics, batch)
    if step % every == 0 and not run.guards.skipped:
      run.save(state)
    run.export_if_due(state)
    if evaluation := run.evaluations.if_due(state):
      run.display.say("  " + one_line(batch.first_completion(0)))
    yield Step(step, metrics | evaluation, batch, TrainedPolicy(run.worker, state.params))
  return run.finish()
