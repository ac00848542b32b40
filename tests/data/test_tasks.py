"""Synthetic tasks and their teachers."""

import re

import numpy as np
import pytest

from gtpo_jax.data.tasks import TASKS, make_task
from gtpo_jax.data.tasks.forks import CLOSE
from gtpo_jax.data.tasks.sentences import TOPICS, WORDS
from gtpo_jax.data.tasks.sums import Countdown, RunningSums
from gtpo_jax.data.tasks.task import HELD_OUT, MAX_PROBLEMS
from gtpo_jax.rewards import check_gold, countdown_correct, verify
from gtpo_jax.runtime.errors import UserError

ONE_TURN = [name for name, task in TASKS.items() if not hasattr(task, "turn")]
DIFFICULTIES = [
  ("sums", 0, 0),
  ("sums", 1, 9),
  ("sums", 6, 4),
  ("countdown", 0, 0),
  ("countdown", 2, 20),
  ("countdown", 4, 30),
  ("forks", 0, 0),
  ("forks", 2, 4),
  ("forks_confident", 5, 9),
  ("sentences", 0, 0),
  ("constraints", 0, 0),
  ("constraints", 3, 0),
]


def accuracy(task, slips, seed=0, count=1000):
  """Returns the teacher's accuracy on a random sample of training problems."""
  rng = np.random.default_rng(seed)
  problems = []
  texts = []
  for index in rng.choice(task.train_ids, count):
    problems.append(task.problem(index))
    texts.append(task.demonstration(index, rng, slips))
  answers = [problem.answer for problem in problems]
  extras = [problem.extra for problem in problems]
  return np.mean(verify(problems[0].kind, texts, answers, extras))


@pytest.mark.parametrize(("name", "terms", "largest"), DIFFICULTIES)
def test_a_teacher_without_slips_is_always_right(name, terms, largest):
  assert accuracy(make_task(name, terms, largest), slips=0.0, count=300) == 1


@pytest.mark.parametrize("name", ONE_TURN)
def test_fewer_slips_are_fewer_errors_and_all_leave_room_to_learn(name):
  """Groups must have correct and incorrect completions, and there must be errors to correct."""
  rates = [accuracy(make_task(name), slips) for slips in (0.25, 0.5, 1.0)]
  assert rates[0] > rates[1] + 0.1 > rates[2] + 0.2
  assert 0.10 <= rates[2] <= 0.45


@pytest.mark.parametrize(("name", "terms", "largest"), DIFFICULTIES)
def test_problems_are_pure_functions_of_their_number(name, terms, largest):
  task = make_task.__wrapped__(name, terms, largest)
  other = make_task(name, terms, largest)
  ids = np.random.default_rng(1).choice(task.size, 100)
  assert [task.problem(i) for i in ids] == [other.problem(i) for i in ids]
  for i in ids:
    text = task.demonstration(i, np.random.default_rng(i), 1.0)
    assert text == other.demonstration(i, np.random.default_rng(i), 1.0)
  assert len({task.problem(i).id for i in range(300)}) == 300


@pytest.mark.parametrize(("name", "terms", "largest"), DIFFICULTIES)
def test_the_parts_are_disjoint_and_about_one_in_eight_is_held_out(name, terms, largest):
  task = make_task(name, terms, largest)
  parts = np.concatenate([task.train_ids, task.held_out_ids])
  assert np.array_equal(np.sort(parts), np.arange(task.size))
  if terms != 2 or name == "sums":  # too few multisets of numbers or pairs for a rate
    assert abs(len(task.held_out_ids) / task.size - 1 / HELD_OUT) < 0.03


def test_sums_are_disjoint_as_questions():
  task = make_task("sums", 2, 5)
  questions = lambda ids: {task.problem(i).messages[0]["content"] for i in ids}
  train = questions(task.train_ids)
  held_out = questions(task.held_out_ids)
  assert len(train) + len(held_out) == task.size
  assert not train & held_out


@pytest.mark.parametrize(("terms", "largest"), [(2, 20), (3, 20), (4, 9), (6, 50)])
def test_countdown_is_disjoint_as_multisets_of_numbers(terms, largest):
  task = make_task("countdown", terms, largest)
  multisets = np.sort(task._numbers, axis=1)
  train, held_out = (
    {tuple(row) for row in np.unique(multisets[ids], axis=0).tolist()}
    for ids in (task.train_ids, task.held_out_ids)
  )
  assert train and held_out
  assert not train & held_out
  index = int(task.held_out_ids[0])
  assert task.problem(index).extra["numbers"] == multisets[index].tolist()


def test_sums_respect_their_difficulty():
  task = make_task("sums", 3, 6)
  for index in np.random.default_rng(2).choice(task.size, 300):
    problem = task.problem(index)
    text = problem.messages[0]["content"]
    assert re.fullmatch(r"\d\d(\+[1-6]){3}:", text)
    assert problem.answer == str(eval(text[:-1]))
    assert 10 <= int(problem.answer) <= 99
  numbers = np.array([task.numbers(i) for i in range(0, task.size, 7)])
  assert numbers[:, 0].min() == 10 and numbers[:, 1:].min() == 1 and numbers[:, 1:].max() == 6


def test_a_slip_forgets_one_carry_and_continues_from_there():
  task = make_task("sums")
  rng = np.random.default_rng(3)
  slips = 0
  for index in rng.choice(task.train_ids, 300):
    total, *addends = task.numbers(index)
    for step, addend in zip(task.demonstration(index, rng, 1.0).split(","), addends, strict=True):
      a, b, c = map(int, re.fullmatch(r"(\d\d)\+(\d)=(\d\d)", step).groups())
      assert (a, b) == (total, addend)
      assert c == a + b or (c == a + b - 10 and (a + b) // 10 > a // 10)
      slips += c != a + b
      total = c
  assert slips > 100


def test_countdown_respects_its_difficulty():
  task = make_task("countdown", 4, 12)
  rng = np.random.default_rng(4)
  for index in rng.choice(task.size, 300):
    problem = task.problem(index)
    question = problem.messages[0]["content"]
    listed, target = re.fullmatch(r"((?:\d+ ){3}\d+)=(\d+):", question).groups()
    numbers = [int(x) for x in listed.split()]
    assert numbers == sorted(numbers) == problem.extra["numbers"]
    assert all(1 <= x <= 12 for x in numbers)
    assert int(target) > 0 and target == problem.answer


def test_the_countdown_teacher_computes_correctly_even_if_it_misses_the_target():
  task = make_task("countdown")
  rng = np.random.default_rng(5)
  for index in rng.choice(task.train_ids, 300):
    text = task.demonstration(index, rng, 1.0)
    problem = task.problem(index)
    reached = int(text.split("=")[-1])
    assert countdown_correct(text, problem.extra["numbers"], reached)


def test_forks_respect_their_difficulty():
  task = make_task("forks", 4, 6, 3)
  rng = np.random.default_rng(6)
  lengths = set()
  for index in rng.choice(task.size, 300):
    problem = task.problem(index)
    pairs = problem.messages[0]["content"].removesuffix(":").split()
    assert [max(pair) for pair in pairs] == list(problem.answer)
    assert all(pair[0] != pair[1] and max(pair) <= "6" for pair in pairs)
    parts = re.findall(r"([A-Z]*):(\d)=(\d)", task.demonstration(index, rng, 1.0))
    assert all(
      {digit, copied} <= set(pair) for (_, digit, copied), pair in zip(parts, pairs, strict=True)
    )
    lengths |= {len(letters) for letters, _, _ in parts}
  assert lengths == set(range(7))
  plain = make_task("forks", 4, 6, 0)
  assert re.fullmatch(r"(\d=\d){4}", plain.demonstration(5, rng, 1.0))


def slip_rates(name):
  """Returns how often the teacher writes the smaller digit of close and of distant pairs."""
  task = make_task(name, filler=0)
  rng = np.random.default_rng(7)
  slips = {True: [], False: []}
  for index in rng.choice(task.train_ids, 2000):
    text = task.demonstration(index, rng, 1.0)
    for pair, digit in zip(task.pairs(index), text[::3], strict=True):
      slips[abs(pair[0] - pair[1]) <= CLOSE].append(int(digit) == min(pair))
  return np.mean(slips[True]), np.mean(slips[False])


def test_one_teacher_of_forks_hesitates_and_the_other_is_sure():
  assert np.allclose(slip_rates("forks"), 0.4, atol=0.04)
  assert np.allclose(slip_rates("forks_confident"), (0.9, 0.0), atol=0.03)


@pytest.mark.parametrize(("terms", "largest", "filler"), [(9, 9, 2), (3, 10, 2), (3, 9, 17)])
def test_forks_reject_a_difficulty_out_of_bounds(terms, largest, filler):
  with pytest.raises(UserError, match=f"forks needs.*got {terms}, {largest} and {filler}"):
    make_task("forks", terms, largest, filler)


@pytest.mark.parametrize(("terms", "largest"), [(-1, 9), (4, 10), (4, -2), (10, 9), (90, 1)])
def test_sums_reject_a_difficulty_that_leaves_no_two_digit_total(terms, largest):
  with pytest.raises(UserError, match=r"data\.terms") as error:
    make_task("sums", terms, largest)
  assert str(terms) in str(error.value) and str(largest) in str(error.value)


@pytest.mark.parametrize(("terms", "largest"), [(1, 20), (7, 20), (3, 2), (3, 51)])
def test_countdown_rejects_a_difficulty_out_of_bounds(terms, largest):
  with pytest.raises(UserError, match=f"got {terms} and {largest}"):
    make_task("countdown", terms, largest)


@pytest.mark.parametrize(
  ("name", "terms", "largest"),
  [("sums", 1, 1), ("sums", 89, 1), ("countdown", 2, 3), ("countdown", 6, 3)],
)
def test_a_difficulty_has_problems_on_both_sides_or_is_rejected(name, terms, largest):
  try:
    task = make_task(name, terms, largest)
  except UserError as error:
    assert str(largest) in str(error)  # the message names the value
    return
  assert len(task.train_ids) > 0, "nothing to learn from"
  assert len(task.held_out_ids) > 0, "nothing to evaluate on"


def test_a_large_space_is_sampled_always_in_the_same_way():
  task = RunningSums(44, 2)
  assert MAX_PROBLEMS * 0.9 < task.size <= MAX_PROBLEMS
  assert abs(len(task.held_out_ids) / task.size - 1 / 8) < 0.01
  problems = [task.problem(i) for i in (0, 1, task.size - 1)]
  assert len({problem.messages[0]["content"] for problem in problems}) == 3
  again = RunningSums(44, 2)
  assert problems == [again.problem(i) for i in (0, 1, task.size - 1)]


def test_zero_selects_the_tasks_own_default():
  default = RunningSums()
  sums = make_task("sums")
  assert (sums.terms, sums.largest) == (default.terms, default.largest)
  countdown = make_task("countdown", 4)
  assert (countdown.terms, countdown.largest) == (4, Countdown().largest)


def test_an_unknown_task_names_the_nearest():
  with pytest.raises(UserError, match="unknown task 'countdwn', did you mean 'countdown'"):
    make_task("countdwn")


def test_sentences_are_about_a_topic_and_a_word():
  task = make_task("sentences")
  topics = set(TOPICS.split())
  words = set(WORDS.split())
  assert task.size == len(topics) * len(words) and topics.isdisjoint(words)
  problem = task.problem(3)
  assert problem.messages[-1]["content"] == (
    "Write one short sentence about an ant. Use the word blanket in it."
  )
  assert problem.extra == {"topic": "ant", "word": "blanket"} and problem.kind == "sentence"
  with pytest.raises(UserError, match=r"data\.terms has no effect with the task 'sentences'"):
    make_task("sentences", terms=3)


def test_constraints_are_one_to_three_instructions():
  task = make_task("constraints")
  problem = task.problem(4)
  assert problem.kind == "constraints"
  assert problem.answer == ", ".join(problem.extra["instruction_id_list"])
  problems = [task.problem(index) for index in range(300)]
  assert {len(problem.extra["kwargs"]) for problem in problems} == {1, 2, 3}
  names = {name for problem in problems for name in problem.extra["instruction_id_list"]}
  assert len(names) == 11
  for problem in problems:
    check_gold("constraints", problem.answer, problem.extra)
  two = make_task("constraints", terms=2)
  assert {len(two.problem(index).extra["kwargs"]) for index in range(50)} == {2}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"largest": 3}, r"data\.largest has no effect with the task 'constraints'; leave it at 0"),
    ({"terms": 4}, r"the task 'constraints' needs data\.terms in 0\.\.3, got 4"),
  ],
)
def test_constraints_refuse_other_difficulties(settings, message):
  with pytest.raises(UserError, match=message):
    make_task("constraints", **settings)


def test_equal_constraints_are_in_the_same_part():
  task = make_task("constraints", terms=1)
  prompts = lambda ids: {task.problem(index).messages[-1]["content"] for index in ids.tolist()}
  assert prompts(task.train_ids).isdisjoint(prompts(task.held_out_ids))
