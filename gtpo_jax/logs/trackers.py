"""Experiment trackers besides the run's own JSONL files: TensorBoard, Weights & Biases, Trackio.

Only the first process creates them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
import shlex
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gtpo_jax.config import Config, resolved_dict
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.installing import install_command

VALUES_PER_FILE = 20_000  # scalars in one TensorBoard file, about 1.5 MB
FLUSH_S = 120.0  # seconds after which TensorBoard's file is written out
SAMPLE_COLUMNS = ["step", "prompt", "completion", "right"]
ONLINE_MODES = ("online", "shared")  # of W&B; the others need no key


class Tracker(Protocol):
  """Receives the metrics and samples of a run."""

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the finite metrics of a step."""

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool | None) -> None:
    """Logs one completion."""

  def close(self) -> None:
    """Flushes buffered metrics."""


class TensorBoard:
  """Writes event files into the workdir. A resumed run purges the steps after the restored one.

  TensorBoard names a run after the folder of its event files, relative to `--logdir`. So
  `tensorboard --logdir=runs` shows the run in runs/mine as `mine`. A file is ended after
  `VALUES_PER_FILE` values, because an object store receives it as a whole.
  """

  def __init__(self, workdir: Path, resumed_step: int):
    self._folder = str(workdir)
    self._files = 0
    self._open(purge_step=resumed_step + 1)

  def _open(self, purge_step: int | None = None) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog
    from tensorboardX.record_writer import RecordWriter

    # Two files of the same second need different names, in order.
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{self._files:06d}"
    # The library's SummaryWriter writes in a thread, which would print errors of the disk.
    self._writer = RecordWriter(f"{self._folder}/{name}")
    self._files += 1
    self._values = 0
    self._flushed_at = 0.0
    self._write(0, file_version="brain.Event:2")
    if purge_step is not None:
      self._write(purge_step, session_log=SessionLog(status=SessionLog.START))

  def _write(self, step: int, **content: Any) -> None:
    from tensorboardX.proto.event_pb2 import Event

    event = Event(step=step, wall_time=time.time(), **content)
    self._writer.write(event.SerializeToString())

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See `Tracker`. Raises OSError if the disk is full."""
    if self._values >= VALUES_PER_FILE:
      self._writer.close()
      self._open()
    from tensorboardX.summary import scalar

    values = finite(metrics)
    for name, value in values.items():
      self._write(step, summary=scalar(name, value))
    self._values += len(values)
    if time.monotonic() > self._flushed_at + FLUSH_S:
      self._writer.flush()
      self._flushed_at = time.monotonic()

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool | None) -> None:
    """See `Tracker`. TensorBoard renders Markdown, so the text is indented to keep it verbatim."""
    from tensorboardX.summary import text

    lines = "\n".join("    " + line for line in f"{prompt}\n\n{completion}".splitlines())
    verdict = "right" if correct else "wrong"
    self._write(step, summary=text("sample", f"**{verdict}**\n\n{lines}"))

  def close(self) -> None:
    """See `Tracker`."""
    self._writer.close()

  def __del__(self):
    with contextlib.suppress(AttributeError, OSError):  # a run has failed before it could close
      self._writer.close()


class _Run:
  """A run of a library that also has the samples of the newest evaluated step, as a table.

  If the library fails, such as because its background process was killed, our run continues
  without it.
  """

  def __init__(self, setting: str, library: str, module: Any, say: Callable[[str], None]):
    """Args: how messages name the setting and the library; its module; `say` shows a message."""
    self._setting = setting
    self._library = library
    self._module = module
    self._say = say
    self._failed = False
    self._samples: list[tuple[int, str, str, bool | None]] = []
    self._run: Any = None

  def _start(self, start: Callable[[], Any], fix: str) -> None:
    try:
      self._run = start()
    except Exception as error:  # such as a server that does not answer
      empty = self._setting.partition(" ")[0]
      raise RunError(
        f"{self._setting}: {self._library} does not start the run ({first_line(error)}); {fix}, or "
        f"leave {empty} empty, then run the same command again"
      ) from error

  def _log(self, step: int, logged: dict[str, Any]) -> None:
    raise NotImplementedError

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See `Tracker`."""

    def log() -> None:
      logged: dict[str, Any] = finite(metrics)
      if self._samples and any(name.startswith("eval/") for name in metrics):
        logged["samples"] = self._module.Table(columns=SAMPLE_COLUMNS, data=self._samples)
      self._log(step, logged)

    self._attempt(log)

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool | None) -> None:
    """See `Tracker`. Keeps only the samples of the newest step."""
    same_step = [row for row in self._samples if row[0] == step]
    self._samples = [*same_step, (step, prompt, completion, correct)]

  def close(self) -> None:
    """See `Tracker`."""
    self._attempt(self._run.finish)

  def _teardown(self) -> None:
    """Ends what would fail again when the program ends."""

  def _attempt(self, action: Callable[[], None]) -> None:
    """Calls a function of the library; after the first failure, does nothing."""
    if self._failed:
      return
    try:
      action()
    except Exception as error:  # the libraries raise errors of several families
      self._failed = True
      self._say(
        f"warning: {self._setting}: {self._library} has failed ({first_line(error)}); the run "
        "continues without it, and metrics.jsonl has all metrics"
      )
      with contextlib.suppress(Exception):
        self._teardown()


class WeightsAndBiases(_Run):
  """Logs to a W&B run, which resumes when the workdir's run resumes.

  The metric `step` is the x axis, so a step that is repeated after a resume keeps its position.
  The environment variables of W&B (WANDB_MODE, WANDB_API_KEY, ...) apply.
  """

  def __init__(self, workdir: Path, config: Config, name: str, say: Callable[[str], None]):
    """Starts or resumes the run."""
    import wandb

    super().__init__(f"log.wandb = {config.log.wandb!r}", "W&B", wandb, say)
    id_file = workdir / "wandb_id"
    start = lambda: wandb.init(
      project=config.log.wandb,
      dir=str(workdir),
      name=name,
      config=resolved_dict(config),
      resume="allow",
      id=_read_id(id_file),
      settings=wandb.Settings(console="off", quiet=True),
    )
    self._start(start, "set WANDB_MODE=offline")
    id_file.write_text(self._run.id)
    self._run.define_metric("*", step_metric="step")

  def _log(self, step: int, logged: dict[str, Any]) -> None:
    self._run.log({"step": step, **logged})

  def _teardown(self) -> None:
    self._module.teardown()


class Trackio(_Run):
  """Logs to a Trackio run, on this machine unless Trackio's own variables name a server or a Space.

  Trackio resumes a run by its name, which ends with an id that the workdir keeps.
  """

  def __init__(self, workdir: Path, config: Config, name: str, say: Callable[[str], None]):
    """Starts or resumes the run."""
    import trackio

    super().__init__(f"log.trackio = {config.log.trackio!r}", "Trackio", trackio, say)
    id_file = workdir / "trackio_id"
    run_id = _read_id(id_file) or uuid.uuid4().hex[:8]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints several lines
      start = lambda: trackio.init(
        config.log.trackio,
        name=f"{name}-{run_id}",
        config=resolved_dict(config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
      )
      self._start(start, "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to log on this machine")
    id_file.write_text(run_id)
    say(
      f"Trackio's run is {name}-{run_id}; to see it: trackio show "
      f"--project {shlex.quote(config.log.trackio)}"
    )

  def _log(self, step: int, logged: dict[str, Any]) -> None:
    self._run.log(logged, step=step)

  def close(self) -> None:
    """See `Tracker`."""
    with contextlib.redirect_stdout(io.StringIO()):
      self._attempt(self._module.finish)


def _read_id(file: Path) -> str | None:
  """Returns the id of the run to resume; None if there is none, or if the file is damaged."""
  if not file.is_file():
    return None
  text = file.read_bytes().decode("ascii", "replace").strip()
  return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else None


def check_trackers(config: Config) -> None:
  """Checks that every requested tracker can be used.

  Raises:
    UserError: `log.wandb` or `log.trackio` is set, and the library is missing or W&B does not
      accept the key.
  """
  for library in ("wandb", "trackio"):
    project = getattr(config.log, library)
    if project and importlib.util.find_spec(library) is None:
      raise UserError(
        f"log.{library} = {project!r} needs the {library} library: "
        f"{install_command(library)}, or leave log.{library} empty"
      )
  if config.log.wandb:
    broadcast_from_first(lambda: _check_login(config.log.wandb))


def make_trackers(
  workdir: Path, config: Config, name: str, say: Callable[[str], None]
) -> list[Tracker]:
  """Returns the trackers of `log.wandb` and `log.trackio`, whose runs start or resume."""
  kinds = [*[WeightsAndBiases] * bool(config.log.wandb), *[Trackio] * bool(config.log.trackio)]
  return [kind(workdir, config, name, say) for kind in kinds]


def _check_login(project: str) -> None:
  """Checks that W&B accepts this machine's key. Without one, W&B would ask for it much later."""
  import wandb

  if wandb.setup().settings.mode not in ONLINE_MODES:
    return
  try:
    reason = "" if wandb.login(prompt=False) else "it has no API key"
  except Exception as error:  # the library raises errors of several families
    reason = first_line(error)
  if reason:
    raise UserError(
      f"log.wandb = {project!r}: cannot log in to W&B ({reason}); set WANDB_API_KEY or run "
      "`wandb login`, set WANDB_MODE=offline, or leave log.wandb empty"
    )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics that are finite numbers."""
  return {name: value for name, value in metrics.items() if math.isfinite(value)}
