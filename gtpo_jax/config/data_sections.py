"""The sections of a configuration on problems, their environments and their scores."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from typing import ClassVar

from gtpo_jax.data.chat_template import CLOCK, Variables, check_variables
from gtpo_jax.data.tasks import FILLER, TASKS, Task, make_task
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.parsers import PARSERS
from gtpo_jax.rewards.judge.judge_settings import JudgeSettings
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import (
  ABOVE_0,
  AT_LEAST_0,
  FINITE,
  Checked,
  at_least,
  find_problem,
  number,
  one_of,
  setting,
)
from gtpo_jax.runtime.files import unique_keys
from gtpo_jax.training.state import OptimizerConfig

MATH_RULES = ("math", "dapo")
INSTRUCTION_MODES = ("strict", "loose")
GYM_ANSWERS = ("auto", "tag", "boxed", "line")
AUTO_PARSER = "auto"
PYTHON_TOOL = "python"  # the name of the built-in tool
TIMEOUT = number(lambda x: 0 < x <= 86_400, "above 0 and at most 86400 (a day)")
UNIFORM = "uniform"
DIFFICULTIES = (UNIFORM, "explore", "low", "high")
NO_JUDGE = JudgeSettings()
IMITATION_OPTIMIZER = OptimizerConfig(
  learning_rate=1.5e-3, schedule="cosine", warmup_steps=50, b2=0.99
)


def _names(text: str) -> list[str]:
  """Splits a text at the commas outside double quotes."""
  return [part.strip() for part in re.split(r',(?=(?:[^"]*"[^"]*")*[^"]*$)', text)]


def _unquoted(name: str) -> str:
  return name[1:-1] if len(name) > 1 and name[0] == name[-1] == '"' else name


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is no value of JSON")


@dataclasses.dataclass(frozen=True)
class DataSection:
  """What to train and evaluate on, and how a problem becomes a prompt.

  Attributes:
    train: a task ("sums", "countdown", "forks", "forks_confident", "sentences", "constraints") or a
      source: a .jsonl or .parquet file or a folder of them, hf:ID, tfds:NAME, rg:NAME; several
      sources with weights as "a.jsonl*2,b.parquet*1"; in double quotes, a path may have a comma or
      a star.
    eval: a task, evaluated on its held-out part, or a source; "" for what is held out of `train`,
      of a source a tenth. Several, separated by commas, get equal shares of `eval.problems`.
    fields: the columns of a source, such as "prompt=instruction,answer=output,kind=math"; "" for
      the known layouts.
    bad_rows: how many rows of a source may be malformed or have an overlong prompt; such rows are
      skipped.
    system: a system message before every problem that has none; "" for no message.
    template: the prompt text; {prompt} stands for the problem's text.
    chat: apply the chat template; False uses the plain text, for base models.
    chat_template_kwargs: what the template reads besides a conversation, as JSON, such as
      '{"enable_thinking": false}'; "" for nothing.
    date: the day that the chat template calls today, such as "2026-11-29"; "" for the day on which
      the run starts. A run keeps it when it is resumed, evaluated, sampled and served.
    terms: difficulty of a task: additions (sums), numbers (countdown) or pairs of digits (forks) in
      a problem; 0 for the task's default.
    largest: difficulty of a task: the largest addend, number or digit; 0 for the task's default.
    filler: mean number of letters before a decision of forks; they decide nothing.
    difficulty: how problems are drawn: "uniform", in shuffled epochs; "explore", more often those
      whose groups are likely to have right and wrong completions, by their success rates so far;
      "low" or "high", of these more often those with low or high rates.
    max_prompt_tokens: the longest prompt; shorter ones are padded to it.
  """

  train: str = "sums"
  eval: str = ""
  fields: str = ""
  bad_rows: int = setting(0, bound=at_least(0))
  system: str = ""
  template: str = "{prompt}"
  chat: bool = True
  chat_template_kwargs: str = ""
  date: str = ""
  terms: int = setting(0, bound=at_least(0))
  largest: int = setting(0, bound=at_least(0))
  filler: int = setting(FILLER, bound=at_least(0))
  difficulty: str = setting(UNIFORM, bound=one_of(DIFFICULTIES))
  max_prompt_tokens: int = setting(32, bound=at_least(1))

  def __post_init__(self):
    try:
      check_variables(
        json.loads(
          self.chat_template_kwargs or "{}",
          parse_constant=_refuse_constant,
          object_pairs_hook=unique_keys,
        )
      )
    except ValueError as error:
      reason = error if str(error).startswith("must") else f"must be JSON: {error}"
      raise UserError(
        f"data.chat_template_kwargs {reason}, got {self.chat_template_kwargs!r:.80}"
      ) from None

    try:
      datetime.date.fromisoformat(self.date or "2000-01-01")
    except ValueError:
      raise UserError(f"data.date must be a day such as 2026-11-29, got {self.date!r}") from None

  @property
  def template_variables(self) -> Variables:
    """What the chat template reads besides a conversation."""
    variables = json.loads(self.chat_template_kwargs or "{}")
    if self.date:
      variables[CLOCK] = self.date
    return variables

  @property
  def sources(self) -> list[tuple[str, float]]:
    """The tasks or sources to train on, with their weights."""
    parts = _names(self.train)
    if len(parts) == 1 and "*" not in parts[0].rpartition('"')[2]:
      return [(_unquoted(parts[0]), 1.0)]
    pairs = [part.rpartition("*") for part in parts]
    try:
      weighted = [(_unquoted(name), float(weight)) for name, _, weight in pairs]
    except ValueError:
      weighted = [("", 0.0)]
    if not all(name and not find_problem(weight, ABOVE_0) for name, weight in weighted):
      raise UserError(
        "data.train must name several sources as a.jsonl*2,b.parquet*1, with weights above 0, and "
        f"a path that has a comma or a star in double quotes; got {self.train!r}"
      )
    return weighted

  @property
  def train_task(self) -> Task | None:
    """The task to train on; None if it is a source."""
    return self._task(self.train)

  @property
  def eval_name(self) -> str:
    """What is evaluated, for records."""
    return self.eval or (self.train if self.train_task else f"{self.train} (held out)")

  @property
  def eval_names(self) -> list[str]:
    """The tasks or sources to evaluate on: without `eval`, on what is held out of each."""
    if not self.eval:
      return [name for name, _ in self.sources]
    return [_unquoted(name) for name in _names(self.eval)]

  @property
  def eval_task(self) -> Task | None:
    """The task to evaluate on; None if it is a source."""
    return self._task(self.eval_name)

  def _task(self, name: str) -> Task | None:
    return make_task(name, self.terms, self.largest, self.filler) if name in TASKS else None


@dataclasses.dataclass(frozen=True)
class EnvSection(EpisodeLimits):
  """What answers the turns of a completion: an environment, tools, or both; or an agent.

  Attributes:
    make: the environment, as module:class: its reset(row, seed) begins an episode and its
      step(turn) answers a turn. "" for none.
    tools: functions that the model may call, as module:function, separated by commas; "python" runs
      a program in the sandbox of rewards, with its limits.
    mcp: servers of the Model Context Protocol whose tools the model may call, separated by
      semicolons: commands on this machine, such as "python server.py", or addresses. All episodes
      share one connection to each.
    agent: a program that plays episodes by itself, as module:function: its async run(row, client,
      seed) sends requests to the policy. "" for none.
    parser: how the model writes calls: "hermes" (Qwen, Hermes), "llama3", "mistral", "olmo3",
      "qwen3_coder" (Qwen3.5), "none", or "auto" for what the tokenizer shows.
  """

  make: str = ""
  tools: str = ""
  mcp: str = ""
  agent: str = ""
  parser: str = setting(AUTO_PARSER, bound=one_of((AUTO_PARSER, *PARSERS)))

  def __post_init__(self):
    super().__post_init__()
    given = {"make": [self.make], "tools": self.tool_names, "agent": [self.agent]}
    for field, names in given.items():
      for name in filter(None, names):
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute) and (field, name) != ("tools", PYTHON_TOOL):
          forms = {"make": "module:class", "tools": f"module:function, or {PYTHON_TOOL!r}"}
          form = forms.get(field, "module:function")
          raise UserError(f"env.{field} must be named as {form}, got {name!r}")

  @property
  def tool_names(self) -> list[str]:
    """The names in `tools`."""
    return [name.strip() for name in self.tools.split(",") if name.strip()]

  @property
  def mcp_servers(self) -> list[str]:
    """The servers in `mcp`."""
    return [server.strip() for server in self.mcp.split(";") if server.strip()]

  @property
  def is_used(self) -> bool:
    """Whether completions are episodes."""
    return bool(self.make or self.tool_names or self.mcp_servers or self.agent)

  @property
  def opens(self) -> bool:
    """Whether rows need no prompt, because an environment or an agent brings its own."""
    return bool(self.make or self.agent)

  @property
  def limits(self) -> EpisodeLimits:
    """The limits of an episode."""
    names = [field.name for field in dataclasses.fields(EpisodeLimits)]
    return EpisodeLimits(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class WarmStartSection:
  """Supervised imitation of a task's imperfect teacher, or of demonstrations, before RL begins.

  Attributes:
    steps: updates; 0 starts RL without imitation.
    data: the demonstrations, a source named as in `data.train`; "" for the task's teacher.
    fields: the columns of the demonstrations, such as "prompt=question,completion=solution"; ""
      for prompt and completion.
    batch: demonstrations per update.
    slips: scales how often the teacher makes mistakes.
    optimizer: AdamW for the imitation only.
  """

  steps: int = setting(0, bound=at_least(0))
  data: str = ""
  fields: str = ""
  batch: int = setting(16, bound=at_least(1))
  slips: float = setting(1.0, bound=AT_LEAST_0)
  optimizer: OptimizerConfig = IMITATION_OPTIMIZER

  @property
  def columns(self) -> str:
    """`fields` in the form of `data.fields`, with the completion as the answer."""
    text = self.fields or "prompt=prompt,completion=completion"
    pairs = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if pairs.keys() != {"prompt", "completion"} or not all(pairs.values()):
      raise UserError(
        "warm_start.fields must name prompt and completion, such as "
        f"prompt=question,completion=solution; got {text!r}"
      )
    return f"prompt={pairs['prompt']},answer={pairs['completion']},kind=exact"


@dataclasses.dataclass(frozen=True)
class RewardSection(Checked):
  """How completions are scored.

  Attributes:
    parts: the reward as a weighted sum, such as "correct*1,boxed*0.1,my_module:my_function*0.5".
      "correct" is the algorithm's reward for right and wrong, "verifier" the verifier's own
      number, "judge" the judge's, "env" the sum of the environment's. Algorithms with entropy
      shaping shape "correct", whose weight is then 1, and add the other parts to the shaped reward.
      Each part is logged.
    verifier: a function that decides right and wrong, as module:function; "" for the environment,
      or, if it does not decide, the built-in verifier of each problem's kind.
    math_rule: "math" (equivalence, by exact arithmetic and math-verify) or "dapo" (DAPO's own
      `Answer:` line, compared as a string).
    instructions: for problems of kind "constraints", "strict", or "loose": whether a text follows
      its instructions is then also tried without its first line, last line and stars.
    gym_answer: for problems of reasoning-gym, where the answer is: "tag" (in <answer></answer>),
      "boxed" (the last box, `Answer:` or number), "auto" (the tag if there is one, else boxed), or
      "line" (the last box or `Answer:`, else the last line).
    timeout_s: seconds that checking one mathematical answer, one of reasoning-gym, or one text with
      the regular expressions of a row of kind constraints may take; after that it has no verdict.
    function_timeout_s: seconds that a user's function may take for the completions of one problem;
      after that they have no verdict.
    code_timeout_s: seconds that one run of a program with its tests may take; after that it is
      wrong.
    code_memory_mb: memory of such a run, in MiB.
    unsandboxed: DANGEROUS. Without a sandbox, run programs written by the model as the current
      user, with access to your files and network.
    judge: a language model that grades completions.
  """

  prefix: ClassVar[str] = "reward."

  parts: str = "correct"
  verifier: str = ""
  math_rule: str = setting("math", bound=one_of(MATH_RULES))
  instructions: str = setting("strict", bound=one_of(INSTRUCTION_MODES))
  gym_answer: str = setting("auto", bound=one_of(GYM_ANSWERS))
  timeout_s: float = setting(5.0, bound=TIMEOUT)
  function_timeout_s: float = setting(300.0, bound=TIMEOUT)
  code_timeout_s: float = setting(5.0, bound=TIMEOUT)
  code_memory_mb: int = setting(512, bound=at_least(16))
  unsandboxed: bool = False
  judge: JudgeSettings = NO_JUDGE

  def __post_init__(self):
    super().__post_init__()
    if not self.weighted:
      raise UserError(
        "reward.parts must name parts with finite weights, such as correct*1,boxed*0.1; "
        f"got {self.parts!r}"
      )
    self.judge.check_use(self.parts, tuple(dict(self.weighted)), self.verifier)

  @property
  def judge_decides(self) -> bool:
    """Whether the judge decides right and wrong."""
    return bool(self.judge.base_url) and self.judge.decides

  @property
  def reads_grades(self) -> bool:
    """Whether the reward contains the number that the judge gives, besides its verdict."""
    names = dict(self.weighted)
    return "judge" in names or (self.judge_decides and "verifier" in names)

  @property
  def replaces_verifiers(self) -> bool:
    """Whether a user's function or the judge decides instead of the verifiers of the kinds."""
    return bool(self.verifier) or self.judge_decides

  @property
  def needs_answer(self) -> bool:
    """Whether a problem without a gold answer could not be decided."""
    judge = self.judge
    reads_answer = "{answer}" in judge.template or judge.opponents > 0
    return not self.verifier and (not self.judge_decides or reads_answer)

  @property
  def reads_columns(self) -> bool:
    """Whether a user's function gets all columns of the problems."""
    return bool(self.verifier) or any(":" in name for name in dict(self.weighted))

  @property
  def weighted(self) -> list[tuple[str, float]]:
    """The parts with their weights; empty if `parts` cannot be parsed."""
    pairs = [part.strip().partition("*") for part in self.parts.split(",")]
    try:
      weighted = [(name.strip(), float(weight) if star else 1.0) for name, star, weight in pairs]
    except ValueError:
      return []
    valid = all(name and not find_problem(weight, FINITE) for name, weight in weighted)
    unique = len({name for name, _ in weighted}) == len(weighted)
    return weighted if valid and unique else []
