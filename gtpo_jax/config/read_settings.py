"""Which settings a run reads: one that differs from its default and that nothing reads is refused.

Every setting is in `ALWAYS` or in one of the tables of conditions, except those of the algorithms.
An algorithm refuses settings that its recipe does not have (`algorithms.make`), and the parts of a
recipe have conditions of their own (`Checked.read_if`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gtpo_jax.config.data_sections import PYTHON_TOOL
from gtpo_jax.config.run_config import Config
from gtpo_jax.data.tasks import TASKS, Forks
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.fields import Condition, refuse_unread

_ALWAYS = """
seed steps
model.preset model.path model.param_dtype model.compute_dtype model.matmul_precision model.remat
model.attention model.lora_rank
mesh.data mesh.expert mesh.fsdp mesh.context mesh.tensor
data.train data.eval data.system data.template data.chat data.difficulty data.max_prompt_tokens
batch.prompts batch.group batch.minibatches batch.epochs batch.micro_batches batch.head_chunk
batch.pack
sampling.temperature sampling.top_k sampling.top_p sampling.min_p sampling.repetition_penalty
sampling.slots sampling.chunk sampling.kv_dtype sampling.attention sampling.batch_invariant
sampling.max_tokens sampling.stop sampling.staleness sampling.warm_up
reward.parts reward.verifier reward.judge.model
env.make env.tools env.mcp env.agent
algorithm.name
teacher.path teacher.policy
optimizer.learning_rate optimizer.schedule optimizer.warmup_steps optimizer.b1 optimizer.b2
optimizer.eps optimizer.weight_decay optimizer.clip_norm optimizer.momentum_dtype optimizer.offload
warm_start.steps
eval.every eval.problems eval.samples eval.batch eval.temperature
checkpoint.every checkpoint.keep checkpoint.export_every checkpoint.best checkpoint.accept_changes
guards.skipped guards.stall_s
log.tensorboard log.wandb log.trackio log.samples log.credit_every
profile.steps
"""
ALWAYS = frozenset(_ALWAYS.split())


def _when(needed: str, holds: Callable[[Any], Any], names: str) -> dict[str, Condition]:
  return dict.fromkeys(names.split(), Condition(needed, holds))


def _names(c: Config) -> list[str]:
  """Returns the tasks and sources to train and to evaluate on."""
  return [*(name for name, _ in c.data.sources), *c.data.eval_names]


def _verifies(c: Config) -> bool:
  """Whether the verifiers of problem kinds score completions."""
  return not c.reward.replaces_verifiers


def _runs_programs(c: Config) -> bool:
  return _verifies(c) or PYTHON_TOOL in c.env.tool_names


# What a Python program passes beside the config cannot make these be read.
READ_IF: Mapping[str, Condition] = {
  **_when("an empty model.path", lambda c: not c.model.path, "model.random_weights"),
  **_when(
    "model.lora_rank above 0",
    lambda c: c.model.lora_rank,
    "model.lora_alpha model.lora_targets model.base_layout",
  ),
  **_when(
    "adapters (model.lora_rank above 0), because quantised matrices are not trained",
    lambda c: c.model.lora_rank,
    "model.quantize",
  ),
  **_when(
    "adapters on a base that is not quantised, because merging would undo that",
    lambda c: c.model.lora_rank and not c.model.quantize,
    "sampling.merge_adapters",
  ),
  **_when(
    "all weights trained (model.lora_rank = 0), because Muon orthogonalises the update of a whole "
    "matrix, which a product of two adapters does not have",
    lambda c: not c.model.lora_rank,
    "optimizer.name",
  ),
  **_when("data.chat = True", lambda c: c.data.chat, "data.chat_template_kwargs data.date"),
  **_when(
    "a task in data.train or data.eval",
    lambda c: any(name in TASKS for name in _names(c)),
    "data.terms data.largest",
  ),
  **_when(
    "data.train = 'forks' or 'forks_confident'",
    lambda c: any(issubclass(TASKS.get(name, object), Forks) for name in _names(c)),
    "data.filler",
  ),
  **_when(
    "dynamic sampling (algorithm.dynamic_sampling = True, or algorithm.name = 'dapo')",
    lambda c: c.resolved_algorithm.recipe.selection.dynamic_sampling,
    "batch.max_gen_batches",
  ),
  **_when(
    "keys and values in pages, which sampling.attention = 'xla' does not have",
    lambda c: c.sampling.attention != "xla",
    "sampling.page_size sampling.cache_fraction",
  ),
  **_when(
    "an empty model.quantize, because the base is quantised already",
    lambda c: not c.model.quantize,
    "sampling.weights_dtype",
  ),
  **_when(
    "the verifiers of the problems' kinds, which reward.verifier or reward.judge.decides replaces",
    _verifies,
    "reward.math_rule reward.instructions reward.gym_answer reward.timeout_s",
  ),
  **_when(
    "the verifiers of the problems' kinds, or env.tools = 'python'",
    _runs_programs,
    "reward.code_timeout_s reward.code_memory_mb reward.unsandboxed",
  ),
  **_when(
    "reward.judge.decides, or the part judge in reward.parts",
    lambda c: c.reward.judge.decides or "judge" in dict(c.reward.weighted),
    "reward.judge.base_url",
  ),
  **_when(
    "reward.judge.base_url",
    lambda c: c.reward.judge.base_url,
    """reward.judge.decides reward.judge.template reward.judge.pattern reward.judge.scale
    reward.judge.max_tokens reward.judge.temperature reward.judge.request reward.judge.concurrency
    reward.judge.timeout_s reward.judge.completion_timeout_s reward.judge.retries""",
  ),
  **_when(
    "reward.judge.base_url and {question} in reward.judge.template",
    lambda c: c.reward.judge.base_url and "{question}" in c.reward.judge.template,
    "reward.judge.questions",
  ),
  **_when(
    "reward.judge.base_url and reward.judge.decides = True",
    lambda c: c.reward.judge_decides,
    "reward.judge.opponents reward.judge.threshold",
  ),
  **_when(
    "a guide, which algorithm.name = 'dapo_mixed' has",
    lambda c: c.resolved_algorithm.settings.guide_completions,
    "guide.path",
  ),
  **_when(
    "algorithm.kl_weight above 0",
    lambda c: c.resolved_algorithm.settings.kl_weight,
    "reference.path",
  ),
  **_when(
    "a teacher (teacher.path or teacher.policy)",
    lambda c: c.teacher.exists,
    "teacher.prompt distill.coef distill.credit distill.divergence distill.beta distill.top_k",
  ),
  **_when("teacher.prompt", lambda c: c.teacher.prompt, "teacher.max_prompt_tokens"),
  **_when(
    "warm_start.steps above 0",
    lambda c: c.warm_start.steps,
    """warm_start.data warm_start.batch warm_start.optimizer.learning_rate
    warm_start.optimizer.schedule warm_start.optimizer.warmup_steps warm_start.optimizer.b1
    warm_start.optimizer.b2 warm_start.optimizer.eps warm_start.optimizer.weight_decay
    warm_start.optimizer.clip_norm warm_start.optimizer.momentum_dtype
    warm_start.optimizer.offload""",
  ),
  **_when(
    "warm_start.steps above 0 and all weights trained (model.lora_rank = 0)",
    lambda c: c.warm_start.steps and not c.model.lora_rank,
    "warm_start.optimizer.name",
  ),
  **_when(
    "warm_start.steps above 0 and an empty warm_start.data",
    lambda c: c.warm_start.steps and not c.warm_start.data,
    "warm_start.slips",
  ),
  **_when("eval.temperature above 0", lambda c: c.eval.temperature, "eval.top_p"),
  **_when(
    "log.credit_every above 0", lambda c: c.log.credit_every, "log.credit_groups log.continuations"
  ),
}
# What a Python program passes (data, a reward function, an environment) can make these be read.
READ_IF_WITH_INPUTS: Mapping[str, Condition] = {
  **_when(
    "a source in data.train or data.eval",
    lambda c: any(name not in TASKS for name in _names(c)),
    "data.fields",
  ),
  **_when(
    "a source in data.train, data.eval or warm_start.data",
    lambda c: c.warm_start.data or any(name not in TASKS for name in _names(c)),
    "data.bad_rows",
  ),
  **_when(
    "reward.verifier, or a function in reward.parts",
    lambda c: c.reward.reads_columns,
    "reward.function_timeout_s",
  ),
  **_when(
    "env.make, env.tools, env.mcp or env.agent",
    lambda c: c.env.is_used,
    """env.parser env.max_turns env.max_calls env.step_timeout_s env.episode_timeout_s env.workers
    env.on_timeout""",
  ),
  **_when(
    "env.make, env.tools or env.mcp",
    lambda c: c.env.make or c.env.tool_names or c.env.mcp_servers,
    "env.role env.parallel_calls env.max_observation_tokens env.truncate env.parse_retries",
  ),
  **_when("env.agent", lambda c: c.env.agent, "env.max_conversations"),
  **_when("warm_start.data", lambda c: c.warm_start.data, "warm_start.fields"),
}
ROUTER = ("model.router_replay", "model.router_balance")


def check_settings(config: Config, complete: bool = True) -> None:
  """Refuses settings that nothing reads.

  Args:
    config: the config of a run.
    complete: whether it names all inputs. If not, a Python program may pass some of them later.

  Raises:
    UnreadError: a setting differs from its default and has no effect.
  """
  refuse_unread(config, {**READ_IF, **READ_IF_WITH_INPUTS} if complete else READ_IF)
  if not config.model.path:
    check_router(config, PRESETS[config.model.preset])


def check_router(config: Config, architecture: ModelConfig) -> None:
  """Refuses settings of a mixture of experts for a model that is none."""
  has_experts = Condition("a mixture of experts", lambda _: architecture.mixture)
  refuse_unread(config, dict.fromkeys(ROUTER, has_experts))
