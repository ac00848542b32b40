"""Logs in an object store: uploaded in blocks, continued by a resumed run, not lost by a fault."""

import pytest
from etils import epath

from gtpo_jax.logs import spool
from gtpo_jax.logs.spool import open_logs, read_lines
from gtpo_jax.runtime.errors import RunError
from gtpo_jax.runtime.paths import storage_path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(spool, "BLOCK_BYTES", 10)
  monkeypatch.setattr(spool, "FLUSH_S", 3600.0)


def append(logs, text, name="metrics.jsonl"):
  with (logs.folder / name).open("a") as file:
    file.write(text)


def stored(store, name="metrics.jsonl"):
  return b"".join(store.read(block) for block in store.names(f"run/{name}/"))


def test_local_logs_are_written_where_they_belong(tmp_path):
  with open_logs(epath.Path(tmp_path)) as logs:
    assert logs.folder == epath.Path(tmp_path)
    logs.flush()


def test_only_the_last_blocks_are_uploaded(store):
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    append(logs, "0123456789abcde")
    logs.flush()
    assert store.uploads() == ["run/metrics.jsonl/000000", "run/metrics.jsonl/000001"]
    append(logs, "fghijklm")
    logs.flush()
    assert store.uploads()[2:] == ["run/metrics.jsonl/000001", "run/metrics.jsonl/000002"]
    logs.flush()
    assert len(store.uploads()) == 4  # nothing changed
    assert stored(store) == b"0123456789abcdefghijklm"
    (logs.folder / "metrics.jsonl").write_text("0123456789ABC")  # rewritten and shorter
    logs.flush()
    assert store.uploads()[4:] == ["run/metrics.jsonl/000001"]
    assert stored(store) == b"0123456789ABC"
  assert not logs.folder.exists()


def test_other_files_are_uploaded_as_they_are(store):
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    (logs.folder / "credit").mkdir()
    (logs.folder / "credit" / "1.npz").write_bytes(b"arrays")
    (logs.folder / "credit" / "2.npz.tmp").write_bytes(b"half")
  assert store.names() == ["run/credit/1.npz"]


def test_a_resumed_run_continues_the_files(store):
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    append(logs, "first line\nsecond line\n")
    append(logs, "an id", "wandb_id")
  store.requests = []
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    assert (logs.folder / "metrics.jsonl").read_text() == "first line\nsecond line\n"
    assert (logs.folder / "wandb_id").read_text() == "an id"
    append(logs, "third")
  assert set(store.uploads()) == {"run/metrics.jsonl/000002", "run/wandb_id"}
  lines = list(read_lines(storage_path(f"{store.url}/run/metrics.jsonl")))
  assert lines == [b"first line", b"second line", b"third"]


def test_a_store_that_is_down_costs_nothing_once_it_is_back(store):
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    append(logs, "0123456789abcde")
    store.fault = lambda method, path, query: 403 if method == "POST" else None
    with pytest.raises(RunError, match=r"^cannot write the logs to 'gs://bucket/run': .*Forbidden"):
      logs.flush()
    store.fault = lambda method, path, query: None
    append(logs, "f")
    logs.flush()
    assert stored(store) == b"0123456789abcdef"


def test_logs_are_uploaded_in_the_background(store, monkeypatch):
  monkeypatch.setattr(spool, "FLUSH_S", 0.05)
  with open_logs(storage_path(f"{store.url}/run")) as logs:
    append(logs, "line\n")
    for _ in range(200):
      if store.names():
        break
      logs._ended.wait(0.05)
    assert stored(store) == b"line\n"


def test_the_first_error_of_a_run_is_the_one_reported(store):
  with (
    pytest.raises(ValueError, match="of the run"),
    open_logs(storage_path(f"{store.url}/run")) as logs,
  ):
    append(logs, "line\n")
    store.fault = lambda method, path, query: 403
    raise ValueError("of the run")
