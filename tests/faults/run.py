"""`gtpo train`, in which something happens at a marked point: `python run.py ACTION:PLACE:COUNT train ...`.

The action is `kill` (SIGKILL), `term` (SIGTERM) or `term2` (SIGTERM twice), at the COUNTth time that PLACE is reached. The places are
functions of the program itself, wrapped here; the program knows nothing of it.
"""

import os
import signal
import sys
import time

import jax

import gtpo_jax.checkpoint.manager
import gtpo_jax.loop
import gtpo_jax.warm_start
from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.cli import main
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.rollout.scoring import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

evaluating = False


def judge(prompts, completions, answers, extras):
  """A verdict of which a random model earns both kinds."""
  return [len(text) % 2 == 0 for text in completions]


def arm(action, count):
  """A function that acts when it is called for the `count`th time."""
  left = int(count)

  def reached():
    nonlocal left
    left -= 1
    if left == 0:
      if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
      os.kill(os.getpid(), signal.SIGTERM)
      if action == "term2":
        time.sleep(0.2)  # signals that are the same and not yet delivered are one
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

  return reached


def before(owner, name, reached, when=lambda: True):
  """Wraps a function of `owner`: `reached` is called first."""
  whole = getattr(owner, name)

  def wrapped(*args, **kwargs):
    if when():
      reached()
    return whole(*args, **kwargs)

  setattr(owner, name, wrapped)


def after(owner, name, reached):
  """Wraps a function of `owner`: `reached` is called when it has returned, with what it gave computed."""
  whole = getattr(owner, name)

  def wrapped(*args, **kwargs):
    given = jax.block_until_ready(whole(*args, **kwargs))
    reached()
    return given

  setattr(owner, name, wrapped)


def mark(place, reached):
  """Puts `reached` at a place."""
  whole_evaluation = gtpo_jax.loop.evaluate_run
  make_update = gtpo_jax.loop.make_update
  save = Checkpoints.save

  def evaluate_run(*args, **kwargs):
    global evaluating
    evaluating = True
    try:
      return whole_evaluation(*args, **kwargs)
    finally:
      evaluating = False

  gtpo_jax.loop.evaluate_run = evaluate_run
  if place == "sampling":  # the completions are there, and not yet judged
    after(RolloutWorker, "generate", lambda: evaluating or reached())
  elif place == "reward":
    before(RewardManager, "weigh", reached, lambda: not evaluating)
  elif place == "evaluation":
    before(RewardManager, "weigh", reached, lambda: evaluating)
  elif place in ("compile", "update"):

    def marked_update(*args, **kwargs):
      holder = type("Holder", (), {"update": staticmethod(make_update(*args, **kwargs))})
      (before if place == "compile" else after)(holder, "update", reached)
      return holder.update

    gtpo_jax.loop.make_update = marked_update
  elif place == "saving":  # the files are being written

    def marked_save(*args, **kwargs):
      save(*args, **kwargs)
      reached()

    Checkpoints.save = marked_save
  elif place == "written":  # all files are there, the step is not committed
    before(gtpo_jax.checkpoint.manager, "write_seal", reached)
  elif place == "sealed":  # and is about to be
    after(gtpo_jax.checkpoint.manager, "write_seal", reached)
  elif place == "committed":
    before(gtpo_jax.checkpoint.manager, "seal_late_files", reached)
  elif place == "metrics":
    after(Journal, "write", reached)
  elif place == "warm start":
    after(gtpo_jax.warm_start, "demonstrations", reached)
  else:
    raise ValueError(place)


if __name__ == "__main__":
  sys.modules["run"] = sys.modules["__main__"]  # reward.verifier = run:judge
  if sys.argv[1] != "-":
    action, place, count = sys.argv[1].split(":")
    mark(place, arm(action, count))
  sys.exit(main(sys.argv[2:]))
