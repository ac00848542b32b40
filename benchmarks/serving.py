"""Measures servers of OpenAI's protocol: output tokens a second, and the time to the first token.

    gtpo serve --model=hf/smollm2 --compute_dtype=float32 &
    python benchmarks/serving.py --server=gtpo=http://127.0.0.1:8000/v1 --tokenizer=hf/smollm2 \\
      --clients=1,8,32 --rounds=3 --json=serving.json

With several --server, they are measured in turns. Each client sends one streamed request after
another, greedy and with different questions. A first round, which is not measured, compiles what a
server compiles. The output tokens are those of the texts, by the tokenizer. --beside=31 measures
the time to the first token of one client alone, and while 31 others are being answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

SUBJECTS = ("rivers", "bread", "clocks", "tigers", "glass", "winter", "trains", "music")


class Server(NamedTuple):
  """A server: what the table calls it, its address, and the model that it is asked for."""

  name: str
  url: str
  model: str


class Answer(NamedTuple):
  """What a request has received: its text, and the seconds to the first part of that."""

  text: str
  first_s: float


async def ask(http: httpx2.AsyncClient, server: Server, number: int, tokens: int) -> Answer:
  """Sends one request and reads its stream."""
  subject = SUBJECTS[number % len(SUBJECTS)]
  body = {
    "model": server.model,
    "messages": [{"role": "user", "content": f"Write a story about {subject}, number {number}."}],
    "max_tokens": tokens,
    "temperature": 0,
    "stream": True,
  }
  began = time.perf_counter()
  first_s = 0.0
  texts = []
  async with http.stream("POST", f"{server.url}/chat/completions", json=body) as response:
    if response.status_code != 200:
      raise RuntimeError((await response.aread()).decode())
    async for line in response.aiter_lines():
      if not line.startswith("data: {"):
        continue
      for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
        text = choice["delta"].get("content") or ""
        if text and not first_s:
          first_s = time.perf_counter() - began
        texts.append(text)
  return Answer("".join(texts), first_s)


async def throughput(args: argparse.Namespace, server: Server, clients: int) -> dict[str, Any]:
  """Runs `clients` clients at once."""
  async with httpx2.AsyncClient(timeout=600) as http:

    async def one(client: int) -> list[Answer]:
      numbers = range(client, client + clients * args.requests, clients)
      return [await ask(http, server, number, args.tokens) for number in numbers]

    began = time.perf_counter()
    of_clients = await asyncio.gather(*map(one, range(clients)))
    seconds = time.perf_counter() - began
  answers = [answer for of_client in of_clients for answer in of_client]
  tokens = sum(len(args.tokenizer.encode(x.text, add_special_tokens=False)) for x in answers)
  first_s = statistics.median(x.first_s for x in answers)
  return {"tokens_per_s": tokens / seconds, "first_s": first_s}


async def first_token(args: argparse.Namespace, server: Server, others: int) -> dict[str, Any]:
  """Measures the time to the first token while `others` clients are answered one after another."""
  async with httpx2.AsyncClient(timeout=600) as http:
    done = asyncio.Event()

    async def other(client: int) -> None:
      while not done.is_set():
        await ask(http, server, client, args.tokens)

    tasks = [asyncio.create_task(other(client)) for client in range(others)]
    await asyncio.sleep(2 if others else 0)
    times = []
    for number in range(10):
      times.append((await ask(http, server, 1000 + number, 1)).first_s)
      await asyncio.sleep(0.1)
    done.set()
    await asyncio.gather(*tasks)
  return {"first_s": statistics.median(times), "longest_first_s": max(times)}


def named(text: str) -> Server:
  """Reads NAME=URL, and asks the server for its model."""
  name, _, url = text.partition("=")
  return Server(name, url, httpx2.get(f"{url}/models").json()["data"][0]["id"])


def main() -> None:
  from transformers import AutoTokenizer

  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--server", type=named, action="append", required=True, help="NAME=URL")
  parser.add_argument("--tokenizer", type=AutoTokenizer.from_pretrained, required=True)
  parser.add_argument("--clients", default="1,8,32", help="numbers of clients at once")
  parser.add_argument("--beside", type=int, default=0, help="others of the first-token measurement")
  parser.add_argument("--requests", type=int, default=2, help="measured requests of each client")
  parser.add_argument("--tokens", type=int, default=64, help="the most tokens of an answer")
  parser.add_argument("--rounds", type=int, default=3, help="measurements of each server")
  parser.add_argument("--json", type=Path, help="where to write the results")
  args = parser.parse_args()
  cases = [("clients", n, throughput, n) for n in map(int, args.clients.split(",")) if n]
  if args.beside:
    cases += [("beside", others, first_token, others) for others in (0, args.beside)]
  results: list[dict[str, Any]] = []
  for kind, count, measure, argument in cases:
    for round_ in range(args.rounds + 1):
      for server in args.server:
        measured = asyncio.run(measure(args, server, argument))
        if not round_:
          continue
        results.append({"server": server.name, kind: count, "round": round_, **measured})
        print(results[-1], flush=True)
        if args.json:
          args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
  main()
