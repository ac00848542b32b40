"""Checks of a configuration across the fields of its sections. They read no file and no network.

Each raises UserError for the first values that are incompatible. Only if data.train lacks
demonstrations is it asked whether its files exist, because a missing one is the likelier mistake.
"""

from __future__ import annotations

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.config.data_sections import DataSection, EnvSection, RewardSection, WarmStartSection
from gtpo_jax.config.monitoring import EvalSection, LogSection
from gtpo_jax.config.sections import BatchSection, ModelSection, SamplingSection, TeacherSection
from gtpo_jax.data.readers import check_exists, is_source
from gtpo_jax.data.tasks import TASKS
from gtpo_jax.models.presets import PRESETS, TINY_MOE
from gtpo_jax.runtime.errors import UserError, did_you_mean


def check_model(model: ModelSection, sampling: SamplingSection) -> None:
  """The preset exists, and the formats of numbers go together."""
  preset = model.preset
  if preset not in PRESETS:
    raise UserError(
      f"unknown model.preset {preset!r}{did_you_mean(preset, PRESETS)}; "
      f"valid are {', '.join(PRESETS)}"
    )
  # Checks the formats. A model that is not known yet may have all that adapters can name.
  model.with_formats(TINY_MOE if model.path else PRESETS[preset], "float32")


def check_data(data: DataSection, evaluation: EvalSection) -> None:
  """The tasks and sources exist, and there is something to evaluate on."""
  for name in (*(name for name, _ in data.sources), *data.eval_names):
    if name not in TASKS and not is_source(name):
      raise UserError(
        f"unknown task {name!r} in data{did_you_mean(name, TASKS)}; "
        f"valid are {', '.join(TASKS)}, or a source: a .jsonl or .parquet file, hf:ID, tfds:NAME "
        "or rg:NAME"
      )
  if len(data.eval_names) > evaluation.problems:
    raise UserError(
      f"eval.problems = {evaluation.problems} is below the number of sources in data.eval, "
      f"{len(data.eval_names)}; raise it"
    )
  if "{prompt}" not in data.template:
    raise UserError(f"data.template must contain {{prompt}}, got {data.template!r}")
  _ = data.eval_task  # refuses a difficulty that its task does not have


def check_warm_start(warm_start: WarmStartSection, data: DataSection) -> None:
  """There are demonstrations to imitate."""
  if warm_start.data and not is_source(warm_start.data):
    raise UserError(
      f"warm_start.data must name a source (a .jsonl or .parquet file, hf:ID, tfds:NAME), "
      f"got {warm_start.data!r}"
    )
  if warm_start.steps and not warm_start.data and data.train_task is None:
    for name, _ in data.sources:
      check_exists(name)
    raise UserError(
      f"warm_start.steps = {warm_start.steps} needs demonstrations of data.train = "
      f"{data.train!r}: set warm_start.data to a file with the columns prompt and "
      "completion, or steps to 0 and model.path to a model"
    )
  _ = warm_start.columns


def check_env(
  env: EnvSection, data: DataSection, teacher: TeacherSection, algorithm: Algorithm
) -> None:
  """An environment goes with the other sections. A Python program may add it after these checks."""
  if not env.is_used:
    return
  name = (
    "env.make" if env.make else "env.tools" if env.tools else "env.mcp" if env.mcp else "env.agent"
  )
  if env.agent and name != "env.agent":
    raise UserError(f"env.agent has tools and environments of its own; leave {name} out")
  if env.agent and algorithm.recipe.turns:
    raise UserError(
      f"algorithm.turn_credit = {algorithm.recipe.turns.turn_credit!r} compares turns of an "
      "environment, and env.agent has only a reward for the episode; use env.make or env.tools"
    )
  if not data.chat:
    raise UserError(f"{name} needs the chat template, but data.chat is False; set it to True")
  if algorithm.settings.guide_completions:
    raise UserError(
      f"{name} does not work with algorithm {algorithm.name!r}, whose guide writes whole "
      "completions; use another algorithm"
    )
  if teacher.prompt:
    raise UserError(
      f"{name} does not work with teacher.prompt, because the environment may add to the prompt; "
      "leave teacher.prompt out"
    )


def check_sampling(sampling: SamplingSection, batch: BatchSection, algorithm: Algorithm) -> None:
  """The algorithm can learn from what is sampled."""
  if sampling.temperature == 0:
    raise UserError(
      "sampling.temperature must be above 0 while learning, got 0: "
      "greedy completions of a prompt are all the same"
    )
  settings = algorithm.settings
  if sampling.weights_dtype and not settings.tis_cap:
    raise UserError(
      f"sampling.weights_dtype = {sampling.weights_dtype!r} samples from another policy "
      "than the trained one, which must be corrected for: set algorithm.tis_cap, such as 2"
    )
  if settings.overlong_buffer >= sampling.max_tokens:
    raise UserError(
      f"algorithm.overlong_buffer must be below sampling.max_tokens = "
      f"{sampling.max_tokens}, got {settings.overlong_buffer}"
    )
  if batch.group - (settings.guide_completions or 0) < 2:
    raise UserError(
      f"algorithm.guide_completions must leave at least two of batch.group = {batch.group} "
      f"to the policy itself, got {settings.guide_completions}"
    )
  if settings.pass_k and settings.pass_k >= batch.group:
    raise UserError(
      f"algorithm.pass_k must be below batch.group = {batch.group}, because the whole group has "
      f"none to be compared with, got {settings.pass_k}"
    )


def check_continuations(
  algorithm: Algorithm,
  env: EnvSection,
  sampling: SamplingSection,
  reward: RewardSection,
  log: LogSection,
) -> None:
  """Prefixes can be continued, and the reward of a continuation does not depend on others."""
  learns = algorithm.recipe.continuations
  if not (learns or log.continuations):
    return
  who = f"algorithm {algorithm.name!r}" if learns else f"log.continuations = {log.continuations}"
  name = f"{who} continues completions, which"
  if env.is_used:
    raise UserError(
      f"{name} does not work with episodes, because an environment cannot be made again in the "
      "middle of one; leave it out"
    )
  if learns and sampling.staleness:
    raise UserError(
      f"{name} does not work with sampling.staleness = {sampling.staleness}, because several "
      "policies drew a completion; set sampling.staleness to 0"
    )
  if algorithm.settings.length_penalty == "group_relative":
    raise UserError(
      f"{name} does not work with algorithm.length_penalty = 'group_relative', because it compares "
      "the lengths of a group; use 'overlong'"
    )
  if reward.judge.opponents:
    raise UserError(
      f"{name} does not work with reward.judge.opponents = {reward.judge.opponents}, because the "
      "judge compares completions of a group; set reward.judge.opponents to 0"
    )


def check_reward(reward: RewardSection, batch: BatchSection, algorithm: Algorithm) -> None:
  """The parts do not cancel, and a group has the opponents of a comparison."""
  weights = {name: weight for name, weight in reward.weighted if weight}
  # Without other numbers than right and wrong, both parts are the same.
  same = not reward.replaces_verifiers and algorithm.recipe.rewards == (0.0, 1.0)
  if not weights or (
    same and weights.keys() == {"correct", "verifier"} and not sum(weights.values())
  ):
    raise UserError(
      f"reward.parts = {reward.parts!r} gives every completion the reward 0; change the weights"
    )
  if reward.judge.opponents >= batch.group:
    raise UserError(
      f"reward.judge.opponents must be below batch.group = {batch.group}, got "
      f"{reward.judge.opponents}"
    )


def check_teacher(teacher: TeacherSection, algorithm: Algorithm) -> None:
  """There is a teacher if something needs it, and only one."""
  if teacher.prompt and "{prompt}" not in teacher.prompt:
    raise UserError(f"teacher.prompt must contain {{prompt}}, got {teacher.prompt!r}")
  if teacher.path and teacher.policy:
    raise UserError(
      f"teacher.path = {teacher.path!r} and teacher.policy = {teacher.policy!r} are two "
      "teachers; leave one of them out"
    )
  if teacher.policy == "current" and not teacher.prompt:
    raise UserError(
      "teacher.policy = 'current' is the policy itself unless it reads something else: set "
      "teacher.prompt"
    )
  if algorithm.recipe.distillation and not teacher.exists:
    raise UserError(
      f"algorithm {algorithm.name!r} learns from a teacher: set teacher.path to the workdir "
      "of a run, a Hugging Face folder or a hub id"
    )
