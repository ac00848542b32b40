"""TensorBoard, Weights & Biases and Trackio: metrics, samples, and a resume."""

import json
import os
import socket
import struct
import subprocess
import sys
import time

import pytest

from gtpo_jax.config import freeze
from gtpo_jax.logs import journal
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.trackers import TensorBoard, check_trackers, finite
from gtpo_jax.runtime.errors import UserError


def events(folder, files=None):
  """Yields the events of TensorBoard's files."""
  from tensorboardX.proto.event_pb2 import Event

  for file in sorted(files or folder.iterdir()):
    data = file.read_bytes()
    while data:
      length = struct.unpack("<Q", data[:8])[0]
      yield Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]


def test_tensorboard_logs_metrics_and_samples(tmp_path):
  tracker = TensorBoard(tmp_path, 0)
  tracker.log_metrics(3, {"loss": 0.5, "entropy/correct": float("nan")})
  tracker.log_sample(3, "1+2:", "it is `3`\nor *4*", correct=False)
  tracker.close()
  values = [(event.step, value) for event in events(tmp_path) for value in event.summary.value]
  scalars = [(step, value.tag, value.simple_value) for step, value in values if value.simple_value]
  assert scalars == [(3, "loss", 0.5)]
  (text,) = [value.tensor.string_val[0].decode() for _, value in values if value.tensor.string_val]
  assert text == "**wrong**\n\n    1+2:\n    \n    it is `3`\n    or *4*"


def test_a_full_disk_is_an_error_of_the_call(tmp_path, monkeypatch):
  """A thread of the library would print it instead, and the run would continue."""
  monkeypatch.setattr(socket, "gethostname", lambda: "host")
  monkeypatch.setattr(time, "time", lambda: 1.7e9)
  (tmp_path / "events.out.tfevents.1700000000.host.000000").symlink_to("/dev/full")
  tracker = TensorBoard(tmp_path, 0)
  for call in (lambda: tracker.log_metrics(1, {"loss": 0.5}), tracker.close):
    with pytest.raises(OSError, match="No space left on device"):
      call()


def test_damaged_event_files_do_not_disturb_a_resume(tmp_path):
  """Each session writes files of its own; TensorBoard skips what it cannot read."""
  tracker = TensorBoard(tmp_path, 0)
  tracker.log_metrics(1, {"loss": 0.5})
  tracker.close()
  (torn,) = tmp_path.iterdir()
  torn.write_bytes(torn.read_bytes()[:-3])
  (tmp_path / "events.out.tfevents.1.host").write_bytes(b"\xff" * 100)
  (tmp_path / "events.out.tfevents.2.host").mkdir()
  before = set(tmp_path.iterdir())
  time.sleep(1.1)  # the names have the second at which they were made
  resumed = Journal(tmp_path, 0, tensorboard=True)
  resumed.write(1, {"loss": 0.25})
  resumed.close()
  new = set(tmp_path.iterdir()) - before - {tmp_path / "metrics.jsonl"}
  values = [value.simple_value for event in events(tmp_path, new) for value in event.summary.value]
  assert values == [0.25] and torn in before


def test_finite():
  assert finite({"a": 1.0, "b": float("nan"), "c": float("inf")}) == {"a": 1.0}


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(journal, "is_first_process", lambda: False)
  no_tracker = lambda: pytest.fail("a tracker on another process")
  other = journal.Journal(tmp_path, 0, True, no_tracker)
  other.write(1, {"loss": 1.0})
  other.write_sample(1, "1+2:", "3", correct=True)
  other.amend(1, {"eval/sums/mean@2": 0.5})
  other.close()
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
  """The real library writes its files offline; a resumed run keeps its id."""
  wandb = pytest.importorskip("wandb")
  from gtpo_jax.logs.trackers import WeightsAndBiases

  monkeypatch.setenv("WANDB_MODE", "offline")
  for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
    monkeypatch.setenv(name, str(tmp_path))
  config = freeze({"seed": 7, "log": {"wandb": "gtpo-test"}})
  for first in (0, 2):
    make_trackers = lambda: [WeightsAndBiases(tmp_path, config, "a run", print)]
    written = journal.Journal(tmp_path, first, False, make_trackers)
    for step in (first + 1, first + 2):
      written.write(step, {"loss": step / 2, "entropy/correct": float("nan")})
      written.write_sample(step, "1+2:", f"text {step}", correct=True)
    written.amend(first + 2, {"eval/sums/mean@2": 0.5})
    written.close()
    time.sleep(1.1)  # W&B names a run's folder after the second it starts
  wandb.teardown()  # waits for the process that writes the files
  runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
  run_id = (tmp_path / "wandb_id").read_text()
  assert len(runs) == 2
  assert all(run.name.endswith(run_id) for run in runs)
  history = []
  projects = set()
  seeds = set()
  for run in runs:
    for record in records(next(run.glob("*.wandb"))):
      if record.HasField("history"):
        history.append(
          {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        )
      if record.HasField("run"):
        projects.add(record.run.project)
        seeds |= {item.value_json for item in record.run.config.update if item.key == "seed"}
    (table,) = (run / "files" / "media" / "table").glob("*.table.json")
    (row,) = json.loads(table.read_text())["data"]
    assert row[1:] == ["1+2:", f"text {row[0]}", True]
  assert projects == {"gtpo-test"}
  assert seeds == {"7"}
  losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
  assert losses == [("1", "0.5"), ("2", "1"), ("3", "1.5"), ("4", "2")]
  assert not any("entropy/correct" in row for row in history)
  evaluated = [row for row in history if "eval/sums/mean@2" in row]
  assert [row["step"] for row in evaluated] == ["2", "4"]
  for row in evaluated:
    assert any(key.startswith("samples") for key in row)


TRACKIO = """
import sys
from pathlib import Path
from gtpo_jax.config import freeze
from gtpo_jax.logs.journal import Journal
from gtpo_jax.logs.trackers import make_trackers

folder, first = Path(sys.argv[1]), int(sys.argv[2])
config = freeze({"seed": 7, "log": {"trackio": "gtpo test"}})
journal = Journal(folder, first, False, lambda: make_trackers(folder, config, "a run", print))
for step in (first + 1, first + 2):
  journal.write(step, {"loss": step / 2, "entropy/correct": float("nan")})
  journal.write_sample(step, "1+2:", f"text {step}", correct=True)
journal.amend(first + 2, {"eval/sums/mean@2": 0.5})
journal.close()
"""
READ = """
import json, sys, trackio
(run,) = trackio.Api().runs("gtpo test")
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([run.name, run.config["seed"], SQLiteStorage.get_logs("gtpo test", run.name)]))
"""


@pytest.mark.slow
def test_trackio(tmp_path):
  """The real library writes its database on this machine; a resumed run is the same one."""
  pytest.importorskip("trackio")
  env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
  run = lambda *args: (
    subprocess.run(
      [sys.executable, "-c", *args],
      env=env,
      capture_output=True,
      text=True,
      timeout=120,
      check=True,
    ).stdout
  )
  run_id = ""
  for first in ("0", "2"):
    (line,) = run(TRACKIO, str(tmp_path), first).splitlines()
    run_id = run_id or (tmp_path / "trackio_id").read_text()
    assert line == f"Trackio's run is a run-{run_id}; to see it: trackio show --project 'gtpo test'"
  name, seed, rows = json.loads(run(READ))
  assert (name, seed) == (f"a run-{run_id}", 7)
  assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
    (1, 0.5),
    (2, 1.0),
    (3, 1.5),
    (4, 2.0),
  ]
  assert not any("entropy/correct" in row for row in rows)
  evaluated = [row for row in rows if "eval/sums/mean@2" in row]
  assert [row["step"] for row in evaluated] == [2, 4]
  assert [row["samples"]["_value"][0]["completion"] for row in evaluated] == ["text 2", "text 4"]


KILLED = """
import sys, psutil
from pathlib import Path
from gtpo_jax.config import freeze
from gtpo_jax.logs.trackers import WeightsAndBiases

config = freeze({"log": {"wandb": "gtpo-test"}})
tracker = WeightsAndBiases(Path(sys.argv[1]), config, "a run", print)
tracker.log_metrics(1, {"loss": 0.5})
for child in psutil.Process().children(recursive=True):
  child.kill()
  child.wait()
for step in range(2, 5):
  tracker.log_metrics(step, {"loss": 0.5})
tracker.close()
"""


@pytest.mark.slow
def test_a_run_continues_without_weights_and_biases_if_its_process_is_killed(tmp_path):
  pytest.importorskip("wandb")
  done = subprocess.run(
    [sys.executable, "-c", KILLED, str(tmp_path)],
    env={**os.environ, "WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  assert line.startswith("warning: log.wandb = 'gtpo-test': W&B has failed (")
  assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_weights_and_biases_without_a_key_is_refused_at_once(tmp_path, monkeypatch):
  """The library itself would only find out after the warm start, and ask or raise."""
  wandb = pytest.importorskip("wandb")
  wandb.teardown()
  monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
  monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
  for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
    monkeypatch.delenv(name, raising=False)
  config = freeze({"log": {"wandb": "gtpo-test"}})
  with pytest.raises(UserError, match=r"log.wandb = 'gtpo-test': cannot log in .*no API key.*MODE"):
    check_trackers(config)
  wandb.teardown()
  monkeypatch.setenv("WANDB_MODE", "offline")
  check_trackers(config)
  wandb.teardown()


def records(file):
  """Yields the records of a .wandb file: a LevelDB log after a header of 7 bytes."""
  from wandb.proto import wandb_internal_pb2

  data = file.read_bytes()
  header = 7  # bytes: checksum, length and kind
  block = 32768
  at = header
  parts = b""
  while at + header <= len(data):
    left = block - at % block
    if left < header:  # the end of a block is too short for a header
      at += left
      continue
    _, length, kind = struct.unpack("<IHB", data[at : at + header])
    parts += data[at + header : at + header + length]
    at += header + length
    if kind in (1, 4):  # a complete record, or its last part
      record = wandb_internal_pb2.Record()
      record.ParseFromString(parts)
      parts = b""
      yield record
