"""The warm start: makes a base model by supervised imitation.

It imitates a task's imperfect teacher, or demonstrations of the user's own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from etils import epath

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.opening import frozen_params
from gtpo_jax.config import Config
from gtpo_jax.data.demonstration_rows import TURNS, load_demonstrations
from gtpo_jax.data.records import Problem
from gtpo_jax.data.sources import Loaded
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.logs.display import Display
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.demonstrations import Demonstration, play
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.problems import NO_RECORDS
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import named_sharding
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.state import init_state, make_optimizer

UPDATES_PER_CALL = 50  # one call of the compiled program takes seconds, so a stop request is quick
UPDATES_PER_LINE = 250  # updates between progress lines if the output is not a terminal
PLAYED = 4096  # demonstrations of several turns
CHECKED_PROBLEMS = 256  # per task; enough to contain prompts of nearly the longest length


class Teacher(Protocol):
  """The source of a warm start's demonstrations."""

  name: str  # a name for messages

  def draw(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """Returns `count` random demonstrations."""


class TaskTeacher:
  """The imperfect teacher of a task."""

  name = "an imperfect teacher"

  def __init__(self, config: Config, worker: RolloutWorker):
    self._task = config.data.train_task
    self._slips = config.warm_start.slips
    self._worker = worker

  def draw(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """See `Teacher`."""
    task = self._task
    encode = self._worker.chat.encode_completion
    ids = rng.choice(task.train_ids, count)
    return [
      _one_turn(
        self._worker.encode(task.problem(i)), encode(task.demonstration(i, rng, self._slips))
      )
      for i in ids
    ]


class TurnTeacher:
  """The imperfect teacher of a task with several turns; the task's environment answers them."""

  name = "an imperfect teacher"

  def __init__(self, config: Config, worker: RolloutWorker):
    task = config.data.train_task
    if worker.episodes is None:
      raise UserError(f"the task {task.name!r} has several turns: set {task.needs}")
    if config.env.agent:
      raise UserError(
        f"an agent cannot play demonstrations of {task.name!r}; set warm_start.steps to 0 and "
        f"model.path to the export of a run with {task.needs}"
      )
    rng = np.random.default_rng([config.seed, 2])
    ids = rng.choice(task.train_ids, PLAYED)
    rngs = rng.spawn(PLAYED)  # a demonstration must not depend on the order of turns
    player = lambda i, turns: task.turn(ids[i], turns, rngs[i], config.warm_start.slips)
    problems = [task.problem(i) for i in ids]
    self._played = play(worker, problems, player, config.sampling.max_tokens)

  def draw(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """See `Teacher`."""
    return [self._played[i] for i in rng.integers(len(self._played), size=count)]


class OwnTeacher:
  """Demonstrations of the user's own."""

  def __init__(self, config: Config, worker: RolloutWorker, loaded: Loaded):
    source = config.warm_start.data
    pairs = [_own(worker, problem) for problem in loaded.problems]
    p = config.data.max_prompt_tokens
    t = config.sampling.max_tokens
    fits = [len(pair.prompt) <= p and len(pair.completion) <= t for pair in pairs]
    long = len(pairs) - sum(fits)
    if long + len(loaded.bad) > config.data.bad_rows or long == len(pairs):
      longest = Demonstration(*(max(map(len, column)) for column in zip(*pairs, strict=True)))
      raise UserError(
        f"{source!r}: {long} of {len(pairs)} demonstrations are too long, the first is "
        f"{loaded.problems[fits.index(False)].id}; the longest prompt has {longest.prompt} tokens "
        f"(data.max_prompt_tokens = {p}), the longest completion {longest.completion} "
        f"(sampling.max_tokens = {t}); raise these, or data.bad_rows to leave them out"
      )
    self._pairs = list(itertools.compress(pairs, fits))
    self.name = f"{len(self._pairs)} demonstrations of {source}"

  def draw(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """See `Teacher`."""
    return [self._pairs[i] for i in rng.integers(len(self._pairs), size=count)]


def _one_turn(prompt: list[int], completion: list[int]) -> Demonstration:
  return Demonstration(prompt, completion, [True] * len(completion))


def _own(worker: RolloutWorker, problem: Problem) -> Demonstration:
  """Returns a demonstration of the user's own; of several turns, only these are imitated."""
  prompt = worker.encode(problem)
  if TURNS not in problem.extra:
    return _one_turn(prompt, worker.chat.encode_completion(problem.answer))
  is_turn = lambda message: message["role"] == "assistant"
  messages = problem.extra[TURNS]
  answers = [message["role"] for message in messages if not is_turn(message)]
  turn_tokens = TurnTokens(worker.chat, sorted(set(answers)))
  completion: list[int] = []
  drawn: list[bool] = []
  for of_model, group in itertools.groupby(messages, is_turn):
    part = list(group)
    ids = turn_tokens.turn(part[0]) if of_model else turn_tokens.observation(part, ended=True)
    completion += ids
    drawn += [of_model] * len(ids)
  return Demonstration(prompt, completion, drawn)


def make_teacher(
  config: Config,
  worker: RolloutWorker,
  say: Callable[[str], None],
  records: Mapping[str, Loaded] = NO_RECORDS,
) -> Teacher | None:
  """Returns the teacher that the warm start of a run imitates; None if it has no warm start.

  Args:
    config: the run's config.
    worker: encodes prompts and completions.
    say: receives a line on the demonstrations.
    records: by name, the rows that a Python program passed.

  Raises:
    UserError: the demonstrations cannot be read, or too many of them are malformed or too long.
  """
  section = config.warm_start
  if not section.steps:
    return None
  if not section.data:
    task = config.data.train_task
    return (TurnTeacher if hasattr(task, "turn") else TaskTeacher)(config, worker)
  loaded = records.get(section.data) or load_demonstrations(
    section.data, section.columns, config.data.bad_rows
  )
  teacher = OwnTeacher(config, worker, loaded)
  say(loaded.summary(section.data).replace(" problems ", " demonstrations "))
  return teacher


def base_model(
  config: Config,
  worker: RolloutWorker,
  folder: epath.Path,
  display: Display,
  stopping: Callable[[], bool],
  teacher: Teacher | None = None,
) -> Params | None:
  """Returns the parameters that RL starts from; None if `stopping` returned True.

  Parameters that are random or come from a warm start are saved in WORKDIR/base and read from
  there when the run resumes; of adapters on a model of `model.path`, only the adapters.
  `teacher` is the warm start's, None for `make_teacher`.
  """
  if config.model.path and not config.warm_start.steps:
    return initial_params(config, worker)
  checkpoints = Checkpoints(folder / "base", keep=1)
  frozen = lambda: frozen_params(folder, worker.model, config.model.path)
  params = checkpoints.newest_params(worker.model, display.say, frozen)
  if params is None:
    params = initial_params(config, worker)
    if config.warm_start.steps:
      teacher = teacher or make_teacher(config, worker, display.say)
      params = warm_start(config, worker, params, display, stopping, teacher)
    if params is not None:
      checkpoints.save_params(params, with_base=not config.model.path, model=worker.model)
  checkpoints.close()
  return params


def warm_start(
  config: Config,
  worker: RolloutWorker,
  params: Params,
  display: Display,
  stopping: Callable[[], bool],
  teacher: Teacher,
) -> Params | None:
  """Trains `params` by imitation with the settings of `config.warm_start`. `params` is donated.

  Returns:
    The trained parameters; None if `stopping` returned True before the last update.
  """
  section = config.warm_start
  started = time.perf_counter()
  optimizer = make_optimizer(section.optimizer, section.steps, model=worker.model)
  state = init_state(params, optimizer, worker.model)
  imitate = make_imitation(worker.model, optimizer, config.batch.head_chunk)
  rng = np.random.default_rng([config.seed, 1])
  display.begin("warm start", section.steps)
  done = 0
  while done < section.steps and not stopping():
    count = min(UPDATES_PER_CALL, section.steps - done)
    state, losses = imitate(state, demonstrations(config, worker, teacher, rng, count))
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
  display.say(f"base model: imitated {teacher.name} for {section.steps} steps, {seconds:.1f} s")
  return state.params


def check_prompts(config: Config, worker: RolloutWorker, teacher: Teacher | None) -> None:
  """Checks, before anything is compiled, that a few hundred problems of each task fit the limits.

  Sources are not checked here: all their prompts are measured when they are read.
  """
  rng = np.random.default_rng(0)
  for task in {config.data.train_task, config.data.eval_task} - {None}:
    ids = rng.choice(np.append(task.train_ids, task.held_out_ids), CHECKED_PROBLEMS)
    prompts = [worker.encode(task.problem(i)) for i in ids]
    pad_prompts(prompts, config.data.max_prompt_tokens, worker.chat.pad)
  if teacher:
    count = -(-CHECKED_PROBLEMS // config.warm_start.batch)
    demonstrations(config, worker, teacher, rng, count)


def demonstrations(
  config: Config, worker: RolloutWorker, teacher: Teacher, rng: np.random.Generator, count: int
) -> Demonstrations:
  """Returns random demonstrations for `count` updates."""
  b = config.warm_start.batch
  t = config.sampling.max_tokens
  pairs = teacher.draw(rng, count * b)
  questions = [pair.prompt for pair in pairs]
  prompts = pad_prompts(questions, config.data.max_prompt_tokens, worker.chat.pad)
  tokens = np.full((count * b, t), worker.chat.pad, np.int32)
  mask = np.zeros((count * b, t), bool)
  for row, (_, completion, drawn) in enumerate(pairs):
    length = len(completion)
    if length > t:
      raise UserError(
        f"the teacher's completion has {length} tokens, more than sampling.max_tokens = {t}; "
        "raise sampling.max_tokens"
      )
    tokens[row, :length] = completion
    mask[row, :length] = drawn
  flat = Demonstrations(prompts, tokens, mask)
  sharding = named_sharding(worker.model.mesh, None, "batch")
  return jax.tree.map(lambda x: jax.device_put(x.reshape(count, b, *x.shape[1:]), sharding), flat)
