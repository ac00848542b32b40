"""Times a checkpoint: how long saving blocks the run, and when the checkpoint is complete.

    python benchmarks/checkpoint.py --config configs/qwen2_5_0_5b_gtpo.py [--json FILE]
    python benchmarks/checkpoint.py --folder gs://BUCKET/bench
    python benchmarks/checkpoint.py --folder emulator

The training state is that of the config. Its weights and moments are random numbers, which no file
format compresses. The first save also compiles the digests. `--folder emulator` saves into the
emulator of Google Cloud Storage of the tests, which runs as a process of its own and holds
everything in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax
from measuring import store

from gtpo_jax import config as configs
from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.cli.planning.run_programs import build_model
from gtpo_jax.config.updates import run_optimizer
from gtpo_jax.models import init_params
from gtpo_jax.runtime.paths import list_files, storage_path
from gtpo_jax.training.state import TrainState, init_state

TESTS = Path(__file__).resolve().parents[1] / "tests"
EMULATOR = "emulator"
COLUMNS = ("save", "blocked s", "complete s")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
  """Returns the options, and the config overrides."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/qwen2_5_0_5b_gtpo.py")
  parser.add_argument("--folder", help="a folder or a gs:// URL; default: a temporary folder")
  parser.add_argument("--saves", type=int, default=3)
  parser.add_argument("--json")
  args, overrides = parser.parse_known_args()
  if args.saves < 1:
    parser.error(f"--saves must be at least 1, got {args.saves}")
  return args, overrides


def serve_emulator(connection) -> None:
  """Runs the emulator until the other end of the connection is closed."""
  sys.path.insert(0, str(TESTS))
  logging.disable(logging.CRITICAL)  # it logs each object that does not exist yet
  from object_store import object_store

  with object_store() as store:
    connection.send((store.url, store.environment))
    with contextlib.suppress(EOFError):
      connection.recv()


@contextlib.contextmanager
def open_folder(name: str | None) -> Iterator[str]:
  """Yields the folder to save into."""
  if name != EMULATOR:
    with tempfile.TemporaryDirectory(prefix="gtpo_") as temporary:
      yield name or temporary
    return
  spawn = multiprocessing.get_context("spawn")
  ours, theirs = spawn.Pipe()
  server = spawn.Process(target=serve_emulator, args=[theirs], daemon=True)
  server.start()
  theirs.close()
  url, environment = ours.recv()
  os.environ.update(environment)
  yield f"{url}/bench"
  ours.close()
  server.join()


def initial_state(config: configs.Config) -> TrainState:
  """Returns the training state of a config, with random weights and moments."""
  model = build_model(config, jax.devices())
  state = init_state(init_params(model, jax.random.key(0)), run_optimizer(config, model), model)
  noise = jax.jit(
    lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), donate_argnums=0
  )
  is_moment = lambda x: x.ndim and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
  moments = jax.tree.map(lambda x: noise(x) if is_moment(x) else x, state.opt_state)
  return jax.block_until_ready(state.replace(opt_state=moments))


def main() -> None:
  args, overrides = parse_args()
  state = initial_state(configs.load(args.config, overrides))
  rows = []
  with open_folder(args.folder) as name:
    folder = storage_path(name)
    checkpoints = Checkpoints(folder, keep=1)
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    for step in range(1, args.saves + 1):
      began = time.perf_counter()
      checkpoints.save(state.replace(step=state.step * 0 + step))
      blocked = time.perf_counter() - began
      checkpoints.wait()
      rows.append((step, blocked, time.perf_counter() - began))
      print("  ".join(f"{value:>10.1f}" for value in rows[-1]), flush=True)
    stored = sum((folder / file).stat().length for file in list_files(folder))
    checkpoints.close()
  state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
  print(f"state: {state_bytes / 2**30:.2f} GiB, stored: {stored / 2**30:.2f} GiB")
  table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
  store({"saves": table, "state bytes": state_bytes, "stored bytes": stored}, args.json)


if __name__ == "__main__":
  main()
