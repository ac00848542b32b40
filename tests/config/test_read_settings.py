"""The law of settings: one that differs from its default and that nothing reads is refused."""

import dataclasses

import pytest

from gtpo_jax.config import Config, flatten, freeze, freeze_recorded, load, override, to_dict
from gtpo_jax.config.read_settings import (
  ALWAYS,
  READ_IF,
  READ_IF_WITH_INPUTS,
  ROUTER,
  check_router,
  check_settings,
)
from gtpo_jax.models.presets import PRESETS, TINY_MOE
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import UnreadError
from tests.toys import nested

DEFAULTS = {
  name: value
  for name, value in flatten(to_dict(Config())).items()
  if not name.startswith("algorithm.") or name == "algorithm.name"
}
# What makes the run one that does not read the setting, and a value other than the default.
SOURCE = {"data.train": "a.jsonl", "data.eval": "b.jsonl"}
UNREAD_BY = {
  "optimizer.name": {"model.lora_rank": 2, "algorithm.tis_cap": 2.0},
  "model.random_weights": {"model.path": "m"},
  "data.chat_template_kwargs": {"data.chat": False},
  "data.date": {"data.chat": False},
  "data.terms": SOURCE,
  "data.largest": SOURCE,
  "sampling.page_size": {"sampling.attention": "xla"},
  "sampling.cache_fraction": {"sampling.attention": "xla"},
  "sampling.weights_dtype": {
    "model.quantize": "int8",
    "model.lora_rank": 2,
    "algorithm.tis_cap": 2.0,
  },
  **{
    f"reward.{name}": {"reward.verifier": "m:f"}
    for name in (
      *("math_rule", "instructions", "gym_answer", "timeout_s"),
      *("code_timeout_s", "code_memory_mb", "unsandboxed"),
    )
  },
  "reward.judge.base_url": {"reward.judge.decides": False, "reward.judge.model": "m"},
  "eval.top_p": {"eval.temperature": 0.0},
  "log.credit_groups": {"log.credit_every": 0},
  "log.continuations": {"log.credit_every": 0},
}
CHANGED = {
  "data.chat_template_kwargs": '{"a": 1}',
  "data.date": "2026-11-29",
  "model.lora_targets": "q",
  "model.quantize": "int8",
  "model.base_layout": "apart",
  "sampling.merge_adapters": "never",
  "sampling.page_size": 16,
  "sampling.cache_fraction": 0.5,
  "sampling.weights_dtype": "int8",
  "reward.math_rule": "dapo",
  "reward.instructions": "loose",
  "reward.gym_answer": "line",
  "reward.judge.base_url": "http://here/v1",
  "reward.judge.template": "{completion} {question}",
  "reward.judge.pattern": "(x)",
  "reward.judge.scale": "0:1",
  "reward.judge.request": "{}",
  "reward.judge.questions": ("Is it?",),
  "teacher.prompt": "{prompt}!",
  "distill.credit": "entropy",
  "distill.divergence": "jsd",
  "optimizer.name": "muon",
  "warm_start.optimizer.name": "muon",
  "warm_start.optimizer.schedule": "linear",
  "warm_start.optimizer.momentum_dtype": "bfloat16",
  "env.parser": "hermes",
  "env.role": "user",
  "env.truncate": "end",
  "env.on_timeout": "wrong",
  "data.fields": "prompt=q,answer=a",
  "warm_start.data": "demos.jsonl",
  "warm_start.fields": "prompt=q,completion=a",
  "reward.judge.opponents": 1,
  "eval.top_p": 0.5,
}


def other(name):
  """Returns a value of a setting that is in its bounds and is not its default."""
  default = DEFAULTS[name]
  if name in CHANGED:
    return CHANGED[name]
  if isinstance(default, bool):
    return not default
  if isinstance(default, int | float):
    return default / 2 if 0 < default < 1 else default + 1
  return "m:f"


def test_every_setting_is_always_read_or_has_a_condition():
  tables = [*ALWAYS, *READ_IF, *READ_IF_WITH_INPUTS, *ROUTER]
  assert sorted(tables) == sorted(DEFAULTS)


@pytest.mark.parametrize("name", [*READ_IF, *READ_IF_WITH_INPUTS])
def test_a_setting_that_nothing_reads_is_refused(name):
  changes = {**UNREAD_BY.get(name, {}), name: other(name)}
  if name.endswith((".beta", ".top_k")):  # the section itself has the condition of these
    changes["distill.divergence"] = "jsd"
  if name == "reward.judge.opponents":
    changes["reward.judge.template"] = "{completion} {other}"
  config = freeze_recorded(nested({**DEFAULTS, **changes}))  # a recorded config is not refused
  with pytest.raises(UnreadError) as error:
    check_settings(config)
  message = str(error.value)
  assert "\n" not in message and "only has an effect with" in message
  assert error.value.name in changes and repr(DEFAULTS[error.value.name])[:40] in (
    message + repr(DEFAULTS[error.value.name]) * ("at its default" in message)
  )


def test_the_router_of_a_model_without_experts_is_refused():
  for name, value in (("router_replay", False), ("router_balance", 0.1)):
    config = freeze_recorded({"model": {"path": "m", name: value}})
    check_settings(config)  # the folder is not read yet
    check_router(config, TINY_MOE)
    with pytest.raises(UnreadError, match=f"model.{name} = {value} only has an effect with a mix"):
      check_router(config, PRESETS["tiny"])
    with pytest.raises(UnreadError, match=f"model.{name}"):
      freeze({"model": {name: value}})
    freeze({"model": {name: value, "preset": "tiny-moe"}})


def test_what_a_program_passes_later_may_be_configured():
  config = freeze({"env": {"max_turns": 3}, "data": {"bad_rows": 2}})
  with pytest.raises(UnreadError, match=r"data.bad_rows = 2 only has an effect with a source"):
    check_settings(config)
  with pytest.raises(UnreadError, match=r"env.max_turns = 3 only has an effect with env.make, env"):
    check_settings(dataclasses.replace(config, data=Config().data))


def test_an_override_that_turns_something_off_takes_its_settings_along(tmp_path):
  file = tmp_path / "own.py"
  file.write_text(
    "from gtpo_jax.config import default_config\n"
    "def get_config():\n"
    "  config = default_config()\n"
    "  config.warm_start.steps = 5\n"
    "  config.warm_start.batch = 3\n"
    "  return config\n"
  )
  assert load(str(file)).warm_start.batch == 3
  off = load(str(file), ["--config.warm_start.steps=0"]).warm_start
  assert (off.steps, off.batch) == (0, 16)
  with pytest.raises(UnreadError, match=r"warm_start.batch = 4 only has .*; use that, or leave ba"):
    load(str(file), ["--config.warm_start.steps=0", "--config.warm_start.batch=4"])
  other = tmp_path / "other.py"
  other.write_text(file.read_text().replace("steps = 5", "steps = 0"))
  with pytest.raises(UnreadError, match=r"warm_start.batch = 3"):
    load(str(other), ["--config.steps=9"])


def test_what_a_run_has_recorded_is_accepted_but_not_what_overrides_it():
  recorded = freeze_recorded({"warm_start": {"batch": 3}})
  assert override(recorded, ["--config.steps=9"]).steps == 9
  with pytest.raises(UnreadError, match=r"eval.top_p = 0.5"):
    override(recorded, ["--config.eval.top_p=0.5", "--config.eval.temperature=0.0"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"sampling.stop": "ab"}, "sampling.stop is a list of strings, got 'ab'; write it in br"),
    ({"data.chat_template_kwargs": '{"a": 1, "a": 2}'}, "has the key 'a' twice"),
    ({"data.chat_template_kwargs": '{"a": NaN}'}, "must be JSON: NaN is no value of JSON"),
    ({"reward.parts": "correct*0"}, "reward.parts = 'correct\\*0' gives every completion the rew"),
    ({"reward.parts": "correct,verifier*-1", "algorithm.name": "grpo"}, "gives every completion"),
  ],
)
def test_values_that_contradict_themselves(changes, message):
  with pytest.raises(UserError, match=message):
    freeze(nested(changes))


def test_a_config_file_that_cannot_be_read(tmp_path):
  with pytest.raises(UserError, match="no file has a name as long as --config="):
    load("a" * 300 + ".py")
  file = tmp_path / "latin.py"
  file.write_bytes(b"# \xe9\ndef get_config(): pass\n")
  with pytest.raises(UserError, match=r"--config=.*latin.py cannot be read; save it as") as error:
    load(str(file))
  assert "\n" not in str(error.value)
