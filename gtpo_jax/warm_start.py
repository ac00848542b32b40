"""The warm start: a base model made by imitating a task's imperfect teacher."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.reporting.display import Display
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import named_sharding
from gtpo_jax.sampling.engine import pad_prompts
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.micro_batches import check_divides
from gtpo_jax.training.state import init_state, make_optimizer

CHUNK = 50  # updates a compiled call


def warm_start(
  config: Config,
  worker: RolloutWorker,
  params: Params,
  display: Display,
  stopping: Callable[[], bool],
) -> Params | None:
  """Parameters after imitation of `config.warm_start`; None where asked to stop."""
  section = config.warm_start
  began = time.perf_counter()
  optimizer = make_optimizer(section.optimizer, section.steps)
  state = init_state(params, optimizer, worker.model)
  imitate = make_imitation(worker.model, optimizer, config.batch.head_chunk)
  rng = np.random.default_rng([config.seed, 1])
  display.begin("warm start", section.steps)
  done = 0
  while done < section.steps and not stopping():
    count = min(CHUNK, section.steps - done)
    state, losses = imitate(state, demonstrations(config, worker, rng, count))
    done += count
    display.advance(
      done,
      [f"warm start {done} of {section.steps}: {float(fetch(losses).mean()):.3f} nats a token"],
      line=done % 250 == 0,
    )
  display.end()
  if done < section.steps:
    return None
  display.say(
    f"base model: {section.steps} steps of imitating a teacher that errs, {time.perf_counter() - began:.1f} s"
  )
  return state.params


def check_prompts(config: Config, worker: RolloutWorker) -> None:
  """Encodes a few hundred problems of each task, so that limits too short for them are refused before anything is compiled.

  (Of a source every prompt is measured when it is read.)

  Raises:
    UserError: a prompt is over data.max_prompt_tokens, a demonstration over sampling.max_tokens, or warm_start.batch does not
      divide over the mesh.
  """
  rng = np.random.default_rng(0)
  for task in {config.train_task, config.eval_task} - {None}:
    problems = [
      task.problem(i) for i in rng.choice(np.append(task.train_ids, task.held_out_ids), 256)
    ]
    pad_prompts(
      [worker.encode(problem) for problem in problems],
      config.data.max_prompt_tokens,
      worker.chat.pad,
    )
  if config.warm_start.steps:
    check_divides("warm_start.batch", config.warm_start.batch, 1, worker.model)
    demonstrations(config, worker, rng, -(-256 // config.warm_start.batch))


def demonstrations(
  config: Config, worker: RolloutWorker, rng: np.random.Generator, count: int
) -> Demonstrations:
  """The teacher's writing for `count` updates, from training problems, on the mesh.

  Raises:
    UserError: a demonstration does not fit sampling.max_tokens.
  """
  task = config.train_task
  b = config.warm_start.batch
  t = config.sampling.max_tokens
  indices = rng.choice(task.train_ids, count * b)
  questions = [worker.encode(task.problem(i)) for i in indices]
  prompts = pad_prompts(questions, config.data.max_prompt_tokens, worker.chat.pad)
  tokens = np.full((count * b, t), worker.chat.pad, np.int32)
  lengths = np.zeros(count * b, np.int32)
  for row, i in enumerate(indices):
    ids = worker.chat.encode_completion(task.demonstration(i, rng, config.warm_start.slips))
    if len(ids) > t:
      raise UserError(
        f"the teacher writes {len(ids)} tokens, over sampling.max_tokens = {t}; raise it"
      )
    tokens[row, : len(ids)] = ids
    lengths[row] = len(ids)
  flat = Demonstrations(prompts, tokens, np.arange(t) < lengths[:, None])
  sharding = named_sharding(worker.model.mesh, None, "batch")
  return jax.tree.map(lambda x: jax.device_put(x.reshape(count, b, *x.shape[1:]), sharding), flat)
