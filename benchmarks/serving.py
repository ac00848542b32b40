"""Measures a server of OpenAI's protocol: output tokens a second, and the time to the first token.

    gtpo serve --model=hf/smollm2 --compute_dtype=float32 &
    python benchmarks/serving.py --url=http://127.0.0.1:8000/v1 --clients=1,8,32 --json=serving.json

Each client sends one streamed request after another, greedy and with different questions. A first
round, which is not measured, compiles what a server compiles. The output tokens are those that the
server counts; with --characters, for servers that count none in a stream, they are characters.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx2

SUBJECTS = ("rivers", "bread", "clocks", "tigers", "glass", "winter", "trains", "music")


class Answer:
  """What a request has received.

  Attributes:
    first_s: seconds to the first text.
    tokens: output tokens.
    characters: of the text.
  """

  def __init__(self):
    self.first_s = 0.0
    self.tokens = 0
    self.characters = 0


async def ask(http: httpx2.AsyncClient, url: str, model: str, number: int, tokens: int) -> Answer:
  """Sends one request and reads its stream."""
  subject = SUBJECTS[number % len(SUBJECTS)]
  body = {
    "model": model,
    "messages": [{"role": "user", "content": f"Write a story about {subject}, number {number}."}],
    "max_tokens": tokens,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
  }
  began = time.perf_counter()
  answer = Answer()
  async with http.stream("POST", f"{url}/chat/completions", json=body) as response:
    if response.status_code != 200:
      raise RuntimeError((await response.aread()).decode())
    async for line in response.aiter_lines():
      if not line.startswith("data: {"):
        continue
      event = json.loads(line.removeprefix("data: "))
      for choice in event.get("choices", ()):
        text = choice["delta"].get("content") or ""
        if text and not answer.characters:
          answer.first_s = time.perf_counter() - began
        answer.characters += len(text)
      if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]
  return answer


async def measure(args: argparse.Namespace, model: str, clients: int) -> dict[str, float]:
  """Runs `clients` clients at once."""
  async with httpx2.AsyncClient(timeout=600) as http:

    async def one(client: int, requests: int) -> list[Answer]:
      numbers = range(client, client + clients * requests, clients)
      return [await ask(http, args.url, model, number, args.tokens) for number in numbers]

    await asyncio.gather(*(one(client, 1) for client in range(clients)))
    began = time.perf_counter()
    of_clients = await asyncio.gather(*(one(client, args.requests) for client in range(clients)))
    seconds = time.perf_counter() - began
  answers = list(itertools.chain(*of_clients))
  produced = sum(x.characters if args.characters else x.tokens for x in answers)
  return {
    "clients": clients,
    "characters_per_s" if args.characters else "tokens_per_s": produced / seconds,
    "first_s": statistics.median(x.first_s for x in answers),
    "requests": len(answers),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
  parser.add_argument("--model", help="the model's name (default: the first that the server has)")
  parser.add_argument("--clients", default="1,8,32", help="numbers of clients at once")
  parser.add_argument("--requests", type=int, default=2, help="measured requests of each client")
  parser.add_argument("--tokens", type=int, default=64, help="the most tokens of an answer")
  parser.add_argument("--characters", action="store_true", help="count characters, not tokens")
  parser.add_argument("--json", type=Path, help="where to write the results")
  args = parser.parse_args()
  model = args.model or httpx2.get(f"{args.url}/models").json()["data"][0]["id"]
  results: list[dict[str, Any]] = []
  for clients in map(int, args.clients.split(",")):
    results.append(asyncio.run(measure(args, model, clients)))
    print(results[-1], flush=True)
    if args.json:
      args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
  main()
