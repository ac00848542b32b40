"""gtpo_jax from Python: `train` and `steps`, with functions and dicts, and early exits."""

import asyncio
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import gtpo_jax
from gtpo_jax import models
from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.workdir import claim, load_config
from gtpo_jax.config import default_config, freeze
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.profile import compile_count
from gtpo_jax.loop.inputs import resolve_inputs
from gtpo_jax.runtime.errors import RunError, UserError

ROOT = Path(__file__).parents[2]
QUIET = Display(enabled=False)
ROWS = [{"prompt": f"{a}+{b}:", "answer": str(a + b)} for a in range(2, 8) for b in range(2, 8)]
SHAPE = {
  "steps": 4,
  "model": {"preset": "tiny"},
  "data": {"max_prompt_tokens": 20},
  "batch": {"prompts": 4, "group": 4},
  "sampling": {"max_tokens": 8},
  "eval": {"problems": 4, "samples": 2, "batch": 4, "every": 2},
  "checkpoint": {"every": 3},
  "optimizer": {"learning_rate": 1e-3},
}


def even(prompts, completions, answers, extras):
  """A verifier that a random model passes about half of the time."""
  return [len(text) % 2 == 0 for text in completions]


def our_threads():
  return {
    thread
    for thread in threading.enumerate()
    if thread.name.startswith(("gtpo", "ThreadPoolExecutor", "Thread-"))
  }


@pytest.fixture(scope="module")
def trained():
  """A whole run without a workdir."""
  before = our_threads()
  seen = []

  def reward(prompts, completions, answers, extras):
    seen.append((prompts, completions, answers, extras))
    return even(prompts, completions, answers, extras)

  result = gtpo_jax.train(SHAPE, display=QUIET, reward=reward, data=[*ROWS, *ROWS[:3]])
  return result, seen, our_threads() - before


def test_ten_lines_train_a_model(trained):
  result, seen, _ = trained
  assert result.finished and result.step == 4
  assert [row["step"] for row in result.history] == [0, 1, 2, 3, 4]
  assert {"eval/held_out/mean@2", "eval/held_out/pass@2"} <= result.history[
    0
  ].keys() & result.history[-1].keys()
  assert "held-out pass@1" in result.summary
  prompts, completions, answers, extras = seen[0]
  assert len(set(prompts)) == len(set(answers)) == 1 and len(prompts) == len(completions) == len(
    answers
  ) == len(extras)
  assert {"prompt": prompts[0], "answer": answers[0]} in ROWS
  messages = [{"role": "user", "content": prompts[0]}]
  id = extras[0].pop("id")
  assert isinstance(id, str) and extras[0] == {"messages": messages, "answer": answers[0]}
  assert {len(given[0]) for given in seen} == {
    4,
    2,
    1,
  }  # a group, an evaluation's samples, its greedy one


def test_the_policy_samples_and_is_saved(trained, tmp_path):
  policy = trained[0].policy
  texts = policy.sample("2+3:", n=3, seed=1)
  assert len(texts) == 3 and texts == policy.sample("2+3:", n=3, seed=1) != policy.sample(
    "2+3:", n=3, seed=2
  )
  assert len(set(policy.sample("2+3:", n=2, temperature=0))) == 1
  for bad, message in (
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
    ({"top_p": 2}, "top_p must be in"),
  ):
    with pytest.raises(UserError, match=message):
      policy.sample("2+3:", **bad)
  models.save(policy.model, policy.params, policy.tokenizer, tmp_path / "a")
  policy.save(tmp_path / "b")
  (_, a) = models.load(tmp_path / "a")
  (_, b) = models.load(tmp_path / "b")
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert (tmp_path / "b" / "generation_config.json").exists()


def test_no_threads_are_left(trained):
  assert not trained[2]


def test_steps_and_train_are_the_same_run(trained):
  """The generator yields the metrics and weights of `train`, and the batch of each step.

  The second run reuses the programs that the first has compiled.
  """
  before = compile_count()
  steps = list(gtpo_jax.steps(SHAPE, display=QUIET, reward=even, data=ROWS))
  assert compile_count() - before <= 5  # the first run compiles about a hundred
  assert [step.step for step in steps] == [1, 2, 3, 4]
  without_timing = lambda row: {
    key: value
    for key, value in row.items()
    if not key.startswith("time/") and key not in ("step", "tokens/s", "compiles")
  }
  for step, row in zip(steps, trained[0].history[1:], strict=True):
    np.testing.assert_equal(
      {
        key: None if np.isnan(value) else value
        for key, value in without_timing(step.metrics).items()
      },
      without_timing(row),
    )
  assert (
    "eval/held_out/mean@2" in steps[1].metrics and "eval/held_out/mean@2" not in steps[0].metrics
  )
  batch = steps[0].batch
  assert (
    len(batch.texts) == 4
    and batch.correct.shape == (4, 4)
    and batch.rollouts.entropy.shape == (4, 4, 8)
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(steps[-1].policy.params),
    jax.device_get(trained[0].policy.params),
  )


def leave(workdir, how):
  """Leaves a run in its second step, and returns the threads that are still alive."""
  before = our_threads()
  run = gtpo_jax.steps(SHAPE, workdir, QUIET, reward=even, data=ROWS)
  if how == "break":
    for step in run:
      if step.step == 2:
        break
    run.close()
  elif how == "error":

    def body():
      for step in gtpo_jax.steps(SHAPE, workdir, QUIET, reward=even, data=ROWS):
        if step.step == 2:
          raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
      body()
  elif how == "interrupt":  # in the middle of step 2, which the next run samples again

    def interrupting(prompts, completions, answers, extras):
      if (
        (workdir / "metrics.jsonl").read_text().count("\n") == 2 and len(prompts) == 4 and not asked
      ):
        asked.append(os.kill(os.getpid(), signal.SIGINT))
      return even(prompts, completions, answers, extras)

    asked = []
    interrupting.__qualname__ = "even"
    assert [
      step.step for step in gtpo_jax.steps(SHAPE, workdir, QUIET, reward=interrupting, data=ROWS)
    ] == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  started = our_threads() - before
  for thread in started:
    thread.join(10)  # a thread that was told to end needs a moment
  return {thread for thread in started if thread.is_alive()}


@pytest.mark.parametrize("how", ["break", "error", "interrupt"])
@pytest.mark.some(1, slow=0)
def test_a_run_left_early_is_saved_and_can_continue(how, tmp_path, trained):
  workdir = tmp_path / "run"
  assert not leave(workdir, how)
  assert Checkpoints(workdir / "checkpoints").steps() == [1 if how == "interrupt" else 2]
  config = load_config(workdir)
  assert config.data.train.startswith("records:") and config.reward.verifier == "test_python:even"
  with claim(workdir, config):  # the lock is free
    pass
  if how == "break":
    result = gtpo_jax.train(SHAPE, workdir, QUIET, reward=even, data=ROWS)
    assert result.finished and [row["step"] for row in read_jsonl(workdir / "metrics.jsonl")] == [
      0,
      1,
      2,
      3,
      4,
    ]
    jax.tree.map(
      np.testing.assert_array_equal,
      jax.device_get(result.policy.params),
      jax.device_get(trained[0].policy.params),
    )
    with pytest.raises(UserError, match="belongs to another config"):
      gtpo_jax.train(SHAPE, workdir, QUIET, reward=even, data=ROWS[1:])


# The runs have the shapes of the tests, so their programs are in the compile cache.
LEFT_OPEN = """
import sys
sys.path.insert(0, {tests!r})
from test_python import QUIET, ROWS, SHAPE, even, gtpo_jax
def begin(name):
  run = gtpo_jax.steps(SHAPE, name, QUIET, reward=even, data=ROWS)
  for step in run:
    if step.step == 2:
      return run
{ending}
"""
ENDINGS = {
  "the end": ("run = begin('b')", 0),
  "an error after a closed run": (
    "closed = begin('a'); closed.close(); run = begin('b'); raise ValueError('at the end')",
    1,
  ),
  "an error in the loop": (
    "run = gtpo_jax.steps(SHAPE, 'b', QUIET, reward=even, data=ROWS)\n"
    "for step in run: 1 / (2 - step.step)",
    1,
  ),
  "exit": ("run = begin('b'); sys.exit(3)", 3),
  "a run that was not started": (
    "run = begin('b'); other = gtpo_jax.steps(SHAPE, 'c', QUIET, reward=even, data=ROWS)",
    0,
  ),
}


@pytest.mark.skipif(
  (3, 12) <= sys.version_info < (3, 12, 2),
  reason="these versions start no thread once the main one has ended (CPython issue 113964)",
)
@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.some(0, slow=1)
def test_a_run_that_is_open_at_the_end_of_a_program_is_saved(how, tmp_path):
  ending, status = ENDINGS[how]
  script = LEFT_OPEN.format(tests=str(Path(__file__).parent), ending=ending)
  done = subprocess.run(
    [sys.executable, "-c", script],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == status, done.stderr
  last = done.stderr.strip().splitlines()[-1:]
  assert (last[0].split(":")[0] in ("ValueError", "ZeroDivisionError")) if status == 1 else not last
  for workdir in tmp_path.iterdir():
    assert Checkpoints(workdir / "checkpoints").steps() == [2]
    assert [row["step"] for row in read_jsonl(workdir / "metrics.jsonl")] == [0, 1, 2]
  assert (tmp_path / "b").exists()


@pytest.mark.parametrize(
  ("where", "saved"),
  [
    pytest.param("the first evaluation", 0, marks=pytest.mark.manual),
    pytest.param("step 2", 1, marks=pytest.mark.slow),
    pytest.param("an evaluation", 2, marks=pytest.mark.manual),
  ],
)
def test_a_run_ended_by_its_reward_function_is_saved(where, saved, tmp_path, trained, monkeypatch):
  """The function first changes the current folder; the workdir is relative to the original one."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "elsewhere").mkdir()
  workdir = tmp_path / "run"

  def ends(prompts, completions, answers, extras):
    os.chdir(tmp_path / "elsewhere")
    jax.config.update("jax_enable_x64", True)
    steps = (workdir / "metrics.jsonl").read_text().count("\n") - 1
    group = 4 if where == "step 2" else 2
    if steps == (1 if where == "step 2" else saved) and len(prompts) == group:
      raise asyncio.CancelledError("gone")
    return even(prompts, completions, answers, extras)

  ends.__qualname__ = "even"
  with pytest.raises(RunError) as error:
    gtpo_jax.train(SHAPE, "run", QUIET, reward=ends, data=ROWS)
  assert str(error.value) == (
    "reward function 'test_python:even' raised CancelledError: gone, which ends the run; "
    f"step {saved} is saved; fix the function, then run the same command again"
  )
  assert not jax.config.jax_enable_x64
  assert list((tmp_path / "elsewhere").iterdir()) == []
  assert Checkpoints(workdir / "checkpoints").steps() == [saved]
  result = gtpo_jax.train(SHAPE, workdir, QUIET, reward=even, data=ROWS)
  assert [row["step"] for row in read_jsonl(workdir / "metrics.jsonl")] == [0, 1, 2, 3, 4]
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(result.policy.params),
    jax.device_get(trained[0].policy.params),
  )


@pytest.mark.slow
def test_the_command_line_on_a_run_of_a_python_program(tmp_path):
  """Its policy can be sampled, but an error says that its problems are not in a file."""
  from gtpo_jax.cli import main

  workdir = tmp_path / "run"
  given = resolve_inputs(
    {**SHAPE, "steps": 1, "eval": {**SHAPE["eval"], "problems": 1}}, even, ROWS
  )
  gtpo_jax.train(given.config, workdir, QUIET, lambda: True, reward=even, data=ROWS)
  assert main(["sample", f"--model={workdir}", "--prompt=2+3:", "--step=0"]) == 0
  with pytest.raises(
    UserError, match=r"'records:\w+:held_out' was passed by a Python program and is not in a file"
  ):
    from gtpo_jax.rollout.problems import held_out_problems
    from gtpo_jax.rollout.worker import RolloutWorker

    held_out_problems(given.config, RolloutWorker(given.config))


@pytest.mark.slow
def test_a_window_of_steps_is_traced(tmp_path):
  """The Perfetto file has the window's steps and phases; XProf's own file is beside it."""
  config = {**SHAPE, "profile": {"steps": "2:3"}}
  gtpo_jax.train(config, tmp_path / "run", QUIET, reward=even, data=ROWS)
  (folder,) = (tmp_path / "run" / "profile" / "plugins" / "profile").iterdir()
  assert list(folder.glob("*.xplane.pb"))
  events = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))[
    "traceEvents"
  ]
  spans = {
    name: [event for event in events if event.get("name") == name and event.get("ph") == "X"]
    for name in ("step", "sample", "reward", "update", "evaluate", "save")
  }
  assert [
    int(event["args"]["step_num"]) for event in sorted(spans["step"], key=lambda event: event["ts"])
  ] == [2, 3]
  assert {name for name, found in spans.items() if found} == spans.keys()
  assert len(spans["update"]) == 2 and len(spans["evaluate"]) == len(spans["save"]) == 1
  assert {event["tid"] for event in spans["reward"]} > {
    event["tid"] for event in spans["update"]
  }  # also on their own thread
  within = lambda inner, outer: (
    outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
  )
  assert all(
    any(within(event, step) for step in spans["step"])
    for event in spans["update"] + spans["save"] + spans["evaluate"]
  )


@pytest.mark.slow
def test_a_reward_function_that_always_fails_ends_the_run(capfd):
  def reward(prompts, completions, answers, extras):
    raise KeyError("score")

  shape = {**SHAPE, "eval": {**SHAPE["eval"], "problems": 36}}
  with pytest.raises(UserError) as error:
    gtpo_jax.train(shape, display=QUIET, reward=reward, data=ROWS, held_out=ROWS)
  assert "none of 72 evaluated completions has a verdict: a reward function (" in str(error.value)
  assert "fix it, then run the same command again" in str(error.value)
  assert "KeyError: 'score'" in capfd.readouterr().err


@pytest.mark.slow
def test_an_environment_that_always_fails_ends_the_run(capfd):
  """Its failure is named, and not a verification that took too long."""

  def boom():
    return None

  shape = {**SHAPE, "eval": {**SHAPE["eval"], "problems": 36}}
  with pytest.raises(UserError, match="the environment failed in 100% of the episodes; the first"):
    gtpo_jax.train(shape, display=QUIET, environment=boom, data=ROWS, held_out=ROWS)
  shown = capfd.readouterr().err
  assert "boom returned an object of type NoneType without a method 'reset'" in shown


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"reward": 3}, "reward must be a function of (prompts, completions, answers, extras), got 3"),
    (
      {"reward": lambda completions: 1},
      "must take (prompts, completions, answers, extras): too many positional arguments",
    ),
    ({"data": "train.jsonl"}, "data must be a list of dicts, got str 'train.jsonl'; "),
    (
      {"data": ROWS, "demonstrations": [{"prompt": "1", "completion": "2"}]},
      "only has an effect with warm_start.steps above 0",
    ),
    ({"data": {"prompt": "1", "answer": "1"}}, "data must be a list of dicts, got dict"),
    ({"data": 5}, "data must be a list of dicts, got int '5'"),
    ({"data": []}, "'data' contains no problem (0 rows)"),
    ({"data": ROWS[:1] * 3}, "data holds 1 problem, so none can be held out"),
    (
      {"data": [*ROWS, "1+1"]},
      "data[36]: must be a dict, got str (1 malformed row(s), data.bad_rows = 0 allowed)",
    ),
    ({"data": [{"question": "1+1"}]}, "data[0]: has the columns question, no known layout"),
    ({"data": [{"prompt": "", "answer": "2"}]}, "data[0]: has an empty user message"),
    ({"data": ROWS, "held_out": [{"prompt": "1"}]}, "held_out[0]: has the columns prompt"),
    (
      {"data": [*ROWS, {"prompt": "1+" * 30, "answer": "2"}]},
      "are over data.max_prompt_tokens = 20",
    ),
    (
      {"data": [*ROWS, {"prompt": "1", "answer": "2", "kind": "poem"}]},
      "kind 'poem', which has no verifier",
    ),
    ({"config": {"stepz": 3}}, "unknown config key 'stepz', did you mean 'steps'?"),
    ({"config": {"log": {"wandb": "x"}}}, "log.wandb = 'x' needs the wandb library"),
    (
      {"config": {"profile": {"steps": "5:3"}}},
      "profile.steps must be two steps, such as 3:5, the first at least 1 and not after the last",
    ),
    ({"config": {"profile": {"steps": "3"}}}, "profile.steps must be two steps"),
    ({"workdir": ROOT / "setup.py"}, "is a file; name a folder"),
  ],
  ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_unusable_inputs_give_a_one_line_error(given, message, monkeypatch):
  real = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more)
  )
  config = {**SHAPE, **given.pop("config", {})}
  with pytest.raises(UserError) as error:
    gtpo_jax.train(config, display=QUIET, **given)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_malformed_rows_may_be_skipped_and_duplicates_are_dropped():
  rows = [*ROWS[:20], *ROWS[:5], {"answer": "no prompt"}]
  given = resolve_inputs({**SHAPE, "data": {"bad_rows": 1}}, even, rows)
  train = given.records[given.config.data.train]
  held_out = given.records[given.config.data.eval]
  assert (
    train.rows,
    train.duplicates,
    len(train.bad),
    len(train.problems),
    len(held_out.problems),
  ) == (26, 5, 1, 18, 2)
  assert not {p.messages[0]["content"] for p in train.problems} & {
    p.messages[0]["content"] for p in held_out.problems
  }
  again = resolve_inputs({**SHAPE, "data": {"bad_rows": 1}}, even, list(rows))
  assert (
    again.config == given.config
    and again.records[given.config.data.eval].problems == held_out.problems
  )
  assert (
    resolve_inputs(SHAPE, even, ROWS[1:]).config.data.train
    != resolve_inputs(SHAPE, even, ROWS).config.data.train
  )
  own = resolve_inputs(SHAPE, None, ROWS[:10], ROWS[10:])
  assert (
    len(own.records[own.config.data.train].problems) == 10
    and len(own.records[own.config.data.eval].problems) == 26
  )


def test_a_config_of_any_kind_is_accepted():
  with pytest.raises(
    UserError,
    match=r"config must be a config or nested dicts, got 'configs/tiny.py'; read a file with ",
  ):
    resolve_inputs("configs/tiny.py")
  config = default_config()
  config.steps = 7
  frozen = freeze(config)
  assert (
    resolve_inputs(config).config
    == resolve_inputs(frozen).config
    == resolve_inputs({"steps": 7}).config
    == frozen
  )


LIGHT = """
import sys, gtpo_jax
heavy = {"jax", "numpy", "flax", "transformers", "rich"} & set(sys.modules)
assert not heavy, heavy
assert "train" in dir(gtpo_jax) and gtpo_jax.__version__
try: gtpo_jax.trian
except AttributeError as error: assert "no attribute 'trian'" in str(error)
else: raise SystemExit(3)
from gtpo_jax import train
import gtpo_jax.loop as module, inspect, jax
assert train is module.train is gtpo_jax.train and "reward" in inspect.signature(train).parameters
assert type(train).__name__ == "function"
assert gtpo_jax.models.hf.save and gtpo_jax.default_config().steps
print(jax.config.jax_compilation_cache_dir)
"""


def test_the_import_is_light_and_jax_is_prepared(tmp_path):
  env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
  env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, "-c", LIGHT], env=env, capture_output=True, text=True, timeout=120
  )
  assert (done.returncode, done.stdout) == (0, f"{tmp_path}/gtpo_jax/xla\n"), done.stderr
