"""The warm start: makes a base model by supervised imitation of a task's imperfect teacher."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.config import Config
from gtpo_jax.models.params import Params
from gtpo_jax.reporting.display import Display
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import named_sharding
from gtpo_jax.sampling.host_arrays import pad_prompts
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.micro_batches import check_batch_divisible
from gtpo_jax.training.state import init_state, make_optimizer

UPDATES_PER_CALL = 50  # one call of the compiled program takes seconds, so a stop request is quick
UPDATES_PER_LINE = 250  # updates between progress lines if the output is not a terminal
CHECKED_PROBLEMS = 256  # per task; enough to contain prompts of nearly the longest length


def base_model(
  config: Config,
  worker: RolloutWorker,
  folder: epath.Path,
  display: Display,
  stopping: Callable[[], bool],
) -> Params | None:
  """Returns the parameters that RL starts from; None if `stopping` returned True.

  Parameters that are random or come from a warm start are saved in WORKDIR/base and read from
  there when the run resumes.
  """
  if config.model.path and not config.warm_start.steps:
    return initial_params(config, worker)
  checkpoints = Checkpoints(folder / "base", keep=1)
  params = checkpoints.newest_params(worker.model, display.say)
  if params is None:
    params = initial_params(config, worker)
    if config.warm_start.steps:
      params = warm_start(config, worker, params, display, stopping)
    if params is not None:
      checkpoints.save_params(params)
  checkpoints.close()
  return params


def warm_start(
  config: Config,
  worker: RolloutWorker,
  params: Params,
  display: Display,
  stopping: Callable[[], bool],
) -> Params | None:
  """Trains `params` by imitation with the settings of `config.warm_start`. `params` is donated.

  Returns:
    The trained parameters; None if `stopping` returned True before the last update.
  """
  section = config.warm_start
  started = time.perf_counter()
  optimizer = make_optimizer(section.optimizer, section.steps)
  state = init_state(params, optimizer, worker.model)
  imitate = make_imitation(worker.model, optimizer, config.batch.head_chunk)
  rng = np.random.default_rng([config.seed, 1])
  display.begin("warm start", section.steps)
  done = 0
  while done < section.steps and not stopping():
    count = min(UPDATES_PER_CALL, section.steps - done)
    state, losses = imitate(state, demonstrations(config, worker, rng, count))
    done += count
    loss = float(fetch(losses).mean())
    display.advance(
      done,
      [f"warm start {done} of {section.steps}: {loss:.3f} nats per token"],
      line=done % UPDATES_PER_LINE == 0,
    )
  display.end()
  if done < section.steps:
    return None
  seconds = time.perf_counter() - started
  display.say(
    f"base model: imitated an imperfect teacher for {section.steps} steps, {seconds:.1f} s"
  )
  return state.params


def check_prompts(config: Config, worker: RolloutWorker) -> None:
  """Checks, before anything is compiled, that a few hundred problems of each task fit the limits.

  Sources are not checked here: all their prompts are measured when they are read.

  Raises:
    UserError: a prompt exceeds data.max_prompt_tokens, a demonstration exceeds
      sampling.max_tokens, or warm_start.batch is not a multiple of the batch shards of the mesh.
  """
  rng = np.random.default_rng(0)
  for task in {config.train_task, config.eval_task} - {None}:
    ids = rng.choice(np.append(task.train_ids, task.held_out_ids), CHECKED_PROBLEMS)
    prompts = [worker.encode(task.problem(i)) for i in ids]
    pad_prompts(prompts, config.data.max_prompt_tokens, worker.chat.pad)
  if config.warm_start.steps:
    check_batch_divisible("warm_start.batch", config.warm_start.batch, 1, worker.model)
    demonstrations(config, worker, rng, -(-CHECKED_PROBLEMS // config.warm_start.batch))


def demonstrations(
  config: Config, worker: RolloutWorker, rng: np.random.Generator, count: int
) -> Demonstrations:
  """Returns the teacher's completions of random training problems for `count` updates.

  Raises:
    UserError: a demonstration exceeds sampling.max_tokens.
  """
  task = config.train_task
  b = config.warm_start.batch
  t = config.sampling.max_tokens
  ids = rng.choice(task.train_ids, count * b)
  questions = [worker.encode(task.problem(i)) for i in ids]
  prompts = pad_prompts(questions, config.data.max_prompt_tokens, worker.chat.pad)
  tokens = np.full((count * b, t), worker.chat.pad, np.int32)
  lengths = np.zeros(count * b, np.int32)
  for row, i in enumerate(ids):
    text = task.demonstration(i, rng, config.warm_start.slips)
    completion = worker.chat.encode_completion(text)
    length = len(completion)
    if length > t:
      raise UserError(
        f"the teacher's completion has {length} tokens, more than sampling.max_tokens = {t}; "
        "raise sampling.max_tokens"
      )
    tokens[row, :length] = completion
    lengths[row] = length
  flat = Demonstrations(prompts, tokens, np.arange(t) < lengths[:, None])
  sharding = named_sharding(worker.model.mesh, None, "batch")
  return jax.tree.map(lambda x: jax.device_put(x.reshape(count, b, *x.shape[1:]), sharding), flat)
