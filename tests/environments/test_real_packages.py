"""Environments of other programs, unchanged, from their packages.

Each package is imported if it is installed: textarena (with requests and websockets), gem-llm (with
reasoning-gym), skyrl-gym, openenv-core (with fastapi, uvicorn and websockets).
"""

import importlib
import threading
import time

import pytest
from test_adapters import play

from gtpo_jax.environments import from_gym, from_openenv
from gtpo_jax.environments.turns import Stop

pytestmark = [pytest.mark.manual, pytest.mark.filterwarnings("ignore")]


def imported(name):
  try:
    return importlib.import_module(name)
  except ImportError as error:
    pytest.skip(f"{name} is not installed: {error}")


def test_a_game_of_textarena():
  textarena = imported("textarena")
  guesses = [f"[{i}]" for i in range(1, 21)]
  added, observations, episode = play(
    from_gym(lambda: textarena.make("GuessTheNumber-v0")), guesses, max_turns=30
  )
  assert "You are playing Guess The Number" in added
  assert "The target number is higher" in observations[0]
  assert episode.stop == Stop.ENV_DONE and episode.scored and len(episode.turns) > 1


def test_a_game_of_gem():
  imported("gem.envs")
  gem = imported("gem")
  guesses = [rf"\boxed{{{i}}}" for i in (5, 2, 8, 1, 3, 4)]
  added, observations, episode = play(
    from_gym(lambda: gem.make("game:GuessTheNumber-v0-easy")), guesses
  )
  assert "between 1 and 10" in added and "the target number is" in observations[0]
  assert episode.stop == Stop.ENV_DONE and episode.scored


def test_gsm8k_of_skyrl():
  env = imported("skyrl_gym.envs.gsm8k.env").GSM8kEnv
  make = lambda row: env({}, extras={"reward_spec": {"ground_truth": row["answer"]}})
  for text, reward in (("#### 5", 1.0), ("#### 6", 0.0)):
    _, _, episode = play(from_gym(make), [text], row={"answer": "5"})
    assert episode.stop == Stop.ENV_DONE and episode.reward == reward
    assert episode.correct is (reward == 1.0)


def test_a_server_of_openenv_on_loopback():
  core = imported("openenv.core.env_server.http_server")
  interfaces = imported("openenv.core.env_server.interfaces")
  types = imported("openenv.core.env_server.types")
  uvicorn = imported("uvicorn")

  class Say(types.Action):
    text: str

  class Heard(types.Observation):
    text: str

  class Adder(interfaces.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **row):
      return Heard(text="What is 2+3?", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **more):
      right = action.text == "5"
      return Heard(text="" if right else "No.", done=right, reward=float(right))

    @property
    def state(self):
      return types.State()

  app = core.create_fastapi_app(Adder, Say, Heard, max_concurrent_envs=4)
  server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  while not server.started:
    time.sleep(0.05)
  port = server.servers[0].sockets[0].getsockname()[1]
  environment = from_openenv(f"http://127.0.0.1:{port}", lambda turn: {"text": turn.text})
  added, observations, episode = play(environment, ["4", "5"])
  server.should_exit = True
  thread.join(10)
  assert added == "What is 2+3?" and observations == ["No."]
  assert episode.correct and episode.stop == Stop.ENV_DONE and episode.reward == 1.0
