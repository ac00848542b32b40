"""`gtpo train` with a fault at a marked point: `python run.py ACTION:POINT:COUNT train ...`.

The action is `kill` (SIGKILL), `int` (SIGINT), `term` (SIGTERM), `term2` (SIGTERM twice), or an XLA
status such as RESOURCE_EXHAUSTED, which is raised as XLA would raise it. It happens when the
program reaches POINT for the COUNTth time. The points are functions of the program that are wrapped
here; the program itself has no code for faults. The event `-` does nothing.
"""

import asyncio
import os
import signal
import sys
import time
import zlib

import jax

import gtpo_jax.checkpoint.steps
import gtpo_jax.config.updates
import gtpo_jax.loop.evaluations
import gtpo_jax.loop.warm_start
from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.cli import main
from gtpo_jax.environments import Step
from gtpo_jax.environments.episodes import Episodes
from gtpo_jax.logs.journal import Journal
from gtpo_jax.rollout import turns
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.sampling.programs import Programs

evaluating = False


def verify(prompts, completions, answers, extras):
  """A verifier that calls about half of a random model's completions correct."""
  return [len(text) % 2 == 0 for text in completions]


class Oracle:
  """An environment whose answers depend on the turns."""

  def reset(self, row, seed):
    self.turns = [row["id"], str(seed)]

  def step(self, turn):
    self.turns.append(turn.text)
    code = zlib.crc32("/".join(self.turns).encode())
    step = {"reward": code % 5 / 4, "done": code % 4 == 0, "correct": code % 3 > 0}
    return Step(f"{code % 100}", **step, truth=code % 7 / 6 - 0.5)


async def player(row, client, seed):
  """An agent whose second and third request depend on the answer to the first."""

  async def ask(messages):
    answer = await client.chat.completions.create(model="x", messages=messages, max_tokens=6)
    return answer.choices[0].message

  messages = list(row["messages"])
  text = ""
  for _ in range(1 + seed % 2):
    messages.append(await ask(messages))
    text += messages[-1].content or ""
    messages.append({"role": "user", "content": str(len(text))})
  code = zlib.crc32(text.encode())
  await ask([{"role": "user", "content": f"{code % 100}"}])
  return code % 3 > 0


async def slow_player(row, client, seed):
  """The same, after and before a slow tool."""
  await asyncio.sleep(0.02 + seed % 10 / 100)
  correct = await player(row, client, seed)
  await asyncio.sleep(0.02 + seed % 7 / 100)
  return correct


def tell_tokens():
  """Prints a checksum of each batch's tokens, and the most exchanges of requests in a chunk."""
  collect = Collector.collect
  step = turns.TurnQueue.step
  exchange = turns.broadcast_from_first
  exchanges = 0
  of_chunks = []

  def counted(make):
    nonlocal exchanges
    exchanges += 1
    return exchange(make)

  def counted_step(self):
    before = exchanges + bool(self._asked_before)  # what was asked for during the update
    ended = step(self)
    of_chunks.append(exchanges - before)
    return ended

  def told(self, *args):
    batch = collect(self, *args)
    drawn = [(x.tokens, x.versions) for group in batch.groups for x in group.completions]
    total = zlib.crc32(b"".join(x.tobytes() for pair in drawn for x in pair))
    print(f"tokens {total}, exchanges {max(of_chunks)}", flush=True)
    return batch

  Collector.collect = told
  turns.TurnQueue.step = counted_step
  turns.broadcast_from_first = counted


def arm(action, count):
  """Returns a function that acts when it is called for the `count`th time."""
  left = int(count)

  def reached():
    nonlocal left
    left -= 1
    if left == 0:
      if action.isupper():
        raise jax.errors.JaxRuntimeError(f"{action}: injected\nthe second line of XLA's text")
      if action == "shell":
        os.system(f"PID={os.getpid()}; {os.environ['FAULT']}")
        return
      if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
      os.kill(os.getpid(), signal.SIGINT if action == "int" else signal.SIGTERM)
      if action == "term2":
        time.sleep(0.2)  # the kernel merges equal signals that are still pending
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

  return reached


def before(owner, name, reached, when=lambda: True):
  """Wraps a function of `owner` so that `reached` is called first."""
  original = getattr(owner, name)

  def wrapped(*args, **kwargs):
    if when():
      reached()
    return original(*args, **kwargs)

  setattr(owner, name, wrapped)


def after(owner, name, reached):
  """Wraps a function of `owner` so that `reached` is called after it has computed its result."""
  original = getattr(owner, name)

  def wrapped(*args, **kwargs):
    result = jax.block_until_ready(original(*args, **kwargs))
    reached()
    return result

  setattr(owner, name, wrapped)


def mark(point, reached):
  """Wraps the program so that it calls `reached` whenever it reaches a point."""
  original_evaluation = gtpo_jax.loop.evaluations.evaluate_run
  make_update = gtpo_jax.config.updates.make_update
  save = Checkpoints.save

  def evaluate_run(*args, **kwargs):
    global evaluating
    evaluating = True
    try:
      return original_evaluation(*args, **kwargs)
    finally:
      evaluating = False

  gtpo_jax.loop.evaluations.evaluate_run = evaluate_run
  if point == "sampling":  # the completions exist but are not scored yet
    after(Turns, "generate", lambda: evaluating or reached())
  elif point == "chunk":  # between chunks of tokens
    before(Programs, "decode", reached, lambda: not evaluating)
  elif point == "evaluation chunk":
    before(Programs, "decode", reached, lambda: evaluating)
  elif point == "reward":
    before(RewardManager, "combine", reached, lambda: not evaluating)
  elif point == "evaluation":
    before(RewardManager, "combine", reached, lambda: evaluating)
  elif point in ("compile", "update"):

    class MarkedUpdate:
      def __init__(self, program):
        self._program = program

      def lower(self, *args):
        if point == "compile":
          reached()
        return self._program.lower(*args)

      def __call__(self, *args):
        result = jax.block_until_ready(self._program(*args))
        if point == "update":
          reached()
        return result

    gtpo_jax.config.updates.make_update = lambda *args, **kwargs: MarkedUpdate(
      make_update(*args, **kwargs)
    )
  elif point == "saving":  # the files are being written

    def marked_save(*args, **kwargs):
      save(*args, **kwargs)
      reached()

    Checkpoints.save = marked_save
  elif point == "written":  # all files exist, but the step is not committed
    before(gtpo_jax.checkpoint.steps, "write_integrity_record", reached)
  elif point == "recorded":  # the integrity record exists too
    after(gtpo_jax.checkpoint.steps, "write_integrity_record", reached)
  elif point == "committed":
    before(gtpo_jax.checkpoint.steps, "record_commit_files", reached)
  elif point == "metrics":
    after(Journal, "write", reached)
  elif point == "turn":  # an environment is about to answer
    before(Episodes, "answer", reached)
  elif point == "warm start":
    after(gtpo_jax.loop.warm_start, "demonstrations", reached)
  else:
    raise ValueError(point)


if __name__ == "__main__":
  sys.modules["run"] = sys.modules["__main__"]  # for reward.verifier = run:verify
  # With 5 s, all turns are answered before the next chunk, so that sums round alike.
  turns.GRACE_S = float(os.environ.get("GRACE_S", "5"))
  if os.environ.get("TELL_TOKENS"):
    tell_tokens()
  if sys.argv[1] != "-":
    action, point, count = sys.argv[1].split(":")
    mark(point, arm(action, count))
  sys.exit(main(sys.argv[2:]))
