"""Environments of other programs, in the forms of their interfaces."""

import collections
import random
import sys
import threading
import time
import types

import numpy as np
import pytest
from families import family

from gtpo_jax.environments import Step, Turn, from_gym, from_methods, from_openenv, python_tool
from gtpo_jax.environments.adapters.openenv import shown
from gtpo_jax.environments.environment import Player
from gtpo_jax.environments.environment_episode import Environments
from gtpo_jax.environments.episodes import Episodes
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.turns import Episode, Stop
from gtpo_jax.environments.writers import Drawn, Writer
from gtpo_jax.runtime.errors import UserError


def play(environment, texts, row=None, seed=3, parser="none", **limits):
  """Plays an episode; returns what `reset` adds, the observations, and the episode."""
  chat = family("qwen2.5")
  limits = EpisodeLimits(**limits)
  episodes = Episodes(Environments(chat, environment, parser=parser, limits=limits))
  episodes.begin(0, row or {}, seed, [Writer()])

  def first(poll):
    until = time.monotonic() + 60
    while time.monotonic() < until:
      if found := poll():
        return found[0]
      episodes.wait(0.2)
    raise TimeoutError

  _, added, _ = first(episodes.opened)
  observations = []
  for text in texts:
    episodes.answer(0, 0, Drawn(chat.encode(text + "<|im_end|>"), True, 10_000))
    _, _, now = first(episodes.poll)
    if isinstance(now, Episode):
      episodes.close()
      return added, observations, now
    shown_text = chat.tokenizer.decode(now.tokens)
    for mark in ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"):
      shown_text = shown_text.replace(mark, "")
    observations.append(shown_text)
  raise AssertionError(f"the episode goes on after {observations}")


class Counter:
  """As TRL has environments: public methods are tools."""

  def reset(self, start, **row):
    self.value = start
    self.closed = False
    return "Reach 5."

  def increment(self, step: int) -> int:
    """Increments the counter.

    Args:
      step: by how much.
    """
    self.value += step
    return self.value

  async def double(self) -> int:
    """Doubles the counter."""
    self.value *= 2
    return self.value

  def get_reward(self):
    return 1.0 if self.value == 5 else 0.0

  def _secret(self):
    pass


def calling(name, arguments):
  return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_public_methods_are_tools():
  maker = from_methods(Counter)
  assert list(maker.methods) == ["double", "increment"]
  turns = [calling("increment", '{"step": 1}'), calling("double", "{}"), "Done."]
  added, observations, episode = play(maker, turns, {"start": 1, "other": 2}, parser="hermes")
  assert added == "Reach 5."
  results = ["<tool_response>\n2\n</tool_response>", "<tool_response>\n4\n</tool_response>"]
  assert observations == results
  assert episode.stop is Stop.ANSWERED and episode.text == "Done."
  assert episode.reward == 0 and episode.correct is False
  turns[0] = calling("increment", '{"step": 1.5}')
  *_, episode = play(
    maker, [*turns[:1], calling("increment", '{"step": 4}'), "5"], {"start": 1}, parser="hermes"
  )
  assert episode.info == {"failed_calls": 1.0}
  assert episode.reward == 1 and episode.correct is True


def test_each_completion_has_an_object_of_its_own():
  maker = from_methods(Counter)
  players = [
    Player(
      maker,
      [],
      [{"function": {"name": name, "parameters": {}}} for name in maker.methods],
      "tool",
      1,
    )
    for _ in range(2)
  ]
  for i, player in enumerate(players):
    player.reset({"start": i}, 0)
  assert [player.environment._inner.value for player in players] == [0, 1]


def test_methods_that_say_what_turns_were_worth_are_no_tools():
  class Knows(Counter):
    def turn_truth(self, turn):
      return self.value - 5 * (not turn.calls)

    @staticmethod
    def policy_truth(rows, episodes):
      return [[[0.25] * len(episode.turns) for episode in group] for group in episodes]

  maker = from_methods(Knows)
  assert list(maker.methods) == ["double", "increment"]
  turns = [calling("increment", '{"step": 1}'), calling("double", "{}"), "Done."]
  *_, episode = play(maker, turns, {"start": 1}, parser="hermes")
  assert episode.truths == (2.0, 4.0, -1.0)
  rules = Environments(family("qwen2.5"), maker, parser="hermes")
  assert rules.policy_truth([{}], [[episode]]) == [[[0.25] * 3]]


def test_a_class_without_public_methods():
  class Empty:
    def reset(self):
      pass

  with pytest.raises(UserError, match="Empty has no public methods, which would be the tools"):
    from_methods(Empty)


class Gym:
  """As gymnasium has environments."""

  def __init__(self, largest=20):
    self.largest = largest

  def reset(self, *, seed=None, options=None):
    self.number = random.randint(1, self.largest) + np.random.randint(1)
    return f"A number to {self.largest}.", {"seed": seed}

  def step(self, action):
    guess = int(action)
    right = guess == self.number
    return ("right" if right else "wrong"), float(right), right, guess == 0, {"guess": guess}


class OldGym(Gym):
  """As rLLM and Tunix have them."""

  def reset(self):
    return super().reset()

  def step(self, action):
    observation, reward, terminated, truncated, info = super().step(action)
    return {"text": observation}, reward, terminated or truncated, info


class SkyRL:
  """As SkyRL has them."""

  def init(self, prompt):
    self.inner = Gym()
    self.inner.number = 7
    return [*prompt, {"role": "user", "content": "Guess."}], {}

  def step(self, action):
    observation, reward, terminated, truncated, info = self.inner.step(action)
    messages = [{"role": "user", "content": observation}]
    return {
      "observations": messages,
      "reward": reward,
      "done": terminated or truncated,
      "metadata": info,
    }


Kind = collections.namedtuple("Kind", "name")


class Arena:
  """As TextArena has them."""

  def reset(self, num_players, seed=None):
    assert num_players == 1
    self.number = random.Random(seed).randint(1, 20)
    self.messages = [(-1, "Guess.", Kind("PROMPT"))]

  def get_observation(self):
    messages, self.messages = self.messages, []
    return 0, messages

  def step(self, action):
    self.right = int(action) == self.number
    self.messages += [(0, action, Kind("PLAYER_ACTION")), (-1, "wrong", Kind("GAME_MESSAGE"))]
    return self.right or action == "0", {}

  def close(self):
    return {0: float(self.right)}, {}


def number_of(seed):
  random.seed(seed)
  return random.randint(1, 20)


def make_from_row(row):
  return Gym(row["largest"])


@pytest.mark.parametrize(
  ("make", "row", "added", "right", "wrong"),
  [
    (Gym, {}, "A number to 20.", number_of(3), "wrong"),
    (make_from_row, {"largest": 1}, "A number to 1.", 1, "wrong"),
    (OldGym, {}, "A number to 20.", number_of(3), '{"text": "wrong"}'),
    (
      SkyRL,
      {"messages": [{"role": "user", "content": "?"}]},
      [{"role": "user", "content": "Guess."}],
      7,
      "wrong",
    ),
    (Arena, {}, "Guess.", number_of(3), "wrong"),
  ],
)
def test_gymnasium_and_similar_interfaces(make, row, added, right, wrong):
  environment = from_gym(make)
  result, observations, episode = play(environment, ["30", str(right)], row)
  assert result == added and observations == [wrong]
  assert episode.stop is Stop.ENV_DONE
  assert episode.reward == 1 and episode.correct is True
  *_, episode = play(environment, ["0"], row)
  assert episode.reward == 0 and episode.correct is False
  *_, episode = play(from_gym(make, solved_at=None), ["0"], row)
  assert episode.correct is None


def test_numbers_of_info_are_kept():
  *_, episode = play(from_gym(Gym), ["30", str(number_of(3))])
  assert episode.info == {"guess": number_of(3)}


def test_a_reset_draws_by_its_seed_and_leaves_the_generators_alone():
  random.seed(8)
  np.random.seed(8)
  before = random.getstate(), np.random.get_state()[1].tolist()
  for seed in range(4):
    environment = from_gym(Gym).make()
    environment.reset({}, seed)
    assert environment._inner.number == number_of(seed)
    random.setstate(before[0])
  assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_observations_that_repeat_earlier_ones_are_shown_once():
  class Growing:
    def reset(self, seed=None):
      self.text = "Rules."
      return self.text, {}

    def step(self, action):
      self.text += f" You said {action}."
      return self.text, 0.0, False, action == "b", {}

  added, observations, _ = play(from_gym(Growing), ["a", "c", "b"])
  assert added == "Rules." and observations == ["You said a.", "You said c."]


class FakeClient:
  """A client as OpenEnv has it."""

  def __init__(self, base_url):
    self.base_url = base_url

  def _result(self, text, reward=None, done=False):
    observation = {"message": text, "done": done}
    return types.SimpleNamespace(observation=observation, reward=reward, done=done)

  async def reset(self, seed):
    return self._result(f"{self.base_url} {seed}")

  async def step(self, action):
    return self._result("echo " + action["say"], 0.5, action["say"] == "end")

  async def close(self):
    pass


def test_openenv(monkeypatch):
  module = types.ModuleType("openenv.core")
  module.GenericEnvClient = FakeClient
  monkeypatch.setitem(sys.modules, "openenv", types.ModuleType("openenv"))
  monkeypatch.setitem(sys.modules, "openenv.core", module)
  environment = from_openenv("http://localhost:8000", lambda turn: {"say": turn.text})
  added, observations, episode = play(environment, ["a", "end"])
  assert added == "http://localhost:8000 3" and observations == ["echo a"]
  assert episode.reward == 1 and episode.correct is True
  with pytest.raises(UserError, match="from_openenv needs an address such as"):
    from_openenv("localhost", lambda turn: {})


def test_openenv_names_the_missing_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "openenv.core", None)
  with pytest.raises(UserError, match="pip install openenv"):
    from_openenv("http://localhost:8000", lambda turn: {})


@pytest.mark.parametrize(
  ("observation", "text"),
  [
    ({"text": "", "message": "a"}, "a"),
    ({"board": [1, 2]}, '{"board": [1, 2]}'),
    ("plain", "plain"),
  ],
)
def test_texts_of_openenv_observations(observation, text):
  assert shown(observation) == text


@pytest.mark.sandbox
def test_python_runs_in_the_sandbox():
  python = python_tool(timeout_s=2, memory_mb=256)
  assert python("print(6 * 7)") == "42\n"
  assert python("print('a'); 1 / 0").startswith("a\nTraceback")
  assert "ZeroDivisionError" in python("1 / 0")
  assert python("print('a', flush=True)\nwhile True: pass") == "a\n\nError: it took longer than 2 s"
  assert "No such file" in python("print(open('/etc/passwd').read())")


def test_python_needs_a_sandbox(monkeypatch):
  monkeypatch.setattr("gtpo_jax.environments.code_tool.sandbox_problem", lambda: "no bubblewrap")
  with pytest.raises(UserError, match="python_tool needs a sandbox, and there is none here: no"):
    python_tool()


# The packages themselves, where they are installed.


@pytest.mark.manual
def test_gem():
  gem = pytest.importorskip("gem")
  make = lambda: gem.make("game:GuessTheNumber-v0-easy", min_number=1, max_number=3, max_turns=5)
  added, observations, episode = play(from_gym(make), [rf"\boxed{{{i}}}" for i in (1, 2, 3)])
  assert "guess the number between 1 and 3" in added
  assert all("the target number is higher" in text for text in observations)
  assert episode.correct is True


@pytest.mark.manual
def test_textarena():
  textarena = pytest.importorskip("textarena")
  for name in ("GuessTheNumber-v0", "GuessTheNumber-v0-raw"):
    make = lambda name=name: textarena.make(name)
    added, observations, episode = play(
      from_gym(make), [f"[{i}]" for i in range(1, 21)], max_turns=20
    )
    assert "guess the number between" in added
    assert all("The target number is higher." in text for text in observations)
    assert all("guess the number between" not in text for text in observations)
    assert episode.correct is True


@pytest.mark.manual
def test_skyrl_gym():
  skyrl_gym = pytest.importorskip("skyrl_gym")
  row = {"messages": [{"role": "user", "content": "1+1?"}], "reward_spec": {"ground_truth": "2"}}
  make = lambda row: skyrl_gym.make("gsm8k", extras=row)
  added, observations, episode = play(from_gym(make), ["#### 2"], row)
  assert added == [] and observations == []
  assert episode.reward == 1 and episode.correct is True


@pytest.mark.manual
def test_an_openenv_server():
  server = pytest.importorskip("openenv.core.env_server")
  uvicorn = pytest.importorskip("uvicorn")

  class Say(server.Action):
    say: str

  class Heard(server.Observation):
    message: str = ""

  class Echo(server.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
      self.count = 0
      return Heard(message=f"Say end. {seed}", done=False)

    def step(self, action, timeout_s=None, **others):
      self.count += 1
      return Heard(message=f"{self.count}: {action.say}", done=action.say == "end", reward=0.5)

    @property
    def state(self):
      return server.State(step_count=self.count)

  app = server.create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
  running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
  thread = threading.Thread(target=running.run, daemon=True)
  thread.start()
  while not running.started:
    time.sleep(0.05)
  port = running.servers[0].sockets[0].getsockname()[1]
  environment = from_openenv(f"http://127.0.0.1:{port}", lambda turn: {"say": turn.text})
  added, observations, episode = play(environment, ["a", "end"])
  running.should_exit = True
  thread.join(10)
  assert added == "Say end. 3" and observations == ["1: a"]
  assert episode.reward == 1 and episode.correct is True


def test_a_turn_is_passed_without_thinking():
  class Echo:
    def reset(self, row, seed):
      pass

    def step(self, turn: Turn):
      return Step(done=True, info={"length": len(turn.text), "thought": len(turn.thinking)})

  *_, episode = play(Echo, ["<think>ab</think>\n\nabc"])
  assert episode.info == {"length": 3.0, "thought": 2.0}
