"""Runs with agents, environments, drawing by difficulty and teachers that are killed and stopped.

They end as if nothing had happened, in one process and in two.
"""

import re

import numpy as np
import orbax.checkpoint
import pytest
from processes import PLAIN, SETTINGS, read_result, start, start_two
from toys import save_llama

from gtpo_jax.data.chat import load_chat

AGENTS = {
  **SETTINGS,
  "steps": 3,
  "algorithm.tis_cap": 2.0,
  "env.agent": "run:player",
  "env.workers": 16,
  "eval.every": 3,
  "eval.problems": 2,
  "eval.batch": 2,
  "reward.verifier": "",
  "sampling.max_tokens": 96,
  "sampling.chunk": 3,
  "checkpoint.every": 1,
}
EPISODES = {
  **PLAIN,
  "steps": 4,
  "algorithm.name": "gtpo",
  "algorithm.turn_credit": "state",  # rewards and states of turns are kept with unfinished groups
  "reward.parts": "correct,env*0.5",
  "algorithm.tis_cap": 2.0,
  "env.make": "run:Oracle",
  "env.max_turns": 4,
  "eval.every": 0,
  "reward.verifier": "",
  "sampling.max_tokens": 48,
  "sampling.stop": '("1", "2", "3")',  # a random policy rarely draws a stop token
  "sampling.staleness": 1,
  "sampling.slots": 6,
  "sampling.chunk": 3,
  "checkpoint.every": 1,
}
WITHOUT_TURN_CREDIT = {key: x for key, x in EPISODES.items() if key != "algorithm.turn_credit"}
EXPLORED = {"data.difficulty": "explore", "data.largest": 9}
EXPLORE = SETTINGS | EXPLORED
RUNS = {
  "agents": AGENTS,
  "episodes": EPISODES,
  **{
    f"episodes, {name}": WITHOUT_TURN_CREDIT | {"algorithm.name": name}
    for name in ("gigpo", "turn_return", "mt_grpo")
  },
  "episodes, gated delta nets": EPISODES | {"model.preset": "tiny-delta"},
  "difficulty": EXPLORE,
  "difficulty, plain": PLAIN | EXPLORED | {"algorithm.name": "gtpo"},
  "muon": SETTINGS | {"optimizer.name": "muon"},
  "difficulty, stale": EXPLORE | {"sampling.staleness": 1},
}
IN_A_TURN = [("kill:turn:50", -9), ("term:turn:25", 143)]
WHILE_EXPLORING = [
  (f"kill:{point}", -9)
  for point in ("sampling:2", "reward:3", "update:1", "saving:1", "committed:1")
]


def result_of(workdir):
  """Returns the result of a run without the snapshots of episodes, which contain seconds."""
  rows, samples, step, leaves = read_result(workdir)
  leaves["leftovers"].pop("['snapshots']", None)
  return rows, samples, step, leaves


def check_undisturbed(name, rows, samples, step, leaves):
  """Asserts that a run without a fault does what it is about."""
  assert step == RUNS[name]["steps"] == rows[-1]["step"] and leaves["leftovers"]
  most = lambda key: max(row.get(key, 0) for row in rows)
  if name == "agents":
    assert most("groups/kept") > 0
    assert all(row["env/conversations"] == 2 for row in rows[1:])
    assert all(row["mismatch/max_abs_logp"] < 1e-4 for row in rows[1:])
    assert all(row["env/stop/env_done"] == 1 for row in rows[1:])
    assert any(len(sample["turns"]) == 3 for sample in samples)
  elif name.startswith("episodes"):  # some of which go on in the next step
    assert most("groups/unfinished") > 0 and most("env/turns") > 1.3
    assert all(0 < row["truth/turn_known/best"] < 1 for row in rows[1:])
  elif name != "muon":
    assert 0 < rows[-1]["difficulty/tried"] < 1 and rows[-1]["difficulty/repeated"] > 0


@pytest.mark.parametrize(
  ("name", "events"),
  [
    pytest.param("episodes", IN_A_TURN, marks=pytest.mark.slow),
    *(
      pytest.param(
        name,
        WHILE_EXPLORING if name.startswith(("difficulty", "muon")) else IN_A_TURN,
        marks=pytest.mark.manual,
      )
      for name in RUNS
      if name != "episodes"
    ),
  ],
)
def test_a_run_that_is_killed_and_stopped_ends_alike(name, events, tmp_path):
  whole = start(tmp_path / "whole", "-", RUNS[name])
  assert whole.returncode == 0, whole.stderr
  check_undisturbed(name, *result_of(tmp_path / "whole"))
  for event, code in events:
    stopped = start(tmp_path / "run", event, RUNS[name])
    assert stopped.returncode == code, (event, stopped.stdout, stopped.stderr)
    assert "Traceback" not in stopped.stderr, (event, stopped.stderr)
  done = start(tmp_path / "run", "-", RUNS[name])
  assert done.returncode == 0 and "damaged" not in done.stdout, done.stderr
  assert result_of(tmp_path / "run") == result_of(tmp_path / "whole")


AGENTS_IN_FLIGHT = {
  **{key: x for key, x in AGENTS.items() if key != "batch.max_gen_batches"},
  "algorithm.name": "gtpo",
  "env.agent": "run:slow_player",
  "sampling.staleness": 1,
  "sampling.slots": 6,
  "sampling.chunk": 3,
  "steps": 6,
}
KILLS_IN_FLIGHT = [  # ordered so that each point can still be reached after the earlier kills
  ("kill:turn:60", -9),
  ("term:chunk:40", 143),
  ("kill:reward:2", -9),
  ("kill:evaluation chunk:2", -9),
  ("kill:update:2", -9),
  ("kill:saving:1", -9),
  ("term:turn:20", 143),
  ("kill:written:1", -9),
  ("kill:committed:1", -9),
  ("kill:metrics:1", -9),
]


@pytest.mark.parametrize(
  "events",
  [
    pytest.param(KILLS_IN_FLIGHT[:2], marks=pytest.mark.slow),
    pytest.param(KILLS_IN_FLIGHT, marks=pytest.mark.manual),
  ],
  ids=["two", "ten"],
)
def test_agents_in_flight_begin_again_after_each_kill(events, tmp_path):
  """No group is lost, trained on twice or older than allowed, and the run names what it repeats."""
  settings = AGENTS_IN_FLIGHT
  named = 0
  for event, code in [*events, ("-", 0)]:
    done = start(tmp_path / "run", event, settings, GRACE_S="0.003")
    assert done.returncode == code, (event, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and "damaged" not in done.stdout, (event, done.stderr)
    named += "their groups begin again: " in done.stdout
  assert named
  rows, _, step, _ = result_of(tmp_path / "run")
  assert [row["step"] for row in rows] == list(range(step + 1)) and step == 6
  assert all(row["staleness/max"] <= 1 for row in rows[1:])
  assert max(row["groups/unfinished"] for row in rows[1:]) > 0
  checkpoint = tmp_path / "run" / "checkpoints" / "6"
  left = orbax.checkpoint.PyTreeCheckpointer().restore(checkpoint / "leftovers")
  kept = int(left["count"])
  n = settings["batch.prompts"]
  assert int(left["begun"]) == 6 * n + kept
  places = {tuple(place) for place in np.asarray(left["place"])[:kept].tolist()}
  assert len(places) == kept and all(k * n + i < left["begun"] for k, i in places)


@pytest.mark.slow
def test_two_processes_with_agents_in_flight_have_the_same_tokens(tmp_path, monkeypatch):
  """Only the first has agents. It tells the other once a chunk what they ask for."""
  monkeypatch.setenv("TELL_TOKENS", "1")
  monkeypatch.setenv("GRACE_S", "0.003")
  settings = AGENTS_IN_FLIGHT | {"steps": 3, "eval.every": 0}
  codes, printed = start_two(tmp_path / "run", "-", 0, settings)
  assert codes == [0, 0], printed
  first, second = (re.findall(r"tokens (\d+), exchanges (\d)", text) for text in printed)
  assert len(first) == 3 and first == second
  assert {most for _, most in first} == {"1"}
  rows = read_result(tmp_path / "run")[0]
  assert max(row.get("groups/unfinished", 0) for row in rows) > 0


def two(workdir, settings, event="-", victim=0):
  """Runs two processes; returns the result, or None after a fault of the victim."""
  codes, printed = start_two(workdir, event, victim, settings)
  assert "damaged" not in printed[0]
  if event == "-":
    assert codes == [0, 0], printed
    return result_of(workdir)
  assert codes[victim] == -9 and codes[1 - victim] not in (0, 2), (codes, printed)
  return None


@pytest.mark.manual
@pytest.mark.parametrize(
  ("name", "events"),
  [
    ("agents", [("kill:turn:50", 0)]),
    ("episodes", [("kill:turn:50", 0)]),
    ("episodes, gated delta nets", [("kill:turn:50", 0)]),
    ("difficulty", [("kill:sampling:2", 1), ("kill:saving:1", 0)]),
  ],
)
def test_two_processes_do_the_same_also_after_one_is_killed(name, events, tmp_path):
  """Only the first calls agents and environments. The first step's samples are one process's."""
  whole = two(tmp_path / "whole", RUNS[name])
  if name != "difficulty":
    one = start(tmp_path / "one", "-", RUNS[name] | {"steps": 1})
    assert one.returncode == 0, one.stderr
    assert whole[1][:4] == result_of(tmp_path / "one")[1][:4]
  for event, victim in events:
    two(tmp_path / "run", RUNS[name], event, victim)
  assert two(tmp_path / "run", RUNS[name]) == whole


@pytest.mark.manual
@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_two_processes_with_a_teacher_equal_one_and_resume(divergence, tmp_path):
  """One process with two devices samples the same completions and moves to the same policy."""
  save_llama(tmp_path / "llama", load_chat().tokenizer)
  settings = PLAIN | {
    "steps": 3,
    "algorithm.name": "opd",
    "teacher.path": tmp_path / "llama",
    "distill.divergence": divergence,
    "eval.every": 0,
    "log.tensorboard": False,
    "checkpoint.every": 1,
  }
  done = start(tmp_path / "one", "-", settings, JAX_NUM_CPU_DEVICES="2")
  assert done.returncode == 0, done.stderr
  rows, samples, step, _ = result_of(tmp_path / "one")
  whole = two(tmp_path / "two", settings)
  assert step == whole[2] == 3
  assert [x["completion"] for x in whole[1]] == [x["completion"] for x in samples]
  for row, expected in zip(whole[0][1:], rows[1:], strict=True):
    assert row.keys() == expected.keys()
    assert expected["update/empty"] == 0 and abs(expected["distill/divergence"]) > 1e-3
    for name in ("loss", "grad_norm", "distill/divergence", "entropy/mean"):
      np.testing.assert_allclose(row[name], expected[name], rtol=1e-4, atol=1e-6)
  two(tmp_path / "run", settings, "kill:update:1", 1)
  two(tmp_path / "run", settings, "kill:saving:2", 0)
  assert two(tmp_path / "run", settings) == whole
