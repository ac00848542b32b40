import dataclasses
import json
from pathlib import Path

import pytest
from toys import nested

from gtpo_jax.algorithms import RECIPES, make
from gtpo_jax.config import (
  Config,
  DataSection,
  default_config,
  difference,
  flatten,
  freeze,
  load,
  resolve_model,
  to_dict,
)
from gtpo_jax.loop.prepare import check_training
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.settings import SamplingParams

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
BASE = str(next(file for file in CONFIGS if file.name == "base.py"))


def refused(*parts, **values):
  """The one-line message with which nested values are refused."""
  with pytest.raises(UserError) as error:
    freeze(nested(values))
  message = str(error.value)
  assert "\n" not in message
  for part in parts:
    assert part in message, message
  return message


def write(tmp_path, body):
  file = tmp_path / "mine.py"
  file.write_text(
    "from gtpo_jax.config import default_config\n\n\n"
    "def get_config():\n  config = default_config()\n"
    + "".join(f"  {line}\n" for line in body.splitlines())
    + "  return config\n"
  )
  return str(file)


def load_refused(path, *overrides):
  with pytest.raises(UserError) as error:
    load(path, overrides)
  assert "\n" not in str(error.value)
  return str(error.value)


# --- files ---


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_loads(file):
  config = load(str(file))
  assert isinstance(config, Config)
  algorithm = config.resolved_algorithm
  published = RECIPES[config.algorithm.name]
  assert algorithm.name == config.algorithm.name
  for field in dataclasses.fields(published):
    part = getattr(algorithm.recipe, field.name)
    expected = getattr(published, field.name)
    # The config may set other values of a part's settings, but the parts are the recipe's.
    assert type(part) is type(expected), field.name
    assert dataclasses.is_dataclass(part) or part == expected, field.name


def test_base_is_every_default():
  assert load(BASE) == Config() == freeze(default_config())


def test_a_file_changes_what_it_names(tmp_path):
  config = load(
    write(
      tmp_path, "config.steps = 7\nconfig.algorithm.name = 'grpo_s'\nconfig.algorithm.beta2 = 0.3"
    )
  )
  assert difference(Config(), config) == {"steps": (50, 7), "algorithm.name": ("gtpo", "grpo_s")}
  assert config.resolved_algorithm == make("grpo_s", beta2=0.3)


def test_an_unknown_key_in_a_file_names_the_nearest(tmp_path):
  assert (
    load_refused(write(tmp_path, "config.batch.promts = 3"))
    == "unknown config key 'batch.promts', did you mean 'batch.prompts'?"
  )
  assert (
    load_refused(write(tmp_path, "config.stepz = 3"))
    == "unknown config key 'stepz', did you mean 'steps'?"
  )
  assert "did you mean 'sampling'?" in load_refused(write(tmp_path, "config.samplin = 3"))


def test_a_file_that_raises_says_what(tmp_path):
  message = load_refused(write(tmp_path, "raise RuntimeError('no\\nluck')"))
  assert "mine.py" in message and "RuntimeError" in message and "no luck" in message


def test_a_missing_file_names_the_nearest():
  message = load_refused(BASE.replace("base.py", "bass.py"))
  assert "no config file at" in message and "base.py" in message


# --- the command line ---


def test_overrides():
  config = load(
    BASE,
    [
      "--config.steps=7",
      "--config.algorithm.alpha2=0.3",
      "--config.algorithm.sign_guard=true",
      "--config.log.tensorboard=false",
      "--config.model.remat=none",
      "--config.optimizer.learning_rate=1e-4",
    ],
  )
  assert difference(Config(), config) == {
    "steps": (50, 7),
    "algorithm.alpha2": (0.1, 0.3),
    "algorithm.sign_guard": (False, True),
    "log.tensorboard": (True, False),
    "model.remat": ("auto", "none"),
    "optimizer.learning_rate": (1e-6, 1e-4),
  }


@pytest.mark.parametrize(("value", "expected"), [("auto", "auto"), ("0.25", 0.25), ("1", 1.0)])
def test_a_setting_of_two_types_is_read_from_the_command_line_and_a_file(value, expected, tmp_path):
  name = "sampling.cache_fraction"
  assert load(BASE, [f"--config.{name}={value}"]).sampling.cache_fraction == expected
  config = default_config()
  config.sampling.cache_fraction = expected
  assert freeze(config).sampling.cache_fraction == expected


@pytest.mark.parametrize("value", ["half", "0", "1.5", "True", "nan", "None", "[0.5]"])
def test_a_bad_value_of_a_setting_of_two_types_is_refused(value):
  message = load_refused(BASE, f"--config.sampling.cache_fraction={value}")
  assert "sampling.cache_fraction must be " in message and value.strip("[]") in message


@pytest.mark.parametrize(
  ("override", "key", "nearest"),
  [
    ("--config.stpes=3", "stpes", "steps"),
    ("--config.batch.promts=3", "batch.promts", "batch.prompts"),
    ("--config.algoritm.alpha2=3", "algoritm.alpha2", "algorithm.alpha2"),
    ("--config.learning_rate=3", "learning_rate", "optimizer.learning_rate"),
  ],
)
def test_an_unknown_override_names_the_nearest(override, key, nearest):
  message = load_refused(BASE, override)
  assert message.startswith(f"unknown config key {key!r}")
  assert f"did you mean '{nearest}" in message


@pytest.mark.parametrize(
  ("override", "value"),
  [
    ("--config.steps=many", "many"),
    ("--config.steps=1.5", "1.5"),
    ("--config.optimizer.learning_rate=fast", "fast"),
    ("--config.log.tensorboard=perhaps", "perhaps"),
    ("--config.algorithm.alpha2=x", "x"),
    ("--config.steps=", "steps"),
  ],
)
def test_an_override_of_the_wrong_type(override, value):
  message = load_refused(BASE, override)
  assert value in message
  assert override.removeprefix("--config.").split("=")[0] in message


# --- types and bounds ---


def test_wrong_types():
  refused("steps must be of type int", "1.5", steps=1.5)
  refused("steps must be of type int", "True", steps=True)
  refused("steps must be of type int", "None", steps=None)
  refused("log.tensorboard must be of type bool", "1", log__tensorboard=1)
  refused("model.preset must be of type str", "7", model__preset=7)
  refused("algorithm.alpha2 must be of type float", "'0.1'", algorithm__alpha2="0.1")
  refused(
    "algorithm.overlong_buffer must be of type int",
    "2.0",
    algorithm__name="dapo",
    algorithm__overlong_buffer=2.0,
  )
  refused("batch is a section with fields", "3", batch=3)


def test_an_unknown_key_names_the_nearest():
  refused(
    "unknown config key 'optimizer.learning_rat'",
    "did you mean 'optimizer.learning_rate'",
    optimizer__learning_rat=1.0,
  )
  refused("unknown config key 'optimiser'", "did you mean 'optimizer'", optimiser={"b1": 0.5})


def test_an_int_is_accepted_for_a_float():
  config = freeze(nested({"sampling__temperature": 1, "algorithm__alpha2": 0}))
  assert type(config.sampling.temperature) is float and type(config.algorithm.alpha2) is float


@pytest.mark.parametrize(
  ("name", "least"),
  [
    ("steps", 1),
    ("seed", 0),
    ("batch__prompts", 1),
    ("batch__head_chunk", 0),
    ("batch__group", 2),
    ("sampling__max_tokens", 2),
    ("data__max_prompt_tokens", 1),
    ("warm_start__steps", 0),
    ("warm_start__batch", 1),
    ("eval__every", 0),
    ("eval__problems", 1),
    ("eval__samples", 1),
    ("eval__batch", 1),
    ("checkpoint__every", 1),
    ("checkpoint__keep", 1),
    ("log__samples", 0),
  ],
)
def test_lower_bounds(name, least):
  freeze(nested({"warm_start__steps": 1, name: least}))
  refused(
    f"{name.replace('__', '.')} must be at least {least}, got {least - 1}", **{name: least - 1}
  )


@pytest.mark.parametrize(
  ("values", "parts"),
  [
    ({"batch__micro_batches": 0}, ['batch.micro_batches must be at least 1, or "auto"', "got 0"]),
    ({"sampling__slots": -1}, ['sampling.slots must be at least 0, or "auto"', "got -1"]),
    ({"sampling__temperature": 0.0}, ["sampling.temperature must be above 0", "got 0"]),
    ({"sampling__temperature": -1.0}, ["sampling.temperature", "-1.0"]),
    ({"sampling__top_p": 1.5}, ["sampling.top_p must be in (0, 1], got 1.5"]),
    ({"eval__temperature": -0.5}, ["eval.temperature", "-0.5"]),
    ({"warm_start__slips": -0.1}, ["warm_start.slips must be at least 0 and finite, got -0.1"]),
    ({"model__preset": "tinny"}, ["'tinny'", "did you mean 'tiny'"]),
    (
      {"model__remat": "some"},
      ["model.remat must be one of auto, none, products, attention, full", "'some'"],
    ),
    ({"model__compute_dtype": "float31"}, ["model.compute_dtype", "'float31'"]),
    ({"data__train": "sum"}, ["'sum'", "did you mean 'sums'"]),
    ({"data__eval": "countdwn"}, ["'countdwn'", "did you mean 'countdown'"]),
    ({"data__terms": 40}, ["data.terms = 40"]),
    ({"reward__parts": ""}, ["reward.parts must name parts"]),
    ({"reward__parts": "correct,correct"}, ["reward.parts must name parts"]),
    ({"reward__math_rule": "dapoo"}, ["one of math, dapo, got 'dapoo'"]),
    ({"reward__timeout_s": 0.0}, ["above 0 and at most 86400"]),
    ({"reward__code_timeout_s": float("inf")}, ["code_timeout_s must be above 0"]),
    ({"reward__code_memory_mb": 8}, ["reward.code_memory_mb must be at least 16, got 8"]),
    ({"data__filler": 4}, ["data.filler = 4 only has an effect with data.train = 'forks'"]),
    ({"algorithm__name": "gtop"}, ["'gtop'", "did you mean 'gtpo'"]),
    ({"algorithm__alpha2": -1.0}, ["algorithm.alpha2 must be at least 0 and finite, got -1.0"]),
    ({"algorithm__beta2": 0.1}, ["algorithm 'gtpo' has no setting 'beta2'"]),
    ({"algorithm__eps_low": 0.5}, ["algorithm.eps_low must be at most eps_high = 0.28, got 0.5"]),
    (
      {"algorithm__name": "dapo", "algorithm__overlong_buffer": 40},
      ["algorithm.overlong_buffer must be below sampling.max_tokens = 40, got 40"],
    ),
    (
      {"algorithm__name": "pass_at_k", "algorithm__pass_k": 8, "batch__group": 8},
      ["algorithm.pass_k must be below batch.group = 8", "got 8"],
    ),
    (
      {"optimizer__learning_rate": 0.0},
      ["optimizer.learning_rate must be above 0 and finite, got 0.0"],
    ),
    ({"optimizer__b2": 1.0}, ["optimizer.b2 must be in [0, 1), got 1.0"]),
    ({"optimizer__warmup_steps": -1}, ["optimizer.warmup_steps must be at least 0, got -1"]),
    (
      {"warm_start__optimizer__schedule": "cosin"},
      ["warm_start.optimizer.schedule must be one of constant, cosine, linear", "'cosin'"],
    ),
  ],
)
def test_bounds(values, parts):
  refused(*parts, **values)


# --- to dicts and back ---


@pytest.mark.parametrize(
  "config",
  [
    Config(),
    *(freeze({"algorithm": {"name": name}}) for name in RECIPES if not RECIPES[name].distillation),
    freeze({"algorithm": {"name": "rlsd"}, "teacher": {"path": "x"}}),
    freeze({"algorithm": {"name": "opd"}, "teacher": {"path": "x"}, "distill": {"coef": 0.5}}),
    freeze(
      {
        "steps": 3,
        "algorithm": {"name": "grpo_s", "beta2": 0.5, "sign_guard": True},
        "sampling": {"top_p": 0.9},
        "mesh": {"fsdp": 2},
      }
    ),
  ],
  ids=lambda config: config.algorithm.name,
)
def test_freeze_inverts_to_dict(config):
  assert freeze(to_dict(config)) == config
  assert freeze(json.loads(json.dumps(to_dict(config)))) == config
  assert hash(freeze(to_dict(config))) == hash(config)


def test_the_parts_of_a_config():
  config = freeze(
    nested(
      {
        "sampling__top_k": 5,
        "sampling__temperature": 0.7,
        "eval__temperature": 0.0,
        "model__param_dtype": "bfloat16",
        "data__train": "countdown",
        "data__terms": 4,
      }
    )
  )
  assert config.sampling_params == SamplingParams(0.7, 5, 1.0, 0.0)
  assert config.eval.sampling_params == SamplingParams(0.0)
  assert (config.model.param_dtype, resolve_model(config).config.width) == ("bfloat16", 128)
  assert (config.data.train_task.name, config.data.train_task.terms) == ("countdown", 4)
  assert config.data.eval_task is config.data.train_task
  forks = freeze(nested({"data__train": "forks", "data__filler": 4}))
  assert (forks.data.train_task.filler, forks.data.eval_task.filler) == (4, 4)


def test_a_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Config().steps = 3


def test_flatten_joins_the_keys():
  assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": "x"}) == {"a.b": 1, "a.c.d": None, "e": "x"}
  assert difference(Config(), Config()) == {}


def training_refused(*parts, **values):
  """The message with which a run refuses to train; the values themselves are valid."""
  config = freeze(nested(values))
  with pytest.raises(UserError) as error:
    check_training(config)
  for part in parts:
    assert part in str(error.value), error.value


@pytest.mark.parametrize("preset", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_a_large_model_needs_weights(preset):
  parts = (f"model.preset = {preset!r} would start from random weights", "set model.path to")
  training_refused(*parts, model__preset=preset)
  for allowed in (
    {"model__path": "Qwen/Qwen2.5-7B"},
    {"model__random_weights": True},
    {"warm_start__steps": 10},
  ):
    check_training(freeze(nested({"model__preset": preset, **allowed})))
  check_training(Config())  # a tiny model may start from random weights


@pytest.mark.parametrize("name", ["gtpo", "gtpo_v2", "grpo_s", "grpo_s_v1"])
def test_parts_that_entropy_shaping_cannot_use_are_refused(name):
  lacks = "lacks: use reward.parts=correct,verifier,boxed*0.1, which adds"
  training_refused(lacks, algorithm__name=name, reward__parts="verifier,boxed*0.1")
  scaled = "have weight 1, got 'boxed*0.5,correct*2'; scale the other parts instead: "
  scaled += "reward.parts=boxed*0.25,correct*1"
  training_refused(scaled, algorithm__name=name, reward__parts="boxed*0.5,correct*2")
  check_training(freeze(nested({"algorithm__name": name, "reward__parts": "correct,boxed*100"})))


@pytest.mark.parametrize("parts", ["verifier", "correct*2,boxed*0.5", "boxed"])
def test_algorithms_without_entropy_shaping_accept_any_parts(parts):
  check_training(freeze(nested({"algorithm__name": "grpo", "reward__parts": parts})))


def test_warm_starts_on_demonstrations(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.jsonl").touch()
  for train, message in {
    "a.jsonl": "needs demonstrations of data.train = 'a.jsonl': set warm_start.data",
    "missing.jsonl": "no file or folder at 'missing.jsonl'; data.train and data.eval name a task,",
    "sums*1,a.jsonl*1,missing/b.jsonl*2": "no file or folder at 'missing/b.jsonl'",
    "hf:missing": "needs demonstrations of data.train = 'hf:missing'",
  }.items():
    refused(message, data__train=train, data__eval="b.jsonl", warm_start__steps=5)
  refused("warm_start.data = 'demos.jsonl' only has an effect", warm_start__data="demos.jsonl")
  refused("warm_start.data must name a source", warm_start__data="demos.txt", warm_start__steps=5)
  refused(
    "warm_start.fields must name prompt and completion, such as prompt=question,"
    "completion=solution; got 'prompt=q'",
    warm_start__data="demos.jsonl",
    warm_start__steps=5,
    warm_start__fields="prompt=q",
  )
  config = freeze(
    nested(
      {
        "data__train": "a.jsonl",
        "data__eval": "b.jsonl",
        "warm_start__data": "hf:me/demos",
        "warm_start__steps": 5,
        "warm_start__fields": "prompt=q, completion=solution",
      }
    )
  )
  assert config.warm_start.columns == "prompt=q,answer=solution,kind=exact"


def test_a_short_name_selects_a_shipped_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert load("tiny") == load(str(CONFIGS[0].parent / "tiny.py"))
  assert load("eval_gsm8k:base").data.chat is False
  (tmp_path / "tiny").write_text(Path(BASE).read_text())  # a file of this name comes first
  assert load("tiny") == Config()


@pytest.mark.parametrize(
  ("train", "sources"),
  [
    ("a.jsonl", [("a.jsonl", 1.0)]),
    ("a.jsonl*2,b.jsonl*0.5", [("a.jsonl", 2.0), ("b.jsonl", 0.5)]),
    ('"1,000 *new*.jsonl"', [("1,000 *new*.jsonl", 1.0)]),
    ('"x*2,y.jsonl"*3, b.jsonl*1', [("x*2,y.jsonl", 3.0), ("b.jsonl", 1.0)]),
    ('say "hi".jsonl', [('say "hi".jsonl', 1.0)]),
  ],
)
def test_a_path_in_double_quotes_may_have_commas_and_stars(train, sources):
  data = DataSection(train=train, eval=train)
  assert data.sources == sources
  assert DataSection(eval='"1,000.jsonl", b.jsonl').eval_names == ["1,000.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
  ("staleness", "chosen", "expected"),
  [(0, None, 0), (1, None, 0), (2, None, 2), (4, 0, 0), (3, 5, 5)],
)
def test_old_tokens_are_weighted_from_a_staleness_of_two_on(staleness, chosen, expected):
  config = default_config()
  config.sampling.staleness = staleness
  config.algorithm.tis_cap = chosen
  assert freeze(config).resolved_algorithm.settings.tis_cap == expected
