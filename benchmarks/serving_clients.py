"""Asks `gtpo serve` with other programs, each installed from PyPI in an environment of its own.

    python benchmarks/serving_clients.py --model=hf/smollm2 --folder=/tmp/clients [--clients=openai]

The server computes in float32. Every client must read the same greedy texts as the engine gives by
itself, as a whole and as a stream; lm-eval must read the texts and log-likelihoods that its own
model of Transformers computes. The result is a table in Markdown; the exit status is 1 if anything
differs. Environments stay in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RUNNER = Path(__file__).with_name("serving_client_runner.py")
TORCH = "torch==2.13.0"
PACKAGES = {
  "openai": ("openai",),
  "litellm": ("litellm",),
  "langchain-openai": ("langchain-openai",),
  "inspect-ai": ("inspect-ai", "openai"),
  "lm-eval": ("lm-eval[api]", "transformers<6", "accelerate", TORCH),
}
QUESTIONS = [
  "What is the capital of France?",
  "Name three colours.",
  "How many minutes are 2 hours and 40 minutes?",
  "Write one sentence about a dog.",
]
CHOICES = [" Paris", " the colour of the sea", " 160 minutes"]
TOLERANCE = 1e-3  # of a log-likelihood, which is a sum over tokens
START_S = 300


def reference(folder: Path, tokens: int) -> list[str]:
  """Returns the greedy answers of the engine, without a server."""
  from gtpo_jax.runtime.startup import prepare_jax

  prepare_jax()
  import jax

  from gtpo_jax.data.records import Problem, user
  from gtpo_jax.rollout.policies import ServingLimits, find_served
  from gtpo_jax.rollout.sample import sample_problems
  from gtpo_jax.rollout.turns import Turns
  from gtpo_jax.sampling.settings import GREEDY

  worker, _, read = find_served(folder, None, ServingLimits(128, tokens, "float32", 4))
  policy = worker.policy(read()[0])
  problems = [Problem(str(i), user(text), "", "") for i, text in enumerate(QUESTIONS)]
  keys = policy.engine.completion_keys(jax.random.key(0), len(problems), 1)
  rows = sample_problems(Turns(worker, 1), policy, problems, keys, GREEDY)
  return worker.decode([completion.tokens for (completion,) in rows])


def install(client: str, folder: Path) -> Path:
  """Makes a client's environment, if it is missing, and returns its Python."""
  python = folder / client / "bin" / "python"
  if not python.exists():
    subprocess.run([sys.executable, "-m", "venv", str(folder / client)], check=True)
  pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES[client]]
  subprocess.run(pip, check=True)
  return python


def versions(python: Path, client: str) -> str:
  """Returns the name and version of a client."""
  code = f"import importlib.metadata; print(importlib.metadata.version({client!r}))"
  done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
  return f"{client} {done.stdout.strip()}"


def faults(result: dict[str, Any], expected: list[str]) -> list[str]:
  """Returns what differs."""
  strip = lambda texts: [text.strip() for text in texts]
  found = []
  if "expected_texts" in result:
    expected = result["expected_texts"]
  if strip(result["texts"]) != strip(expected):
    found.append(f"texts differ: {result['texts']} instead of {expected}")
  if "streams" in result and result["streams"] != result["texts"]:
    found.append("streams differ")
  if "scores" in result:
    pairs = zip(result["scores"], result["expected"], strict=True)
    if (error := max(abs(x - y) for x, y in pairs)) > TOLERANCE:
      found.append(f"log-likelihoods differ by {error:.2g}")
  return found


def wait_for(url: str, server: subprocess.Popen) -> None:
  """Waits until a server answers."""
  until = time.monotonic() + START_S
  while True:
    try:
      urllib.request.urlopen(url, timeout=5).close()
      return
    except OSError:
      if server.poll() is not None or time.monotonic() > until:
        raise RuntimeError("the server does not start") from None
      time.sleep(0.5)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder")
  parser.add_argument("--folder", required=True, type=Path, help="where environments are made")
  parser.add_argument("--clients", default=",".join(PACKAGES), help="names, joined by commas")
  parser.add_argument("--port", type=int, default=8765)
  args = parser.parse_args()
  clients = args.clients.split(",")
  if unknown := set(clients) - set(PACKAGES):
    parser.error(f"unknown clients {', '.join(sorted(unknown))}; known are {', '.join(PACKAGES)}")
  folder = args.folder.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  from serving_client_runner import TOKENS

  expected = reference(args.model, TOKENS)
  options = [f"--model={args.model}", f"--port={args.port}", "--compute_dtype=float32"]
  limits = ["--max_prompt_tokens=128", "--max_tokens=64", "--slots=8"]
  server = subprocess.Popen(
    [sys.executable, "-m", "gtpo_jax", "serve", *options, *limits],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  job = folder / "job.json"
  model = args.model.resolve()
  job.write_text(
    json.dumps(
      {
        "url": f"http://127.0.0.1:{args.port}/v1",
        "model": model.name,
        "folder": str(model),
        "questions": QUESTIONS,
        "choices": CHOICES,
      }
    )
  )
  lines = ["| client | texts | streams | log-likelihoods |", "|---|---|---|---|"]
  bad = False
  try:
    wait_for(f"http://127.0.0.1:{args.port}/health", server)
    for client in clients:
      python = install(client, folder)
      file = folder / f"{client}.json"
      file.unlink(missing_ok=True)
      subprocess.run([str(python), str(RUNNER), client, str(job), str(file)])
      result = json.loads(file.read_text()) if file.exists() else None
      found = faults(result, expected) if result else ["no result"]
      bad = bad or bool(found)
      print(f"{client}: {'; '.join(found) or 'equal'}", flush=True)
      cells = ["; ".join(found) or "equal", "", ""]
      if result and not found:
        cells[1] = "equal" if "streams" in result else ""
        if "scores" in result:
          pairs = zip(result["scores"], result["expected"], strict=True)
          cells[2] = f"within {max(abs(x - y) for x, y in pairs):.0e}"
      lines.append(f"| {versions(python, client)} | {' | '.join(cells)} |")
  finally:
    server.terminate()
    server.wait()
  print("\n".join(lines))
  sys.exit(bad)


if __name__ == "__main__":
  main()
