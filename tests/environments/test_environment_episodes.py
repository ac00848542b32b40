"""Episodes without an engine: turns in, observations and ends out."""

import asyncio
import dataclasses
import json
import math
import random
import sys
import threading
import time

import pytest
from families import family
from own_environments import add

from gtpo_jax.environments.environment import add_to_prompt
from gtpo_jax.environments.environment_episode import Environments
from gtpo_jax.environments.episodes import Episodes, saved_writers
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.turns import Episode, Step, Stop, Turn
from gtpo_jax.environments.writers import Ask, Drawn, Recorded
from gtpo_jax.runtime.errors import FunctionError, UserError

GROUP = (0, 3)
SEED = 5
LEFT = 500


async def slow_add(a: int, b: int) -> int:
  """Adds.

  Args:
    a: a number.
    b: another.
  """
  await asyncio.sleep(0.001)
  return a + b


class Guess:
  """The model guesses a number."""

  def reset(self, row, seed):
    self.number = row["number"]
    row["number"] = None  # the row is a copy
    return f"Guess, {seed}."

  def step(self, turn):
    guess = int(turn.text)
    if guess == self.number:
      return Step(done=True, correct=True, reward=1.0)
    return Step(
      "higher" if guess < self.number else "lower",
      reward=-0.125,
      info={"distance": abs(guess - self.number)},
    )


class Play:
  """Episodes with a model that writes what it is told."""

  def __init__(
    self, environment=None, tools=(), row=None, size=1, name="qwen2.5", cut=str, **limits
  ):
    self.chat = family(name)
    rules = Environments(self.chat, environment, tools, limits=EpisodeLimits(**limits), cut=cut)
    self.episodes = Episodes(rules)
    self.row = {"number": 11} if row is None else row
    self.begin(self.row, size)
    self.first = self.episodes.poll()

  def begin(self, row, size, group=GROUP):
    """Begins a group, and waits until it is open."""
    self.episodes.begin(group, row, SEED, [Recorded() for _ in range(size)])
    self.opened = self.open()

  def restore(self, row, seed, snapshot, group=GROUP):
    """Returns how a group opens that was saved."""
    self.episodes.begin(group, row, seed, saved_writers(snapshot))
    return self.open()

  def open(self, timeout_s=10.0):
    """Returns the group that opens next, what is added to its prompt, and why it differs."""
    until = time.monotonic() + timeout_s
    while not (opened := self.episodes.opened()) and time.monotonic() < until:
      self.episodes.wait(0.2)
    (group,) = opened
    return group

  def events(self, timeout_s=10.0):
    """Returns the next events."""
    until = time.monotonic() + timeout_s
    while not (events := self.episodes.poll()) and time.monotonic() < until:
      self.episodes.wait(0.2)
    return events

  def end_turn(self, text, index=0, tokens_left=LEFT, finished=True):
    self.episodes.answer(GROUP, index, Drawn(self.chat.encode(text), finished, tokens_left))

  def say(self, text, index=0, tokens_left=LEFT, finished=True, end="<|im_end|>"):
    """Ends a turn; returns the observation as text, or the episode."""
    self.end_turn(text + end, index, tokens_left, finished)
    ((group, place, event),) = self.events()
    assert (group, place) == (GROUP, index)
    return event if isinstance(event, Episode) else self.chat.tokenizer.decode(event.tokens)


def calling(*calls):
  return "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in calls
  )


def user_message(text):
  return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def tool_messages(*texts):
  inside = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
  return user_message(inside)


def test_the_text_of_a_turn_has_no_stop_string():
  play = Play(Guess, cut=lambda text: text.partition("!")[0])
  assert play.say("5!", end="") == "<|im_end|>" + user_message("higher")
  episode = play.say("11! 12")
  assert [turn.text for turn in episode.turns] == ["5", "11"] and episode.correct is True


def test_an_environment_answers_turns_until_it_is_done():
  play = Play(Guess)
  assert play.opened == (GROUP, "Guess, 5.", "")
  assert play.say("5") == user_message("higher")
  assert play.say("15") == user_message("lower")
  episode = play.say("11")
  assert [turn.text for turn in episode.turns] == ["5", "15", "11"]
  assert [turn.index for turn in episode.turns] == [0, 1, 2]
  assert all(turn.tokens_left == LEFT for turn in episode.turns)
  assert episode.stop == "env_done" and episode.text == "11"
  assert episode.correct is True and episode.scored
  assert episode.rewards == (-0.125, -0.125, 1.0) and episode.reward == 0.75
  assert episode.info == {"distance": 4.0}
  assert episode.tokens == sum(len(play.chat.encode(x + "<|im_end|>")) for x in ("5", "15", "11"))
  assert play.row == {"number": 11}
  assert play.episodes.results(GROUP) == [episode]


@pytest.mark.parametrize("tool", [add, slow_add])
def test_tools_answer_calls_and_a_turn_without_calls_is_the_answer(tool):
  play = Play(tools=[tool])
  assert play.opened[1] == ""
  name = tool.__name__
  assert play.say(calling((name, {"a": 2, "b": 3}))) == tool_messages("5")
  answer = play.say(calling((name, {"a": 1, "b": 1}), (name, {"a": "x", "b": 1}), ("ad", {})))
  assert answer.startswith(tool_messages("2").removesuffix("<|im_end|>\n<|im_start|>assistant\n"))
  assert f'Error: {name}: a must be of type integer, got "x"' in answer
  assert "Error: there is no tool 'ad'" in answer
  episode = play.say("So it is 5.")
  assert episode.stop is Stop.ANSWERED and episode.text == "So it is 5."
  assert episode.correct is None and episode.scored and episode.reward == 0
  assert episode.calls == 4 and episode.info == {"failed_calls": 2.0}


def test_tools_and_an_environment_together():
  play = Play(Guess, [add])
  assert play.say(calling(("add", {"a": 2, "b": 3}))) == tool_messages("5")
  assert play.say("5") == user_message("higher")
  assert play.say("11").stop is Stop.ENV_DONE


def test_results_as_messages_of_the_user():
  play = Play(tools=[add], role="user", parallel_calls=2)
  pair = ("add", {"a": 2, "b": 3})
  reason = "Error: not run, because a turn may have at most 2 calls"
  assert play.say(calling(pair, pair, pair)) == user_message(f"5\n\n5\n\n{reason}")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_families(name):
  play = Play(tools=[add], name=name)
  end = play.chat.tokenizer.eos_token
  text = {
    "qwen3": calling(("add", {"a": 2, "b": 3})),
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "abcdefghi"}]',
  }[name]
  observation = play.say(text, end="<|eom_id|>" if name == "llama3" else end)
  shown = {"qwen3": "<tool_response>\n5\n</tool_response>", "llama3": '"5"'}
  assert shown.get(name, '{"content": 5, "call_id": "abcdefghi"}') in observation
  assert play.say("5", end=end).stop is Stop.ANSWERED


@pytest.mark.parametrize(
  ("limits", "turns", "stop"),
  [
    ({"max_turns": 2}, ["1", "2"], Stop.MAX_TURNS),
    ({"max_calls": 2}, [calling(("add", {"a": 1, "b": 2}))] * 3, Stop.MAX_CALLS),
    ({"max_calls": 0}, [calling(("add", {"a": 1, "b": 2}))], Stop.MAX_CALLS),
    ({"parse_retries": 1}, ["<tool_call>{", "<tool_call>{"], Stop.PARSE_ERROR),
    ({"parse_retries": 0}, ["<tool_call>{"], Stop.PARSE_ERROR),
    ({"parse_retries": 5, "max_turns": 2}, ["<tool_call>{", "<tool_call>{"], Stop.MAX_TURNS),
  ],
)
def test_limits_that_the_model_reaches_are_wrong(limits, turns, stop):
  play = Play(Guess, [add], **limits)
  *earlier, last = turns
  for text in earlier:
    assert isinstance(play.say(text), str)
  episode = play.say(last)
  assert episode.stop is stop
  assert episode.correct is False and episode.scored
  assert len(episode.turns) == len(turns) == len(episode.rewards) + (stop is not Stop.MAX_TURNS)


def test_a_turn_that_is_cut_off():
  play = Play(Guess)
  episode = play.say("11", finished=False, end="")
  assert episode.stop is Stop.MAX_TOKENS and episode.correct is False and episode.rewards == ()


def test_an_observation_needs_space_for_another_turn():
  length = len(family("qwen2.5").encode(user_message("higher")))
  assert Play(Guess).say("5", tokens_left=length + 1) == user_message("higher")
  episode = Play(Guess).say("5", tokens_left=length)
  assert episode.stop is Stop.CONTEXT and episode.correct is False


def test_the_model_reads_why_its_call_was_not_understood():
  play = Play(tools=[add])
  observation = play.say('<tool_call>{"name": "add"}</tool_call>')
  assert observation == tool_messages("Error: the call of 'add' has no \"arguments\"")
  assert play.say(calling(("add", {"a": 1, "b": 2}))) == tool_messages("3")


def test_a_turn_that_a_stop_string_ended_gets_an_end_token():
  play = Play(Guess)
  assert play.say("5", end="") == "<|im_end|>" + user_message("higher")


class Fails:
  """Fails in a given way."""

  closed = 0
  release = threading.Event()

  def reset(self, row, seed):
    self.row = row
    if row["fails"] == "reset":
      raise OSError("no connection\nsecond line")

  def step(self, turn):
    values = {
      "none": None,
      "silent": Step(),
      "infinite": Step(reward=float("inf")),
      "info": Step(info={"x": float("nan")}),
      "role": Step([{"role": "assistant", "content": "x"}]),
      "no role": Step([{"content": "x"}]),
      "done": Step(done=True),
    }
    if self.row["fails"] == "hang":
      self.release.wait()
    return values[self.row["fails"]]

  def close(self):
    type(self).closed += 1


@pytest.mark.parametrize(
  ("fails", "reason"),
  [
    ("reset", "Fails.reset raised OSError: no connection"),
    ("none", "Fails.step raised TypeError: Fails.step returned NoneType, not environments.Step"),
    ("silent", "Fails.step: it returned no message, and is not done"),
    ("infinite", "Fails.step raised ValueError: Fails.step returned the reward inf"),
    ("info", "Fails.step raised ValueError: Fails.step returned info['x'] = nan; it is at"),
    ("role", "Fails.step: a message of the environment has the role 'assistant'; use 'user' or"),
    ("no role", "Fails.step raised TypeError: Fails.step returned \"{'content': 'x'}\" as a"),
    ("unknown", "Fails.step raised KeyError: 'unknown'"),
  ],
)
def test_failures_of_the_environment_say_nothing_about_the_model(fails, reason, capsys):
  Fails.closed = 0
  play = Play(Fails, row={"fails": fails}, size=1)
  episode = play.first[0][2] if fails == "reset" else play.say("x")
  assert episode.stop is Stop.ENV_ERROR
  assert episode.reason.startswith(reason)
  assert not episode.scored and episode.correct is None
  assert f"gtpo: {reason}" in capsys.readouterr().err
  play.episodes.close()
  assert Fails.closed == 1


@pytest.mark.parametrize("on_timeout", ["leave_out", "wrong"])
def test_an_environment_that_hangs_costs_its_episode_only(on_timeout):
  Fails.closed = 0
  Fails.release.clear()
  play = Play(Fails, row={"fails": "hang"}, step_timeout_s=0.05, on_timeout=on_timeout, workers=1)
  episode = play.say("x")
  assert episode.stop is Stop.TIMEOUT
  assert "Fails.step took longer than env.step_timeout_s = 0.05" in episode.reason
  assert episode.scored == (on_timeout == "wrong")
  assert episode.correct is (False if on_timeout == "wrong" else None)
  assert play.episodes.rules.workers.abandoned == 1
  play.begin({"fails": "done"}, 1, (1, 0))  # the only worker was replaced
  assert play.opened[1] == ""
  assert Fails.closed == 0
  Fails.release.set()
  until = time.monotonic() + 5
  while not Fails.closed and time.monotonic() < until:
    time.sleep(0.005)
  assert Fails.closed == 1


def test_the_time_of_an_episode_is_that_of_its_environment():
  class Slow(Guess):
    def step(self, turn):
      time.sleep(0.04)
      return super().step(turn)

  play = Play(Slow, episode_timeout_s=0.1)
  for _ in range(3):
    time.sleep(0.02)  # sampling takes no time of the episode
    end = play.say("1")
    if not isinstance(end, str):
      break
  assert end.stop is Stop.TIMEOUT and 2 <= len(end.turns) <= 3
  assert end.seconds > 0.08


def test_async_environments():
  class Later(Guess):
    async def reset(self, row, seed):
      await asyncio.sleep(0.001)
      return super().reset(row, seed)

    async def step(self, turn):
      await asyncio.sleep(0.001)
      return super().step(turn)

    async def finish(self):
      return 0.5

  play = Play(Later)
  assert play.opened[1] == "Guess, 5."
  assert play.say("5") == user_message("higher")
  assert play.say("11").rewards == (-0.125, 1.5)


def test_what_finish_returns_is_added_at_every_end():
  class State(Guess):
    def finish(self):
      return Step(reward=0.25, correct=True, info={"left": 3})

  episode = Play(State, max_turns=1).say("5")
  assert episode.stop is Stop.MAX_TURNS and episode.rewards == (0.125,)
  assert episode.correct is False and episode.info == {"distance": 6.0, "left": 3.0}
  assert Play(State).say("x", finished=False).rewards == (0.25,)
  assert Play(State).say("11").rewards == (1.25,)
  play = Play(State)
  for guess in ("5", "6", "7"):
    play.say(guess)
  episode = play.say("x", finished=False)  # the last turn has no answer
  assert episode.rewards == (-0.125, -0.125, -0.125, 0.25)
  assert len(episode.turns) == len(episode.truths) == 4 and episode.reward == -0.125


def test_an_empty_answer_is_another_state_than_the_beginning():
  class Silent(Guess):
    def step(self, turn):
      return Step([{"role": "user", "content": ""}], done=turn.index == 2)

  play = Play(Silent)
  play.say("5")
  play.say("5")
  first, second, third = play.say("5").states
  assert first != second == third == ""


def test_messages_of_the_system():
  """They are read where the template shows them, and refused where it does not."""

  class Ordered(Guess):
    def reset(self, row, seed):
      self.number = row["number"]
      return [{"role": "system", "content": row["begin"]}] if row["begin"] else "Guess."

    def step(self, turn):
      return Step([{"role": "system", "content": "stop"}])

  row = {"number": 1, "begin": ""}
  assert "<|im_start|>system\nstop<|im_end|>" in Play(Ordered, row=row).say("5")
  opened = Play(Ordered, row=row | {"begin": "hot"}).opened
  assert opened[1] == [{"role": "system", "content": "hot"}]
  episode = Play(Ordered, row=row, name="mistral").say("5", end="</s>")
  assert episode.stop is Stop.ENV_ERROR and "rejects this conversation" in episode.reason


def test_one_object_for_all_episodes_ends_the_run():
  shared = Guess()
  episodes = Episodes(Environments(family("qwen2.5"), lambda: shared))
  episodes.begin(GROUP, {"number": 11}, SEED, [Recorded() for _ in range(2)])
  with pytest.raises(FunctionError, match="returned the same object for two episodes, which ends"):
    for _ in range(100):
      episodes.wait(0.1)
      episodes.poll()
  episodes.close()


class Large:
  """Returns whatever the row has."""

  def reset(self, row, seed):
    self.content = row["content"]

  def step(self, turn):
    return Step([{"role": "user", "content": self.content}])


@pytest.mark.parametrize(
  ("content", "shown"),
  [({"a": [1, None]}, '{"a": [1, null]}'), (3.5, "3.5"), (b"ab\xff", "ab\ufffd"), ("\ud800", "?")],
)
def test_contents_become_texts(content, shown):
  assert Play(Large, row={"content": content}).say("x") == user_message(shown)


def test_long_contents_are_cut():
  observation = Play(Large, row={"content": "x" * 10**7}, max_observation_tokens=40).say("x")
  assert len(family("qwen2.5").encode(observation)) <= 40 + 12
  assert "characters left out]" in observation


def test_the_completions_of_a_prompt_share_what_reset_returns(capsys):
  counter = iter(range(10))

  class Random(Guess):
    def reset(self, row, seed):
      super().reset(row, seed)
      return f"Guess {max(next(counter), 1)}."

  play = Play(Random, size=3, workers=1)
  assert play.opened[1] == "Guess 1."
  ((_, index, episode),) = play.first
  assert index == 2 and episode.stop is Stop.ENV_ERROR
  assert "let it depend on row and seed only" in episode.reason
  shown = capsys.readouterr().err
  assert shown.count("let it depend on row and seed only") == 1
  assert "have no verdict and teach nothing; env/stop counts them" in shown
  assert play.say("11", index=1).correct


def test_what_an_episode_contains_does_not_depend_on_timing():
  def played(delays):
    rng = random.Random(delays)

    class Jittered(Guess):
      def step(self, turn):
        time.sleep(rng.random() * 0.004 * (delays > 0))
        return super().step(turn)

    play = Play(Jittered, size=6, workers=1 + 3 * (delays % 2))
    logs = [[] for _ in range(6)]
    for i in range(6):
      play.end_turn(f"{i}<|im_end|>", i)
    running = 6
    while running:
      events = play.events()
      assert events
      for _, i, event in events:
        if isinstance(event, Episode):
          logs[i].append(dataclasses.replace(event, seconds=0.0))
          running -= 1
        else:
          logs[i].append(event.tokens)
          guess = str(5 + i + len(logs[i])) if i else "1"
          play.end_turn(f"{guess}<|im_end|>", i)
    return logs

  first = played(0)
  assert {log[-1].stop for log in first} == {Stop.ENV_DONE, Stop.MAX_TURNS}
  assert played(1) == first and played(2) == first


def test_saved_episodes_go_on_where_they_were():
  play = Play(Guess, [add], size=3)
  play.say("5", 0)
  play.say("<tool_call>{", 0)
  done = play.say("11", 1)
  play.end_turn("20<|im_end|>", 2)  # not polled
  snapshot = json.loads(json.dumps(play.episodes.snapshot(GROUP)))
  again = Play(Guess, [add], row={"number": 11}, size=1)
  again.episodes.discard(GROUP)
  assert again.restore({"number": 11}, SEED, snapshot) == (GROUP, "Guess, 5.", "")
  ((_, index, asked),) = again.events()
  assert index == 2 and again.chat.tokenizer.decode(asked.tokens) == user_message("lower")
  assert again.episodes.results(GROUP) == [None, done, None]
  episode = again.say("11", 0)
  assert [turn.text for turn in episode.turns] == ["5", "", "11"]
  assert episode.rewards == (-0.125, 0.0, 1.0) and episode.stop is Stop.ENV_DONE
  assert again.say("11", 2).rewards == (-0.125, 1.0)


@pytest.mark.parametrize(
  ("row", "seed", "reason"),
  [
    ({"number": 3}, SEED, "Guess.step returned something else for turn 0"),
    ({"number": 11}, 6, "Guess.reset returned something else"),
    ({"number": 5}, SEED, "turn 0 ended the episode"),
    ({"number": "x"}, SEED, "Guess.step raised TypeError"),
  ],
)
def test_an_environment_that_does_not_repeat_itself_is_reported(row, seed, reason):
  play = Play(Guess, size=2)
  play.say("5", 0)
  snapshot = play.episodes.snapshot(GROUP)
  play.episodes.discard(GROUP)
  group, added, why = play.restore(row, seed, snapshot)
  assert (group, added) == (GROUP, None) and why.startswith(reason)
  play.begin({"number": 11}, 2)
  assert play.opened == (GROUP, "Guess, 5.", "")
  assert play.say("11", 1).correct


def test_a_difference_that_is_known_at_once_ends_the_whole_group():
  play = Play(Guess, [add], size=3)
  for i in range(3):
    play.say("<tool_call>{", i)
  snapshot = play.episodes.snapshot(GROUP)
  snapshot["episodes"][0]["turns"][0][3][0] += 1
  play.episodes.discard(GROUP)
  differs = play.restore({"number": 11}, SEED, snapshot)
  assert differs == (GROUP, None, "Guess.step returned something else for turn 0")
  play.episodes.close()
  assert play.episodes.poll() == []


def test_an_environment_that_cannot_be_reset_again_is_reported():
  play = Play(Fails, row={"fails": "x"})
  snapshot = {"added": "", "episodes": [{"turns": [[[5], True, 9, [6]]]}]}
  differs = play.restore({"fails": "reset"}, SEED, snapshot, (1, 1))
  assert differs == ((1, 1), None, "Fails.reset raised OSError: no connection")
  play.episodes.close()  # the next test counts


def test_a_close_that_raises_does_not_change_its_episode(capsys):
  class Stubborn(Guess):
    def close(self):
      raise OSError("\x1b[31mno\r")

  play = Play(Stubborn, size=1)
  assert play.say("11").correct
  play.episodes.close()
  shown = capsys.readouterr().err
  assert (
    "gtpo: Stubborn.close raised OSError: \\x1b[31mno; its episode had ended, and counts" in shown
  )
  assert "\x1b" not in shown and "\r" not in shown


def test_discarded_groups_send_no_events_and_are_closed():
  Fails.closed = 0
  Fails.release.clear()
  play = Play(Fails, row={"fails": "hang"}, size=2)
  play.end_turn("x<|im_end|>")
  play.episodes.discard(GROUP)
  Fails.release.set()
  play.episodes.close()
  assert Fails.closed == 2
  assert play.episodes.poll() == []


def test_a_turn_must_be_expected():
  play = Play(Guess)
  play.say("11")
  with pytest.raises(ValueError, match=r"completion 0 of \(0, 3\) waits for no turn"):
    play.say("11")


def test_what_cannot_be_an_environment():
  chat = family("qwen2.5")

  class Methods:
    def reset(self):
      pass

  with pytest.raises(UserError, match=r"Methods has no method 'step'; .*from_methods\(Methods\)"):
    Environments(chat, Methods)
  with pytest.raises(UserError, match="got an object of type int"):
    Environments(chat, 3)
  with pytest.raises(UserError, match="an episode needs an environment or a tool"):
    Environments(chat)


def test_prompts_with_what_reset_returns():
  question = {"role": "user", "content": "Why?"}
  assert add_to_prompt([question], "") == [question]
  assert add_to_prompt([question], "Guess.") == [{"role": "user", "content": "Why?\n\nGuess."}]
  assert add_to_prompt([], "Guess.") == [{"role": "user", "content": "Guess."}]
  system = {"role": "system", "content": "Think."}
  assert add_to_prompt([system], [question]) == [system, question]
  assert question["content"] == "Why?"


def test_observed_events_are_in_order():
  play = Play(Guess, size=4)
  for i in (3, 1, 0, 2):
    play.end_turn("5<|im_end|>", i)
  time.sleep(0.05)
  events = play.episodes.poll()
  assert [index for _, index, _ in events] == [0, 1, 2, 3]
  assert all(isinstance(event, Ask) for _, _, event in events)


def test_failures_of_a_policy_truth(capsys):
  """Each is one line and the traceback of the user's code; the run continues without the truth."""
  episode = Episode((Turn("1"), Turn("2")), Stop.ENV_DONE, 0.0, (0.0, 0.0), None, True, 2, 0.0, {})

  class Knows(Guess):
    @staticmethod
    def policy_truth(rows, episodes):
      value = rows[0]["answer"]
      return value() if callable(value) else value

  def outcome(value):
    rules = Environments(family("qwen2.5"), Knows)
    return rules.policy_truth([{"answer": value}], [[episode]]), capsys.readouterr().err

  (group,), shown = outcome([[[0.5, None]]])
  assert group[0][0] == 0.5 and math.isnan(group[0][1]) and len(group[0]) == 2
  assert shown == ""
  for value, problem in (
    (lambda: {}["row"], "KeyError: 'row'"),
    (lambda: sys.exit(2), "SystemExit: 2"),
    (None, "TypeError: object of type 'NoneType' has no len()"),
    ([], "ValueError: it returned 0 groups, not 1"),
    ([[[0.5]]], "ValueError: it returned 1 turns, not 2"),
    ([[["0.5", 1.0]]], "TypeError: it returned '0.5', not a number"),
  ):
    found, shown = outcome(value)
    assert found is None
    line, rest = shown.split("\n", 1)
    assert line == (
      f"gtpo: Knows.policy_truth raised {problem}; truth/turn_*/policy is left out"
    ), line
    assert rest.startswith("Traceback")
