"""The tasks and the tables of the study of turns' credit."""

import numpy as np
import pytest
from credit_turns import TRAINED, TURN_ARMS, accuracies, tables
from turn_tasks import Chain, ThreeCalls, config_of

from gtpo_jax.environments.turns import Turn


def play(turns, numbers=(46, 37, 12, 25)):
  """The steps of a sum whose calls are given."""
  game = ThreeCalls()
  game.reset({"numbers": list(numbers), "answer": str(sum(numbers))}, 0)
  return [game.step(Turn(turn)) for turn in turns]


def test_three_calls_by_hand():
  steps = play(["46+37", "83+12", "25+95", "=120"])
  assert [step.messages for step in steps] == ["83", "95", "120", ()]
  assert [step.reward for step in steps] == [1, 1, 1, 0]
  assert [step.truth for step in steps] == [0, 0, 0, 0]
  assert [step.state for step in steps[:3]] == [
    "12 25 83 in 3 turns",
    "25 95 in 2 turns",
    "120 in 1 turns",
  ]
  assert [step.done for step in steps] == [False] * 3 + [True] and steps[-1].correct


@pytest.mark.parametrize(
  ("turns", "truths", "correct"),
  [
    (["46+37", "46+12", "12+25", "=120"], [0, -1, 0, 0], True),  # 46 is added already
    (["46+46", "92+37", "129+12", "=141"], [-1, 0, 0, 0], False),
    (["46+37", "83+12", "95+25", "=121"], [0, 0, 0, -1], False),
    (["46+37", "83+12", "95+25", "120+1"], [0, 0, 0, -1], False),
    (["what?"], [-1], False),
  ],
)
def test_what_a_wrong_turn_costs(turns, truths, correct):
  steps = play(turns)
  assert [step.truth for step in steps] == truths
  assert steps[-1].done and steps[-1].correct is correct


def test_the_teacher_of_chains_is_right_without_slips_and_errs_with_them():
  task = Chain()

  def right(index, slips, rng):
    row = task.problem(index).row
    game = ThreeCalls()
    game.reset(row, 0)
    turns = []
    while True:
      text = task.turn(index, turns, rng, slips)
      step = game.step(Turn(text))
      if step.done:
        return step.correct
      turns.append((text, step.messages))

  rng = np.random.default_rng(0)
  assert all(right(index, 0.0, rng) for index in range(50))
  assert 0.2 < np.mean([right(index, 1.0, rng) for index in range(300)]) < 0.35


def test_every_arm_of_a_task_has_a_config():
  for task, arms in TRAINED.items():
    for arm in arms:
      turns = config_of(task, TURN_ARMS[arm]).resolved_algorithm.recipe.turns
      assert bool(turns) == (not arm.startswith("outcome"))


def test_tables_by_hand():
  def run(accuracies, correct):
    curve = [{"accuracy": x} for x in (0.0, *accuracies)]
    return {"curve": curve, "evaluations": {"12": {"samples": 4, "correct": [correct]}}}

  outcome = {0: run([0.5, 0.5], 2), 1: run([0.4, 0.6], 2), 2: run([0.1, 0.3], 0)}
  state = {0: run([0.6, 0.8], 4), 1: run([0.6, 0.6], 2)}
  assert accuracies(outcome, 1) == pytest.approx([0.5, 0.5, 0.2])
  lines = tables({"guess31": {"outcome": outcome, "state": state}})
  first, second = lines[-2:]
  assert first.startswith("| outcome | 3 | 40.0 +- 17.3 |  |  |")
  # Of the differences 0.2 and 0.1, the mean is 0.15; t is 12.706 with one degree of freedom.
  assert "| +15.0 [-48.5, +78.5] over outcome |" in second
  assert second.endswith("| 75.0 +- 35.4 |")
