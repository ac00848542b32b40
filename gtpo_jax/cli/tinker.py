"""Opens a model for clients of Tinker, and serves until the process is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from gtpo_jax.cli.export import base_model
from gtpo_jax.cli.serve import model_name, open_address, run_server
from gtpo_jax.models.decode import params_bytes
from gtpo_jax.models.params import abstract_params
from gtpo_jax.rollout.policies import ServingLimits, find_served
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.chips import usable_memory
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.settings import AUTO
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.http import is_loopback, make_server
from gtpo_jax.tinker.app import TinkerApp
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.sampler import Policies, Sampler
from gtpo_jax.tinker.saved_weights import Store
from gtpo_jax.tinker.schema import CLIENT_VERSION
from gtpo_jax.tinker.trainer import Trainer

KEY_VARIABLE = "GTPO_TINKER_KEY"
LEDGER = "ledger.sqlite"
OLD_JOURNAL = "journal"
BASE = "base.json"  # what `_identity` has found


class TinkerOptions(NamedTuple):
  """What is served, and where.

  Attributes:
    model: a Hugging Face folder, or a hub id.
    workdir: where the database and saved weights are.
    host: the address.
    port: 0 for a free one.
    name: what clients call the model; "" for the path of its folder, or its hub id.
    queue: the samples that may wait.
    max_rank: the highest rank of adapters.
    models: how many models may be trained at once.
    policies: how many sets of weights are kept ready for sampling.
    seed: of requests that have none.
    limits: what is sampled at once, and how; batch-invariant, a run repeats bit for bit.
    merge_adapters: "always" to sample from copies of the base with adapters merged, "never" to
      compute adapters beside the one base that is trained on, "auto" for the latter if the copies
      would take more than half of the memory that the base leaves.
  """

  model: Path
  workdir: Path
  host: str = "127.0.0.1"
  port: int = 8000
  name: str = ""
  queue: int = 4096
  max_rank: int = 128
  models: int = 8
  policies: int = 2
  seed: int = 0
  limits: ServingLimits = ServingLimits()
  merge_adapters: str = AUTO


class OpenedTinker:
  """A model that is ready for clients.

  Attributes:
    base: the model.
    workdir: where weights are saved.
    app: the application that a server runs.
  """

  def __init__(self, options: TinkerOptions, secret: str = ""):
    """Opens the model and the workdir, and resumes where a process before this one has ended.

    Args:
      options: what is served.
      secret: the key that clients must have; "" for any.

    Raises:
      UserError: there is no such model, or the workdir belongs to another one.
    """
    limits = options.limits
    if options.merge_adapters == "never":
      if not options.max_rank:
        raise UserError("--merge_adapters=never needs adapters; raise --max_rank")
      limits = limits._replace(adapters=options.max_rank)
    worker, _, read = find_served(options.model, None, limits)
    if options.merge_adapters == AUTO and _is_short(worker, options.policies):
      limits = limits._replace(adapters=options.max_rank)
      worker, _, read = find_served(options.model, None, limits)
    if worker.model_folder is None:
      raise UserError(f"{str(options.model)!r} is the workdir of a run; export it first")
    source = base_model(str(options.model))
    # A client reads the tokenizer of this name, so it is one that works in every folder.
    name = options.name or (model_name(source) if "://" in source else source)
    worker.chat.tokenizer.name_or_path = name  # messages contain it
    self.workdir = options.workdir
    if (options.workdir / OLD_JOURNAL).exists():
      raise UserError(
        f"{str(options.workdir)!r} has the {OLD_JOURNAL} of an earlier version, which is not read; "
        f"name another --workdir, or delete the {OLD_JOURNAL} (saved weights are in runs, and stay)"
      )
    self._store = Store(options.workdir)
    self._ledger = Ledger(
      options.workdir / LEDGER,
      _identity(worker.model_folder, options.workdir / BASE),
      options.seed,
      options.queue,
      options.models,
      self._store.snapshot_seq,
    )
    self.base = ServedBase(name, worker, read()[0], source)
    self._generator = Generator(worker.engine, None, options.queue, chunk_s=None)
    policies = Policies(self.base, self._store, options.policies)
    self._trainer = Trainer(self.base, self._ledger, self._store, options.models)
    self._sampler = Sampler(self.base, self._ledger, policies, self._generator)
    self.app = TinkerApp(
      self.base,
      self._ledger,
      self._store,
      self._sampler,
      options.max_rank,
      options.queue,
      secret,
      only_loopback=is_loopback(options.host) and not secret,
    ).asgi

  def close(self) -> None:
    """Ends what is under way, and saves the state of every model."""
    self._ledger.close()
    self._generator.close()
    self._sampler.close()
    self._trainer.close()
    self._ledger.close_file()


def _is_short(worker: RolloutWorker, policies: int) -> bool:
  """Whether copies of the base for policies take over half of the memory that the base leaves."""
  devices = jax.local_devices()
  memory = usable_memory(devices[0], len(devices))
  copied = params_bytes(worker.engine.programs.model, worker.model).copied
  base = bytes_per_device(abstract_params(worker.model))
  return memory is not None and 2 * policies * copied > memory - base


def _identity(folder: Path, known: Path) -> str:
  """Returns a digest of a model's config and weights; `known` has it while no file has changed."""
  files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
  stats = [(str(x.resolve()), (stat := x.stat()).st_size, stat.st_mtime_ns) for x in files]
  stamp = json.dumps(stats)
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    values = json.loads(known.read_text())
    if values["files"] == stamp:
      return str(values["digest"])
  digest = hashlib.sha256()
  for file in files:
    with file.open("rb") as opened:
      digest.update(hashlib.file_digest(opened, "sha256").digest())
  with contextlib.suppress(OSError):
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps({"files": stamp, "digest": digest.hexdigest()}))
  return digest.hexdigest()


def serve(options: TinkerOptions, say: Callable[[str], None]) -> None:
  """Serves until SIGINT or SIGTERM, then saves the state of every model.

  Args:
    options: what, and where.
    say: shows a line.

  Raises:
    UserError: the address cannot be used, or needs a key; or see `OpenedTinker`.
  """
  secret = os.environ.get(KEY_VARIABLE, "")
  needed = f"{KEY_VARIABLE} to a secret, which clients set as TINKER_API_KEY"
  with open_address(options.host, options.port, secret, needed) as (listener, address):
    opened = OpenedTinker(options, secret)
    c = opened.base.worker.model.config
    copies = f"adapters to rank {c.lora.rank} beside one base" if c.apart else "merged adapters"
    say(f"computing in {c.compute_dtype}, with {copies}; tested with tinker {CLIENT_VERSION}")
    say(f"base_model={opened.base.name!r} at TINKER_BASE_URL=http://{address} (Ctrl-C stops)")
    asyncio.run(run_server(make_server(opened.app), listener))
    opened.close()
