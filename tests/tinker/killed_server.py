"""Runs `gtpo tinker` and kills it at the n-th time that it reaches a place.

python killed_server.py PLACE N OPTIONS...: the place is a key of PLACES, or "never".
"""

import os
import signal
import sys

from gtpo_jax.cli import main
from gtpo_jax.models.hf import folder
from gtpo_jax.tinker import models
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models import TrainedModel
from gtpo_jax.tinker.saved_weights import Store

PLACES = {  # where it is killed: the owner of a function, its name, and whether before or after it
  "before a row is written": (Ledger, "_insert", True),
  "after a row is written": (Ledger, "_insert", False),
  "after a request is on disk": (Ledger, "submit", False),
  "while weights are replaced": (os, "replace", True),
  "before a gradient": (TrainedModel, "run", True),
  "after a gradient": (TrainedModel, "run", False),
  "after a step": (TrainedModel, "step", False),
  "while weights are written": (models, "write_files", False),
  "after weights are written": (TrainedModel, "save", False),
  "before a result is recorded": (Ledger, "finish", True),
  "after a result is recorded": (Ledger, "finish", False),
  "after a snapshot": (Store, "tidy", True),
}


def arm(place, count):
  """Wraps the function of a place."""
  owner, name, before = PLACES[place]
  inner = getattr(owner, name)
  calls = [0]

  def wrapped(*args, **settings):
    calls[0] += 1
    if before and calls[0] == count:
      os.kill(os.getpid(), signal.SIGKILL)
    result = inner(*args, **settings)
    if calls[0] == count:
      os.kill(os.getpid(), signal.SIGKILL)
    return result

  setattr(owner, name, wrapped)


if __name__ == "__main__":
  assert folder.MANIFEST  # what is replaced at the end
  if sys.argv[1] != "never":
    arm(sys.argv[1], int(sys.argv[2]))
  import gtpo_jax.tinker.trainer as trainer

  trainer.SNAPSHOT_S = 0.0 if "snapshot" in sys.argv[1] else 1e9
  trainer.SNAPSHOT_RATIO = 1e9
  sys.argv[1:3] = []
  sys.exit(main(["tinker", *sys.argv[1:]]))
