"""Scoring: verdicts, parts of the reward, and users' functions, whose failures never give a 0."""

import asyncio
import itertools
import sys
import threading
import time
from fractions import Fraction

import jax
import numpy as np
import pytest
from completions import completion
from toys import config_of

from gtpo_jax import algorithms
from gtpo_jax.config import default_config, freeze
from gtpo_jax.data.records import Problem, user
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.rewards import VERIFIERS
from gtpo_jax.rollout.scoring import pending as pending_module
from gtpo_jax.rollout.scoring.functions import import_function
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.runtime.errors import FunctionError, UserError
from gtpo_jax.runtime.signals import Stopped, Watchdog

PROBLEMS = [
  Problem("a", user("1+1?"), "2", "math"),
  Problem("b", user("12+3:"), "15", "last_number", {"hint": 7}),
]
BY_GROUP = dict(enumerate(PROBLEMS))
TEXTS = [[r"so \boxed{2}", "Answer: 3", "it is 2"], ["12+3=15", "12+3=5", "15"]]
LENGTHS = np.array([[4, 5, 12], [3, 4, 5]])
FINISHED = np.array([[True, True, True], [True, True, False]])

SEEN = []


def shorter(prompts, completions, answers, extras):
  SEEN.append((list(prompts), list(answers), list(extras)))
  return [-len(text) / 10 for text in completions]


def sometimes(prompts, completions, answers, extras):
  return [
    None if "Answer" in text else float("nan") if text == "15" else True for text in completions
  ]


def raises(prompts, completions, answers, extras):
  raise RuntimeError("no luck")


def hangs(prompts, completions, answers, extras):
  if answers[0] == "2":
    HANGING.wait(60)
  return [True] * len(completions)


HANGING = threading.Event()


def manager_of(name="gtpo", **changes):
  return RewardManager(config_of(**{"algorithm.name": name, **changes}))


def score_with(manager):
  """The scores of PROBLEMS and TEXTS, all at once."""
  verdicts = [
    manager.verify([problem] * len(texts), texts)
    for problem, texts in zip(PROBLEMS, TEXTS, strict=True)
  ]
  values = [
    manager.call_functions(problem, texts) for problem, texts in zip(PROBLEMS, TEXTS, strict=True)
  ]
  return manager.combine(np.array(verdicts), values, LENGTHS, FINISHED)


def score(name="gtpo", **changes):
  return score_with(manager_of(name, **changes))


def test_verifiers_by_kind_and_cut_off_completions():
  found = score()
  np.testing.assert_array_equal(found.correct, [[True, False, True], [True, False, False]])
  assert found.scored.all() and found.valid.all() and found.metrics == {"reward/no_verdict": 0.0}
  np.testing.assert_array_equal(found.reward, [[1, 0, 1], [1, 0, 0]])
  np.testing.assert_array_equal(score("dapo").reward, [[1, -1, 1], [1, -1, -1]])
  assert found.reward.dtype == np.float32 and (found.penalty == 0).all()


def test_parts_are_weighted_and_logged():
  found = score(**{"reward.parts": "correct*2,boxed*0.5,answer_line*-1,test_scoring:shorter"})
  text = [[-len(t) / 10 for t in row] for row in TEXTS]
  expected = (
    2 * np.array([[1, 0, 1], [1, 0, 0]])
    + 0.5 * np.array([[1, 0, 0], [0] * 3])
    - np.array([[0, 1, 0], [0] * 3])
    + np.array(text)
  )
  np.testing.assert_allclose(found.reward, expected, rtol=1e-6)
  assert found.metrics["reward/part/boxed"] == pytest.approx(1 / 6) and found.metrics[
    "reward/part/answer_line"
  ] == pytest.approx(1 / 6)
  assert found.metrics["reward/part/test_scoring:shorter"] == pytest.approx(np.mean(text))
  np.testing.assert_array_equal(found.correct, score().correct)  # correct is not the shaped reward


def test_gdpo_gets_each_part_and_its_weight():
  found = score("gdpo", **{"reward.parts": "correct*2,answer_line*-1"}).rewards
  np.testing.assert_array_equal(found.parts[..., 0], [[1, 0, 1], [1, 0, 0]])
  np.testing.assert_array_equal(found.parts[..., 1], [[0, 1, 0], [0, 0, 0]])
  np.testing.assert_array_equal(found.part_weights, [[2, -1], [2, -1]])
  assert found.parts.dtype == found.part_weights.dtype == np.float32
  assert score("grpo").rewards.parts is None


def test_parts_that_cancel_are_named_once(capfd):
  """In the first group, exactly the wrong completion has an answer line."""
  manager = manager_of("grpo", **{"reward.parts": "correct,answer_line"})
  np.testing.assert_array_equal(score_with(manager).reward[0], [1, 1, 1])
  score_with(manager)
  (line,) = capfd.readouterr().err.splitlines()
  assert "reward.parts = 'correct,answer_line' differ in a group whose sums are all equal" in line
  assert line.endswith("normalise each part with algorithm.name=gdpo")
  score("grpo", **{"reward.parts": "correct,answer_line*0.9"})
  score("gdpo", **{"reward.parts": "correct,answer_line"})
  score("gtpo", **{"reward.parts": "correct,answer_line"})  # only the verdict decides about a side
  assert not capfd.readouterr().err


def test_the_arguments_of_a_users_function():
  SEEN.clear()
  score(**{"reward.parts": "correct,test_scoring:shorter"})
  first = {"id": "a", "messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}
  second = {"id": "b", "messages": [{"role": "user", "content": "12+3:"}], "answer": "15"}
  assert [
    (["1+1?"] * 3, ["2"] * 3, [first] * 3),
    (["12+3:"] * 3, ["15"] * 3, [second | {"hint": 7}] * 3),
  ] == SEEN  # one call per problem


def test_completions_without_a_verdict_are_masked_and_counted(capfd):
  found = score(**{"reward.verifier": "test_scoring:sometimes"})
  np.testing.assert_array_equal(found.correct, [[True, False, True], [True, True, False]])
  np.testing.assert_array_equal(
    found.valid, [[True, False, True], [True, True, True]]
  )  # "15" was cut off, so it is wrong whatever the function says
  assert found.metrics["reward/no_verdict"] == 1
  assert "it returned nan" in capfd.readouterr().err
  part = score(**{"reward.parts": "correct,test_scoring:sometimes"})
  np.testing.assert_array_equal(part.valid, [[True, False, True], [True, True, False]])
  assert part.metrics["reward/no_verdict"] == 2


def test_a_failing_function_gives_no_verdicts_and_is_shown_once(capfd):
  manager = manager_of(**{"reward.verifier": "test_scoring:raises"})
  for _ in range(3):
    found = score_with(manager)
    # The sixth was cut off, so it is wrong.
    assert not found.correct.any() and found.metrics["reward/no_verdict"] == 5
    np.testing.assert_array_equal(found.valid, ~FINISHED)
  err = capfd.readouterr().err
  assert err.count("RuntimeError: no luck") == 1
  assert "reward function 'test_scoring:raises' failed" in err


def test_a_check_without_a_verdict_costs_only_its_completion(monkeypatch):
  """Verifiers say None where a worker was lost or a check took too long."""
  verify = lambda completions, *_: [None if "Answer" in text else True for text in completions]
  monkeypatch.setitem(VERIFIERS, "math", verify)
  found = score()
  np.testing.assert_array_equal(found.scored, [[True, False, True], [True] * 3])
  assert found.correct[0].tolist() == [True, False, True]
  assert found.metrics["reward/no_verdict"] == 1


def test_an_async_function_is_awaited():
  async def longer(prompts, completions, answers, extras):
    await asyncio.sleep(0)
    return [len(text) > 4 for text in completions]

  found = score_with(function_manager(longer))
  expected = [[len(text) > 4 for text in row] for row in TEXTS] & FINISHED
  np.testing.assert_array_equal(found.correct, expected)
  assert found.metrics["reward/no_verdict"] == 0


class Interruption(BaseException):
  pass


class Unprintable(BaseException):
  def __str__(self):
    raise ValueError("no text")


@pytest.mark.parametrize(
  ("error", "message"),
  [
    (asyncio.CancelledError(), "raised CancelledError"),
    (GeneratorExit(), "raised GeneratorExit"),
    (KeyboardInterrupt("a\nb"), "raised KeyboardInterrupt: a, which ends the run"),
    (Interruption("mine"), "raised Interruption: mine, which ends the run"),
    (Unprintable(), "raised Unprintable, which ends the run"),
  ],
)
def test_a_function_that_ends_the_program_is_named(error, message):
  pending = PendingRewards(
    function_manager(raising(error)), BY_GROUP, 1, lambda rows: ["2"] * len(rows)
  )
  pending.put([completion(i, 0, [1]) for i in range(2)])
  with pytest.raises(FunctionError) as caught:
    pending.result()
  assert message in str(caught.value) and "\n" not in str(caught.value)
  assert str(caught.value).startswith("reward function 'here:f' raised ")


def function_manager(function, **changes):
  return RewardManager(config_of(**{"reward.verifier": "here:f", **changes}), function)


def numbered(values):
  """A function that returns the first len(completions) of `values`."""
  return lambda prompts, completions, answers, extras: values[: len(completions)]


def test_numbers_that_are_cut_at_a_half_are_named_once(capfd):
  for parts, said in (("correct", 1), ("correct,verifier*0.5", 0)):
    manager = function_manager(numbered([0.3, 0.7, 1.0]), **{"reward.parts": parts})
    for _ in range(2):
      found = score_with(manager)
    np.testing.assert_array_equal(found.correct[0], [False, True, True])
    assert capfd.readouterr().err.count("returns numbers such as 0.3, but reward.parts") == said
  score_with(function_manager(numbered([0, 1, True])))
  assert not capfd.readouterr().err


def test_a_function_that_returns_nothing_is_told(capfd):
  score_with(function_manager(lambda prompts, completions, answers, extras: None))
  assert "returned None, not a list of 3 values; is a return missing?" in capfd.readouterr().err


def raising(error):
  """A function that raises an error."""

  def fails(prompts, completions, answers, extras):
    raise error

  return fails


class Number:
  def __init__(self, error):
    self._error = error

  def __float__(self):
    raise self._error


def endless(prompts, completions, answers, extras):
  while True:
    yield 1.0


def slow(prompts, completions, answers, extras):
  for _ in completions:
    time.sleep(0.3)
    yield 1.0


def one_by_one(prompts, completions, answers, extras):
  yield from (True for _ in completions)


@pytest.mark.parametrize(
  ("function", "scored", "message"),
  [
    (one_by_one, [True] * 3, ""),
    (numbered((1, 0, 1)), [True] * 3, ""),
    (numbered(np.array([1, 0, 1])), [True] * 3, ""),
    (numbered([np.float32(1), np.True_, Fraction(1, 2)]), [True] * 3, ""),
    (
      numbered([1e38, 0.0, 1.0]),
      [False, True, True],
      "it returned 1e+38; a value is at most 1e+15",
    ),
    (numbered([1.0, -(10**400), 1.0]), [True, False, True], "it returned -inf"),
    (numbered([1.0, 1.0, float("-inf")]), [True, True, False], "it returned -inf"),
    (numbered([None, 1.0, 1.0]), [False, True, True], ""),
    (numbered("111"), [False] * 3, "returned str, not a list of numbers"),
    (numbered(b"111"), [False] * 3, "returned bytes, not a list of numbers"),
    (lambda *lists: dict.fromkeys(range(3)), [False] * 3, "returned dict, not a list"),
    (lambda *lists: {1.0, 2.0, 3.0}, [False] * 3, "returned set, not a list"),
    (lambda *lists: 1.0, [False] * 3, "TypeError: 'float' object is not iterable"),
    (numbered([1j, 1j, 1j]), [False] * 3, "TypeError"),
    (numbered([Number(OSError("no float"))] * 3), [False] * 3, "OSError: no float"),
    (numbered([[1.0]] * 3), [False] * 3, "TypeError"),
    (numbered([1.0]), [False] * 3, "returned 1 values for 3 completions"),
    (numbered(["good"] * 3), [False] * 3, "returned 'good', not a number"),
    (raising(SystemExit("enough")), [False] * 3, "SystemExit: enough"),
    (raising(TimeoutError("it is away")), [False] * 3, "TimeoutError: it is away"),
    (endless, [False] * 3, "returned more than 3 values for 3 completions"),
    (slow, [False] * 3, "it took longer than 0.4 s"),
  ],
)
def test_unusual_return_values(function, scored, message, capfd):
  """Each completion gets a finite number or no verdict, and NumPy prints no warning."""
  config = {"reward.parts": "verifier", "reward.function_timeout_s": 0.4}
  manager = function_manager(function, **config)
  values = [manager.call_functions(PROBLEMS[0], TEXTS[0])]
  all_finished = np.ones((1, 3), bool)
  found = manager.combine(np.full((1, 3), np.nan), values, LENGTHS[:1], all_finished)
  np.testing.assert_array_equal(found.scored, [scored])
  assert np.isfinite(found.reward).all() and found.reward.dtype == np.float32
  assert found.metrics["reward/no_verdict"] == 3 - sum(scored)
  errors = capfd.readouterr().err
  assert message in errors and bool(message) == bool(errors)
  for thread in threading.enumerate():
    if thread.name == "gtpo reward function":  # was abandoned, and ends soon
      thread.join(10)


def test_a_weighted_sum_that_is_too_large_is_no_verdict(capfd):
  manager = function_manager(numbered([1e14, 10.0, 1e9]), **{"reward.parts": "verifier*1e15"})
  values = [manager.call_functions(PROBLEMS[0], TEXTS[0])]
  for _ in range(2):
    found = manager.combine(np.full((1, 3), np.nan), values, LENGTHS[:1], np.ones((1, 3), bool))
  assert not found.scored.any() and (found.reward == 0).all()
  (line,) = capfd.readouterr().err.splitlines()  # once, and the function is not blamed
  assert "the weighted sum of reward.parts = 'verifier*1e15' is over 1e+15 in size" in line
  assert "the part 'verifier' times its weight is up to 1e+29" in line
  assert "lower the weight" in line and "failed" not in line


def test_a_function_may_change_its_arguments():
  problem = Problem("a", user("1+1?"), "2", "math", {"tests": ["x"]})

  def vandal(prompts, completions, answers, extras):
    for extra in extras:
      extra["tests"].append("y")
    for values in (prompts, completions, answers):
      values.clear()
    return [1.0] * len(extras)

  texts = ["a", "b"]
  assert function_manager(vandal).call_functions(problem, texts) == {"": [1.0, 1.0]}
  assert problem.extra == {"tests": ["x"]} and texts == ["a", "b"]


def test_jax_settings_that_a_function_changes_are_restored(capfd):
  def doubles(prompts, completions, answers, extras):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.numpy.ones(1, float).dtype == np.float64
    return [1.0] * len(completions)

  before = jax.config.values
  try:
    assert function_manager(doubles).call_functions(PROBLEMS[0], TEXTS[0]) == {"": [1.0] * 3}
    assert jax.config.values == before
    errors = capfd.readouterr().err
    assert "reward function 'here:f' changed JAX's setting jax_" in errors
    assert len(errors.splitlines()) == 1
  finally:
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_default_matmul_precision", before["jax_default_matmul_precision"])


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("raise GeneratorExit('no')", "cannot be imported: GeneratorExit: no"),
    ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    ("x = = 1", "cannot be imported: SyntaxError"),
    ("import jax; jax.config.update('jax_enable_x64', True); f = max", ""),
  ],
)
def test_a_module_that_misbehaves_on_import(line, message, tmp_path, monkeypatch, capfd):
  (tmp_path / "harmful_reward.py").write_text(line)
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.delitem(sys.modules, "harmful_reward", raising=False)
  monkeypatch.chdir(tmp_path)
  if message:
    with pytest.raises(UserError) as caught:
      import_function("harmful_reward:f")
    assert message in str(caught.value) and "\n" not in str(caught.value)
  else:
    assert import_function("harmful_reward:f") is max
    assert not jax.config.jax_enable_x64
    assert "the module of reward function 'harmful_reward:f' changed" in capfd.readouterr().err


def test_a_function_that_hangs_is_abandoned(capfd):
  """Its problem has no verdict, the next one is scored, and nothing waits for its thread."""
  found = score(**{"reward.verifier": "test_scoring:hangs", "reward.function_timeout_s": 0.2})
  np.testing.assert_array_equal(found.scored, [[False, False, False], [True, True, True]])
  np.testing.assert_array_equal(found.correct, [[False, False, False], [True, True, False]])
  assert found.metrics["reward/no_verdict"] == 3
  assert "it took longer than 0.2 s (reward.function_timeout_s)" in capfd.readouterr().err
  left = [thread for thread in threading.enumerate() if thread.name == "gtpo reward function"]
  assert len(left) == 1 and left[0].daemon
  HANGING.set()
  left[0].join(10)
  assert not left[0].is_alive()


def rewards_with(parts, name):
  """Returns the rewards that the update gets for TEXTS with these `reward.parts`."""
  return score(name, **{"reward.parts": parts}).rewards


@pytest.mark.parametrize("name", ["gtpo", "gtpo_v1", "gtpo_v1_clipped", "gtpo_v2", "grpo_s"])
@pytest.mark.some(2)
def test_entropy_shaping_adds_the_other_parts_on_both_sides(name):
  """They are added like the length penalty: here 10 more characters cost 0.5."""
  plain = rewards_with("correct", name)
  graded = rewards_with("correct,test_scoring:shorter*0.5", name)
  lengths = np.array([[len(text) for text in row] for row in TEXTS], np.float32)
  np.testing.assert_array_equal(plain.penalty, np.zeros((2, 3), np.float32))
  np.testing.assert_allclose(graded.penalty, -0.05 * lengths, rtol=1e-6)
  np.testing.assert_allclose(graded.reward, plain.reward, atol=1e-6)
  algorithm = algorithms.make(name, contrast=False)
  signals = {
    "entropy": np.linspace(0.1, 2, 24, dtype=np.float32).reshape(2, 3, 4),
    "mask": np.ones((2, 3, 4), bool),
    "correct": plain.correct,
  }
  shaped = lambda rewards: np.sum(
    algorithm.shaped(**signals, reward=rewards.reward, penalty=rewards.penalty)[0], axis=0
  )
  change = shaped(graded) - shaped(plain)
  np.testing.assert_allclose(
    change, np.broadcast_to(-0.05 * lengths[..., None], change.shape), atol=1e-6
  )
  advantages = lambda rewards: np.asarray(
    algorithm.advantages(**signals, reward=rewards.reward, penalty=rewards.penalty)
  )
  assert np.abs(advantages(graded) - advantages(plain)).max() > 0.01


def test_without_entropy_shaping_the_reward_is_the_sum_of_the_parts():
  graded = rewards_with("correct,test_scoring:shorter*0.5", "grpo")
  lengths = np.array([[len(text) for text in row] for row in TEXTS])
  np.testing.assert_allclose(graded.reward, graded.correct - 0.05 * lengths, rtol=1e-6)
  assert not graded.penalty.any()


def test_penalties_and_filters():
  np.testing.assert_allclose(
    score(**{"sampling.max_tokens": 12, "algorithm.overlong_buffer": 10}).penalty,
    -np.clip((LENGTHS - 2) / 10, 0, 1),
    rtol=1e-6,
  )
  np.testing.assert_array_equal(score(**{"algorithm.overlong_filter": True}).valid, FINISHED)
  assert score(**{"algorithm.length_penalty": "group_relative"}).penalty.shape == (2, 3)


def test_the_dapo_math_rule():
  found = score(**{"reward.math_rule": "dapo"})
  np.testing.assert_array_equal(
    found.correct[0], [False, False, False]
  )  # no `Answer: 2` line anywhere


def test_every_verifier_keeps_order_and_length():
  rules = default_config().reward
  for name in ("math", "last_number"):
    assert VERIFIERS[name](["2", "3", r"\boxed{2}"], ["2", "2", "2"], [{}] * 3, rules) == [
      True,
      False,
      True,
    ]
    assert VERIFIERS[name]([], [], [], rules) == []


@pytest.mark.sandbox
@pytest.mark.slow
def test_programs_run_within_the_limits_of_the_config():
  extra = {"test_list": ["assert f() == 1"]}
  programs = [
    "def f(): return 1",
    "import time\ndef f():\n  time.sleep(6)\n  return 1",
    "def f():\n  x = bytearray(10**8)\n  return 1",
  ]

  def verdicts(**changes):
    config = default_config()
    config.reward.update(changes)
    return VERIFIERS["code"](programs, [""] * 3, [extra] * 3, freeze(config).reward)

  assert verdicts(code_timeout_s=60.0) == [True, True, True]
  assert verdicts(code_timeout_s=3.0) == [True, False, True]
  assert verdicts(code_timeout_s=60.0, code_memory_mb=64) == [True, True, False]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"reward.parts": "correct*2,boxed*0.5,test_scoring:shorter"},
    {"reward.verifier": "test_scoring:sometimes"},
    {"algorithm.length_penalty": "group_relative"},
  ],
)
def test_scoring_as_completions_end_equals_scoring_at_once(changes):
  """In any order, however many end together."""
  at_once = score(**changes)
  words = [word for row in TEXTS for word in row]
  for seed in range(4):
    rng = np.random.default_rng(seed)
    pending = PendingRewards(
      manager_of(**changes), BY_GROUP, 3, lambda rows: [words[row[0]] for row in rows]
    )
    ended = [
      completion(i, j, np.full(LENGTHS[i, j], 3 * i + j), bool(FINISHED[i, j]))
      for i in range(2)
      for j in range(3)
    ]
    ended = [ended[i] for i in rng.permutation(6)]
    cut = rng.integers(0, 7)
    for part in (ended[:cut], [], ended[cut:]):
      pending.put(part)
    found = pending.result()
    assert all(TEXTS[x.group][x.index] == x.text for x in ended)
    for name in ("correct", "scored", "reward", "penalty", "valid"):
      np.testing.assert_array_equal(getattr(found, name), getattr(at_once, name))
    assert found.metrics == pytest.approx(at_once.metrics, nan_ok=True)


def test_metrics_of_several_batches_are_those_of_one_batch():
  """As with dynamic sampling, whose batches have different numbers of groups."""
  manager = manager_of(**{"reward.parts": "correct,verifier,boxed"})
  rng = np.random.default_rng(0)
  for _ in range(50):
    n = int(rng.integers(2, 9))
    verdicts = rng.choice([0.0, 1.0, np.nan], (n, 3))
    finished = rng.random((n, 3)) < 0.8
    boxed = rng.choice([0.0, 1.0, np.nan], (n, 3))

    def tallies(rows, n=n, verdicts=verdicts, finished=finished, boxed=boxed):
      values = [{"boxed": boxed[row]} for row in np.arange(n)[rows]]
      shape = finished[rows]
      return manager.combine(verdicts[rows], values, np.ones_like(shape, int), shape).tallies

    cuts = [0, *np.sort(rng.integers(0, n + 1, 2)), n]
    parts = [tallies(slice(*pair)) for pair in itertools.pairwise(cuts)]
    metrics = Tallies.total(parts).metrics
    assert metrics == pytest.approx(tallies(slice(None)).metrics, nan_ok=True)
    mean = lambda x: x[~np.isnan(x)].mean() if (~np.isnan(x)).any() else np.nan
    for name, values in (("verifier", verdicts), ("boxed", boxed)):
      assert metrics[f"reward/part/{name}"] == pytest.approx(mean(values), nan_ok=True)
    without = np.isnan(boxed) | np.isnan(verdicts)  # a part of the reward is missing
    assert metrics["reward/no_verdict"] == without.sum()


def test_waiting_for_scores_can_be_stopped(monkeypatch):
  """Asking whether to stop is not progress: the watchdog still notices a verifier that hangs."""
  monkeypatch.setattr(pending_module, "POLL_S", 0.05)
  may_end = threading.Event()
  progress = []

  def read(rows):
    assert may_end.wait(60)
    return ["2"] * len(rows)

  answers = [False, True]
  watchdog = Watchdog(0, lambda: answers.pop(0))
  monkeypatch.setattr(watchdog, "_restart", progress.append)
  pending = PendingRewards(manager_of(), {0: PROBLEMS[0]}, 1, read)
  pending.put([completion(0, 0, [1])])
  with pytest.raises(Stopped):
    pending.result(watchdog)
  assert answers == [] and progress == []
  may_end.set()
  assert pending.result().correct.tolist() == [[True]]


def test_scoring_runs_while_others_are_sampled():
  """It runs on another thread; an exception there is raised by `result`."""
  writing = threading.Event()
  seen = []

  def read(rows):
    assert writing.wait(10)
    seen.append(threading.current_thread())
    raise LookupError("a fault of ours")

  pending = PendingRewards(manager_of(), BY_GROUP, 1, read)
  pending.put([completion(0, 0, [1])])
  assert not seen  # put returned before the completion was scored
  writing.set()
  with pytest.raises(LookupError, match="a fault of ours"):
    pending.result()
  assert seen[0] is not threading.current_thread()


def test_only_the_rewards_that_are_asked_for_are_awaited():
  """The other group is scored meanwhile, and keeps its scores until it is asked for."""
  may_end = threading.Event()

  def verify(prompts, completions, answers, extras):
    assert answers[0] != PROBLEMS[1].answer or may_end.wait(60)
    return [1.0] * len(completions)

  pending = PendingRewards(function_manager(verify), BY_GROUP, 1, lambda rows: ["2"] * len(rows))
  pending.put([completion(i, 0, [1]) for i in range(2)])
  assert pending.result(groups=[0]).correct.tolist() == [[True]]
  assert 0 not in pending and 1 in pending
  may_end.set()
  assert pending.result(groups=[1]).correct.tolist() == [[True]]
  assert 1 not in pending


@pytest.mark.parametrize(
  ("mode", "correct", "shares"),
  [("strict", [True, False, False], [1, 0.5, 0]), ("loose", [True, False, True], [1, 0.5, 1])],
)
def test_the_part_verifier_of_instructions_is_the_share_that_is_followed(mode, correct, shares):
  extra = {
    "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    "kwargs": [{}, {}],
  }
  problem = Problem("1", user("q"), "", "constraints", extra)
  parts = {"reward.parts": "correct,verifier*0.5", "reward.instructions": mode}
  manager = manager_of("dapo", **parts)
  scores = np.array(manager.score([problem] * 3, ['"a"', "a", 'Sure, yes:\n"a"']))[None]
  values = [manager.call_functions(problem, [""] * 3)]
  finished = np.ones((1, 3), bool)
  found = manager.combine(scores[..., 0], values, LENGTHS[:1], finished, numbers=scores[..., 1])
  np.testing.assert_array_equal(found.correct, [correct])
  np.testing.assert_allclose(found.reward[0], np.where(correct, 1, -1) + np.multiply(shares, 0.5))
  assert found.metrics["reward/part/verifier"] == pytest.approx(np.mean(shares))
