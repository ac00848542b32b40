"""What every field of a config is for, read from the declarations, for terminal and site.

And what settings of TRL, verl and Tunix are called here, as in docs/from_trl.md and from_verl.md.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gtpo_jax.algorithms import OBJECTIVES, RECIPES, declarations
from gtpo_jax.config.run_config import Config
from gtpo_jax.config.sections import AlgorithmSection
from gtpo_jax.runtime.fields import FLAG

# Our setting, or a sentence, and the names that it has elsewhere: the last part of a dotted name.
_ELSEWHERE: Mapping[str, str] = {
  "algorithm.dual_clip": "clip_ratio_c delta",
  "algorithm.dynamic_sampling": "filter_groups",
  "algorithm.eps_high": "clip_ratio_high epsilon_high",
  "algorithm.eps_low": "clip_ratio clip_ratio_low cliprange epsilon",
  "algorithm.forking_share": "top_entropy_quantile",
  "algorithm.kl_estimator": "kl_loss_type use_bias_correction_kl",
  "algorithm.kl_weight": "beta kl_coef kl_loss_coef",
  "algorithm.loss_aggregation": "loss_agg_mode loss_type",
  "algorithm.name": "adv_estimator advantage_estimator",
  "algorithm.objective": "loss_mode policy_loss",
  "algorithm.overlong_buffer": "len",
  "algorithm.overlong_filter": "mask_truncated_completions",
  "algorithm.ratio": "importance_sampling_level",
  "algorithm.tis_cap": "vllm_importance_sampling_correction rollout_is_threshold",
  "batch.epochs": "num_iterations ppo_epochs",
  "batch.group": "n num_generations rollout_n",
  "batch.minibatches": "ppo_mini_batch_size steps_per_generation",
  "checkpoint.every": "save_freq save_steps",
  "checkpoint.keep": "save_total_limit",
  "checkpoint.best": "load_best_model_at_end",
  "data.eval": "eval_dataset val_files",
  "data.max_prompt_tokens": "max_prompt_length",
  "data.train": "dataset_name train_dataset train_files",
  "eval.every": "eval_steps eval_strategy test_freq",
  "log.samples": "log_completions num_completions_to_print",
  "mesh.tensor": "tensor_model_parallel_size",
  "model.compute_dtype": "bf16 fp16 torch_dtype",
  "model.lora_rank": "lora_r peft_config",
  "model.lora_targets": "lora_target_modules target_modules",
  "model.path": "model_name model_name_or_path",
  "model.remat": "enable_gradient_checkpointing gradient_checkpointing",
  "optimizer.b1": "adam_beta1",
  "optimizer.b2": "adam_beta2",
  "optimizer.name": "optim optimizer_type",
  "optimizer.clip_norm": "grad_clip max_grad_norm",
  "optimizer.learning_rate": "lr",
  "optimizer.schedule": "lr_scheduler_type",
  "optimizer.warmup_steps": "lr_warmup_steps warmup_ratio",
  "optimizer.offload": "optimizer_offload",
  "batch.pack": "use_remove_padding",
  "algorithm.entropy_coef": "entropy_coeff",
  "checkpoint.export_every": "save_contents",
  "teacher.path": "teacher_model_name_or_path",
  "reference.path": "ref_model",
  "reward.parts": "reward_weights",
  "reward.verifier": "custom_reward_function reward_funcs",
  "sampling.max_tokens": (
    "max_completion_length max_new_tokens max_response_length max_tokens_to_generate"
  ),
  "steps": "max_steps total_training_steps",
  "batch.prompts, which counts the prompts of a step on all devices together": (
    "batch_size per_device_train_batch_size train_batch_size"
  ),
  "batch.prompts (larger) and batch.micro_batches (parts that fit into memory)": (
    "gradient_accumulation_steps ppo_micro_batch_size ppo_micro_batch_size_per_gpu"
  ),
  "steps: a run counts updates, not passes over the data": "num_train_epochs total_epochs",
  "log.tensorboard, log.wandb and log.trackio": "logger logging_steps report_to",
  "the command line's --workdir": "default_local_dir experiment_name output_dir run_name",
  "gtpo export --workdir=DIR --push=OWNER/NAME": "hub_model_id push_to_hub",
  "the same command again": "resume_from_checkpoint resume_mode",
  "nothing: the sampler is part of the program": "use_vllm vllm_mode gpu_memory_utilization",
}
FOREIGN_NAMES = {name: ours for ours, names in _ELSEWHERE.items() for name in names.split()}


class FieldDescription(NamedTuple):
  """A field of the config."""

  name: str  # its dotted name
  kind: str  # the name of its type
  # its default; for a setting of an algorithm, the published value of `gtpo`, or None if `gtpo`
  # does not read it
  default: Any
  # the bound of its values, such as "at least 0 and finite"; empty if its type says all
  values: str
  meaning: str  # what it does


def describe(section: Any = None, prefix: str = "") -> Iterator[FieldDescription]:
  """Yields every field of a section of the config and of the sections in it; None for all."""
  section = Config() if section is None else section
  meanings = _meanings(type(section))
  declared = declarations() if prefix == "algorithm." else {}
  hints = typing.get_type_hints(type(section))
  published = RECIPES[Config().algorithm.name].settings if prefix == "algorithm." else {}
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    name = f"{prefix}{field.name}"
    if dataclasses.is_dataclass(value):
      yield from describe(value, f"{name}.")
      continue
    hint = hints[field.name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    default = published.get(field.name) if value is None else value
    values = _values(declared.get(field.name, {type(section): field}))
    yield FieldDescription(name, kind, default, values, meanings[field.name])


def settings_of_recipes() -> dict[str, dict[str, Any]]:
  """Returns what distinguishes the settings of the recipes, by name.

  The entry "" has the settings that every recipe reads, with the defaults of `gtpo_v1`. The entry
  of a recipe has its further settings, and those with other defaults.
  """
  common = set.intersection(*(set(recipe.settings) for recipe in RECIPES.values()))
  defaults = {key: value for key, value in RECIPES["gtpo_v1"].settings.items() if key in common}
  differing = lambda settings: {
    key: value for key, value in settings.items() if key not in common or defaults[key] != value
  }
  return {"": defaults} | {name: differing(recipe.settings) for name, recipe in RECIPES.items()}


def _meanings(cls: type) -> dict[str, str]:
  """Returns the meaning of each field of a section."""
  meanings: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    _, mark, text = (base.__doc__ or "").partition("Attributes:\n")
    text = textwrap.dedent(text.split("\n\n")[0])  # without a section that follows
    for entry in re.split(r"\n(?=\S)", text) if mark else []:
      names, _, meaning = entry.partition(": ")
      meanings |= dict.fromkeys(names.split(", "), _sentence(" ".join(meaning.split())))
  if issubclass(cls, AlgorithmSection):
    meanings |= {name: _setting(parts) for name, parts in declarations().items()}
  return meanings


def _values(parts: dict[type, dataclasses.Field]) -> str:
  """Returns the bound of a field that some classes declare; empty for none and for flags."""
  bounds = [field.metadata.get("bound") for field in parts.values()]
  return " or ".join(dict.fromkeys(x.description for x in bounds if x and x is not FLAG))


def _setting(parts: dict[type, dataclasses.Field]) -> str:
  """Returns the meanings of a setting; several objectives may give it different ones."""
  objectives: dict[str, list[str]] = {}
  for part, field in parts.items():
    name = next((name for name, cls in OBJECTIVES.items() if cls is part), "")
    objectives.setdefault(field.metadata["meaning"], []).append(f"`{name}`")
  if len(objectives) == 1:
    return _sentence(next(iter(objectives)))
  return " ".join(f"{', '.join(names)}: {meaning}" for meaning, names in objectives.items())


def _sentence(text: str) -> str:
  return text[:1].upper() + text[1:]


def foreign_name(key: str) -> str:
  """Returns what a setting of another library is called here; "" if there is no such name."""
  ours = FOREIGN_NAMES.get(key.rpartition(".")[2].lower())
  return f", which other libraries have; here it is {ours}" if ours else ""
