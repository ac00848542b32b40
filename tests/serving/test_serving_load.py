"""Many clients at once, some of which hang up, and clients that send garbage."""

import asyncio
import functools
import json
import os
import random
import time

import httpx2
import pytest
from live_server import running

pytestmark = pytest.mark.manual

CLIENTS = 64
REQUESTS = 2000
HANG_UPS = 0.2
GARBAGE_S = float(os.environ.get("GTPO_GARBAGE_S", "20"))
MORE_MEMORY = 64 << 20  # bytes that may be kept after the first half of the requests


@pytest.fixture(scope="module")
def live(folder):
  with running(folder, slots=32) as server:
    yield server


def body_of(live, number):
  """A request whose answer depends on its number: 200 different ones."""
  kind = number % 200
  return {
    "model": live.model,
    "messages": [{"role": "user", "content": f"{kind}+7:"}],
    "seed": kind,
    "max_tokens": 1 + kind % 48,
    "temperature": (0, 0.7, 1)[kind % 3],
    "top_p": (1, 0.9)[kind % 2],
    "n": 1 + kind % 3,
  }


def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * 4096


def idle(live):
  until = time.monotonic() + 60
  while live.opened.generator.running or live.opened.generator.waiting:
    assert time.monotonic() < until, "a slot leaked"
    time.sleep(0.05)


def test_nothing_is_lost_or_mixed(live):
  url = f"{live.url}/v1/chat/completions"
  rng = random.Random(0)
  answers = {}
  outcomes = {"whole": 0, "stream": 0, "hung up": 0}
  memory = []

  async def ask(client, number):
    body = body_of(live, number)
    if rng.random() < HANG_UPS:
      stream = rng.random() < 0.5
      try:
        async with client.stream(
          "POST", url, json=body | {"stream": stream}, timeout=rng.random() * 0.5
        ) as response:
          async for _ in response.aiter_bytes():
            break
      except httpx2.TimeoutException:
        pass
      outcomes["hung up"] += 1
      return
    if number % 2:
      response = await client.post(url, json=body)
      assert response.status_code == 200, response.text
      texts = [choice["message"]["content"] for choice in response.json()["choices"]]
      outcomes["whole"] += 1
    else:
      texts = [""] * body["n"]
      async with client.stream("POST", url, json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
          if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
      outcomes["stream"] += 1
    assert answers.setdefault(number % 200, texts) == texts

  async def run():
    numbers = iter(range(REQUESTS))
    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=CLIENTS)) as c:

      async def one():
        for number in numbers:
          if number == REQUESTS // 2:
            memory.append(resident())
          await ask(c, number)

      await asyncio.gather(*(one() for _ in range(CLIENTS)))

  asyncio.run(run())
  idle(live)
  assert sum(outcomes.values()) == REQUESTS and len(answers) == 200
  assert resident() - memory[0] < MORE_MEMORY
  print(outcomes, dict(live.opened.generator.counts), resident() >> 20)


def garbage(rng, live):
  """A body that resembles a request, or none."""
  values = [None, True, -1, 0, 1e308, 10**400, "", "x", "\ud800", [], [[]], {}, {"a": []}, [1, "a"]]
  body = body_of(live, rng.randrange(200)) | {"max_tokens": 1 + rng.randrange(3)}
  for _ in range(rng.randrange(4)):
    names = [*body, "stop", "logprobs", "top_logprobs", "tools", "stream", "top_k", "prompt", "x"]
    body[rng.choice(names)] = rng.choice(values)
  text = bytearray(json.dumps(body).encode())
  if rng.random() < 0.3:
    for _ in range(rng.randrange(1, 5)):
      text[rng.randrange(len(text))] = rng.randrange(256)
  return bytes(text[: rng.randrange(len(text))] if rng.random() < 0.1 else text)


def test_garbage_gets_errors_and_nothing_of_the_machine(live):
  rng = random.Random(1)
  until = time.monotonic() + GARBAGE_S
  statuses = {}
  paths = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/x")
  with httpx2.Client(timeout=60) as client:
    while time.monotonic() < until:
      post = functools.partial(client.post, live.url + rng.choice(paths))
      kind = {"Content-Type": "application/json"}
      response = post(content=garbage(rng, live), headers=kind)
      statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
      if response.status_code != 200:
        error = response.json()["error"]
        assert "\n" not in error["message"] and len(error["message"]) < 500
        for secret in ("Traceback", "/home", "/root", "/tmp", ".py", "gtpo_jax"):
          assert secret not in error["message"], error
  idle(live)
  assert set(statuses) <= {200, 400, 404, 405}, statuses
  print(statuses)
