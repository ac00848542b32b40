"""The environments and tools of the built-in tasks, and the teachers that play them."""

import collections

import numpy as np
import pytest

from gtpo_jax.data.tasks import make_task
from gtpo_jax.environments.environment import Player
from gtpo_jax.environments.examples.calculator import Calculator, calculator
from gtpo_jax.environments.examples.guess import Guess, Left
from gtpo_jax.environments.tools import schema_of
from gtpo_jax.environments.turns import Episode, ToolCall, Turn
from gtpo_jax.runtime.errors import UserError


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


def best(low, high, guesses):
  """The share of the numbers that the best player finds, by trying all guesses."""
  if high < low or not guesses:
    return 0.0
  return max(value(low, high, guesses, guess, best) for guess in range(low, high + 1))


def value(low, high, guesses, guess, later):
  """The share of the numbers that is found with a guess; `later` says what is found then."""
  total = float(low <= guess <= high)
  for a, b in ((low, min(high, guess - 1)), (max(low, guess + 1), high)):
    total += max(0, b - a + 1) * later(a, b, guesses - 1)
  return total / (high - low + 1)


@pytest.mark.parametrize("largest", [3, 7, 10])
def test_the_truth_of_a_guess_is_what_it_costs_the_best_player(largest):
  left = Left.begin({"largest": largest})
  assert left.found_by_best / left.numbers == best(0, largest, left.guesses)
  for guess in range(largest + 1):
    truth = value(0, largest, left.guesses, guess, best) - best(0, largest, left.guesses)
    game = Guess()
    game.reset({"answer": "1", "largest": largest}, 0)
    assert game.step(Turn(str(guess))).truth == pytest.approx(truth)


def test_truths_of_a_game_by_hand():
  """Of 0 to 31, 31 are found. After 16, higher, so are all of 17 to 31. A guess of 31 then leaves
  14 numbers and three guesses, with which 7 are found; what is no number leaves as many.
  """
  game = Guess()
  game.reset({"answer": "20"}, 0)
  truths = [game.step(Turn(text)).truth for text in ("16", "31", "what?", "9")]
  assert truths == pytest.approx([0, (1 + 7 - 15) / 15, (3 - 7) / 14, (1 - 3) / 14])


def test_truths_by_the_policy_equal_those_of_all_its_games():
  """A policy that guesses 1, 2 or 7 at first, and then one of two numbers that are left.

  The batch has every game as often as the policy plays it. The value of a state is the share of
  the games through it that are won, which is computed from the games alone.
  """
  rows = [{"answer": str(number), "largest": 7} for number in range(8)]

  def games(row, turns=(), ways=1):
    """The games of a policy against a number, each as often as it is played of 3 * 2 * 2."""
    game = Guess()
    game.reset(row, 0)
    left = list(range(8))
    for guess in turns:
      step = game.step(Turn(str(guess)))
      if step.done:
        yield turns, step.correct, 12 // ways
        return
      left = [x for x in left if (x > guess if step.messages == "higher" else x < guess)]
    for guess in (1, 2, 7) if not turns else (left[0], left[-1]):
      yield from games(row, (*turns, guess), ways * (2 if turns else 3))

  played = [
    [game for turns, correct, times in games(row) for game in [(turns, correct)] * times]
    for row in rows
  ]
  episode = lambda turns: Episode(
    tuple(Turn(str(guess)) for guess in turns), "", 0.0, (), None, True, 1, 0.0, {}
  )
  got = Guess.policy_truth(rows, [[episode(turns) for turns, _ in group] for group in played])
  won = collections.defaultdict(list)
  walks = []
  for number, group in enumerate(played):
    for turns, correct in group:
      low, high = 0, 7
      walk = []
      for i, guess in enumerate(turns):
        walk.append(((low, high, i), (low, high, i, guess)))
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)
      for keys in walk:
        for key in keys:
          won[key].append(correct)
      walks.append(walk)
  expected = [[np.mean(won[b]) - np.mean(won[a]) for a, b in walk] for walk in walks]
  flat = [game for group in got for game in group]
  for one, other in zip(flat, expected, strict=True):
    assert one == pytest.approx(other, abs=1e-9)
  assert max(map(max, flat)) > 0.01 and min(map(min, flat)) < -0.01


def test_guessing_up_to_127():
  task = make_task("guess", largest=127)
  row = task.problem(100).row
  assert row["largest"] == 127 and row["messages"][0]["content"] == "0-127?"
  game = Guess()
  game.reset(row, 0)
  turns = []
  step = None
  while step is None or not step.done:
    guess = task.turn(100, turns, np.random.default_rng(0), 0.0)
    step = game.step(Turn(guess))
    assert step.truth == 0
    turns.append((guess, step.messages))
  assert step.correct and len(turns) <= 7
  with pytest.raises(UserError, match=r"data.largest must be from 3 to 99999 for guess, got 2"):
    make_task("guess", largest=2)


def test_add():
  add = Calculator().add
  assert add("46+37+28") == "111"
  assert schema_of(add)["function"]["parameters"]["required"] == ["x"]
  for text in ("", "1+", "a+1", "9" * 10, "+".join(["1"] * 101)):
    with pytest.raises(ValueError, match="is no sum of whole numbers"):
      add(text)


def test_truths_of_sums_by_hand():
  """46+37 is 83. A turn starts with + if it is a call; it may be one of several."""

  def truths(*turns):
    schemas = [schema_of(add) for add in calculator.unbound]
    player = Player(calculator, [], schemas, "tool", 2)
    player.reset({"answer": "83"}, 0)
    found = []
    for text in turns:
      calls = tuple(ToolCall("add", {"x": x}) for x in text.split(",")) if "+" in text else ()
      found.append(player.step(Turn("" if calls else text, calls=calls)).truth)
    player.leave()
    return found

  assert truths("46+37", "83") == [0, 0]
  assert truths("46+73", "119") == [-1, 0]
  assert truths("46+37", "73") == [0, -1]
  assert truths("the sum is 83.") == [0]
  assert truths("73") == truths("what?") == truths("") == [-1]
  assert truths("46+x", "83") == truths("46+73", "83") == [-1, 1]
  assert truths("46+37", "46+x", "83") == [0, -1, 1]
  assert truths("46+73,46+37") == [0] and truths("46+37,46+73") == [-1]


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
