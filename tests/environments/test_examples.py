"""The environments and tools of the built-in tasks, and the teachers that play them."""

import numpy as np
import pytest

from gtpo_jax.data.tasks import make_task
from gtpo_jax.environments.examples.calculator import add
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.environments.tools import schema_of
from gtpo_jax.environments.turns import Turn


def play(player, number):
  """The guesses, the answers and the last step of a game."""
  game = Guess()
  game.reset({"answer": str(number)}, 0)
  turns = []
  while True:
    guess = player(turns)
    step = game.step(Turn(guess))
    if step.done:
      return [*(guess for guess, _ in turns), guess], step
    turns.append((guess, step.messages))


def test_a_player_who_halves_finds_31_of_32_numbers_in_four_guesses_on_average():
  task = make_task("guess")
  rng = np.random.default_rng(0)
  games = [play(lambda turns: task.turn(0, turns, rng, 0.0), number) for number in range(32)]
  assert sum(step.correct for _, step in games) == 31
  found = [step.info["guesses"] for _, step in games if step.correct]
  assert np.mean(found) == pytest.approx(np.dot([1, 2, 4, 8, 16], [1, 2, 3, 4, 5]) / 31)


def test_the_teacher_finds_fewer_and_so_does_one_who_slips_more():
  task = make_task("guess")
  rng = np.random.default_rng(0)

  def rate(slips):
    games = [play(lambda turns: task.turn(0, turns, rng, slips), i % 32) for i in range(1024)]
    return np.mean([step.correct for _, step in games])

  assert 0.35 <= rate(1.0) <= 0.5 < rate(0.5) < rate(0.0)


def test_the_teacher_asks_only_for_what_is_left_and_halves_short_ranges_without_an_error():
  task = make_task("guess")
  rng = np.random.default_rng(0)
  ends = 0
  for i in range(256):
    left = range(32)
    guesses = play(lambda turns: task.turn(0, turns, rng, 1.0), i % 32)[0]
    for guess in map(int, guesses):
      assert guess in left
      ends += guess in (left[0], left[-1]) and len(left) >= 12
      left = range(guess + 1, left[-1] + 1) if guess < i % 32 else range(left[0], guess)
  assert ends > 256


def test_both_parts_of_guess_have_every_number_once():
  task = make_task("guess")
  for ids in (task.train_ids, task.held_out_ids):
    assert sorted(int(task.problem(i).answer) for i in ids) == list(range(32))
  assert not set(task.train_ids) & set(task.held_out_ids)


def test_answers_to_guesses():
  game = Guess()
  game.reset({"answer": "20"}, 0)
  steps = [game.step(Turn(text)) for text in ("16", "24", "what?", "", "19")]
  assert [step.messages for step in steps] == ["higher", "lower", "a number", "a number", ()]
  assert len(steps) == 5 and steps[-1].done and steps[-1].correct is False
  assert play(lambda turns: "20", 20)[1].correct


def test_add():
  assert add("46+37+28") == "111"
  assert schema_of(add)["function"]["parameters"]["required"] == ["x"]
  for text in ("", "1+", "a+1", "9" * 10, "+".join(["1"] * 101)):
    with pytest.raises(ValueError, match="is no sum of whole numbers"):
      add(text)


def test_the_teacher_of_sums_calls_seldom_and_errs_without():
  task = make_task("calculator")
  rng = np.random.default_rng(0)
  first = {i: task.turn(i, [], rng, 1.0) for i in range(1000)}
  direct = {i: text for i, text in first.items() if "<tool_call>" not in text}
  assert 0.4 < 1 - len(direct) / len(first) < 0.5
  for i, text in direct.items():
    question, total = text.split("=")
    assert task.problem(i).messages[0]["content"] == f"{question}:"
    assert int(total) == int(task.problem(i).answer) - 10  # every sum needs a carry
    assert task.turn(i, [], rng, 0.0).startswith("<tool_call>")
  called = first.keys() - direct.keys()
  right = [i for i in called if f'"{task.problem(i).messages[0]["content"][:-1]}"' in first[i]]
  assert 0.4 < len(right) / len(called) < 0.6  # another number is typed into the others
  assert task.turn(right[0], [(first[right[0]], "\n83\n")], rng, 1.0) == "83"
