"""A server that is killed anywhere ends with the bits of one that was not."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import free_port
from killed_server import PLACES
from live import CLIENT_WARNINGS, abort_connections, need_client, sampled

import gtpo_jax

tinker = need_client()
types = tinker.types
pytestmark = [pytest.mark.slow, CLIENT_WARNINGS]
PROMPTS = ([5, 6, 7, 8], [9, 4, 12])
STEPS = 3
START_S = 900.0  # until a server answers, on a machine with much else to do
# Where this package is, also if it is not installed.
PACKAGES = os.pathsep.join(
  filter(None, [str(Path(gtpo_jax.__file__).parents[1]), os.environ.get("PYTHONPATH")])
)


class Server:
  """A server that is started again whenever it is killed."""

  def __init__(self, model, workdir, place="never", count=1):
    self.port = free_port()
    self.url = f"http://127.0.0.1:{self.port}"
    self.kills = 0
    self.failure = ""
    options = [
      f"--model={model}",
      f"--workdir={workdir}",
      f"--port={self.port}",
      "--batch_invariant",
    ]
    options += ["--name=tiny", "--compute_dtype=float32", "--max_tokens=16", "--slots=8"]
    self._options = [*options, "--max_prompt_tokens=32"]
    self._ended = False
    self._process = self._start(place, count)
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()

  def _start(self, place, count=1):
    script = Path(__file__).parent / "killed_server.py"
    return subprocess.Popen(
      [sys.executable, str(script), place, str(count), *self._options],
      env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": PACKAGES},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def _watch(self):
    while True:
      output, _ = self._process.communicate()
      if self._ended:
        return
      if self._process.returncode != -signal.SIGKILL:
        self.failure = output
        return
      self.kills += 1
      self._process = self._start("never")

  def kill(self):
    self._process.kill()

  def close(self):
    self._ended = True
    self._process.terminate()
    self._thread.join()


def recipe(url, steps):
  """A run of reinforcement learning; the path of what it has learnt."""
  deadline = time.monotonic() + START_S
  while True:
    try:
      service = tinker.ServiceClient(base_url=url)
      training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
      break
    except Exception:  # not there yet, or killed: that request is not sent again
      assert time.monotonic() < deadline
      time.sleep(0.5)
  for step in range(steps):
    client = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6)
    asked = [client.sample(types.ModelInput.from_ints(x), 2, params) for x in PROMPTS]
    data = []
    for prompt, answer in zip(PROMPTS, asked, strict=True):
      for sequence, advantage in zip(answer.result().sequences, (1.0, -1.0), strict=True):
        data.append(sampled(tinker, prompt, sequence, advantage))
    config = {"credit": "gtpo", "alpha2": 0.3} if step % 2 else None
    loss = training.forward_backward(data, "importance_sampling", config)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    loss.result()
  path = training.save_state("end").result().path
  holder = service.holder
  holder.run_coroutine_threadsafe(holder.aclose()).result(10)
  abort_connections()
  return path


def learnt(workdir):
  (folder,) = Path(workdir).glob("runs/*/weights/end")
  return (folder / "adapter_model.safetensors").read_bytes(), (
    folder / "training.arrays"
  ).read_bytes()


def run(model, workdir, steps=STEPS, random_kills=0, **when):
  server = Server(model, workdir, **when)
  client = threading.Thread(target=recipe, args=[server.url, steps], daemon=True)
  client.start()
  if random_kills:
    kill_at_random(server, random_kills, seed=0)
  while client.is_alive() and not server.failure:
    client.join(0.2)
  server.close()
  assert not server.failure
  return learnt(workdir), server.kills


def kill_at_random(server, count, seed):
  """Kills a server so many times, some seconds after it was started."""
  rng = random.Random(seed)
  for _ in range(count):
    kills = server.kills
    time.sleep(rng.uniform(6, 25))
    server.kill()
    while server.kills == kills:
      time.sleep(0.1)


@pytest.mark.manual
def test_ten_kills_at_random_change_no_bit(model, tmp_path):
  expected, _ = run(model, tmp_path / "calm", steps=20)
  found, kills = run(model, tmp_path / "killed", steps=20, random_kills=10)
  assert kills == 10
  assert found == expected


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
  return run(model, tmp_path_factory.mktemp("calm") / "workdir")[0]


@pytest.mark.parametrize(
  ("place", "count"),
  [
    pytest.param(place, count, marks=() if shown else pytest.mark.manual)
    for place, counts in {
      "before a row is written": (9, 24),
      "after a row is written": (8, 23),
      "after a request is on disk": (3, 9),
      "while weights are replaced": (1, 3),
      "before a gradient": (1, 3),
      "after a gradient": (2,),
      "after a step": (1, 2),
      "while weights are written": (1, 3),
      "after weights are written": (2,),
      "before a result is recorded": (2, 7, 11),
      "after a result is recorded": (3, 8),
      "after a snapshot": (2, 5),
    }.items()
    for count in counts
    for shown in [(place, count) == ("after a step", 2)]
  ],
)
def test_a_kill_changes_no_bit(place, count, model, expected, tmp_path):
  assert place in PLACES
  found, kills = run(model, tmp_path / "workdir", place=place, count=count)
  assert kills == 1
  assert found == expected
