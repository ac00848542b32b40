"""The lock of a workdir in an object store: one holder, succeeded if dead, told if it lost it."""

import json
import threading
import time

import pytest

from gtpo_jax.checkpoint import lease
from gtpo_jax.checkpoint.lease import claim_lease
from gtpo_jax.checkpoint.workdir import claim
from gtpo_jax.config import Config
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import storage_path

QUIET = {"host": "elsewhere", "process": 7, "boot": "another machine", "renewal": "a"}


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
  monkeypatch.setattr(lease, "RENEW_S", 0.05)
  monkeypatch.setattr(lease, "LEASE_S", 0.6)
  monkeypatch.setattr(lease, "POLL_S", 0.05)


@pytest.fixture
def workdir(store):
  return storage_path(f"{store.url}/run")


def leave(workdir, **changes):
  """Leaves the lock as a process that was killed."""
  (workdir / "lock" / "00000004").write_text(json.dumps(QUIET | changes))


def test_a_second_owner_is_refused_while_the_first_is_alive(workdir, store, monkeypatch):
  monkeypatch.setattr(lease, "LEASE_S", 30.0)  # a busy machine may renew late
  said = []
  with claim_lease(workdir, said.append):
    with (
      pytest.raises(UserError, match=r"is in use by process \d+ on .*; wait until that ends"),
      claim_lease(workdir, said.append),
    ):
      pass
    assert store.names() == ["run/lock/00000001"]
  assert store.names() == []
  with claim_lease(workdir, said.append):
    pass


def test_a_dead_owner_is_succeeded_after_a_while(workdir, store):
  leave(workdir)
  said = []
  began = time.monotonic()
  with claim_lease(workdir, said.append) as held:
    assert time.monotonic() - began >= 0.6
    assert store.names() == ["run/lock/00000005"]
    held.check()
  assert len(said) == 1 and "was not closed by process 7 on elsewhere" in said[0]


def test_a_dead_process_of_this_machine_is_succeeded_at_once(workdir):
  leave(workdir, boot=lease._boot(), process=2**22 + 1)
  said = []
  with claim_lease(workdir, said.append):
    assert said == []


@pytest.mark.slow
def test_a_process_that_was_paused_asks_again_before_it_takes_over(workdir, monkeypatch):
  """The holder renews its lock while the other process is paused, just after it has asked."""
  leave(workdir)
  asked = []
  read = lease._read

  def pausing_read(file):
    seen = read(file)
    asked.append(seen)
    if len(asked) == 2:
      file.write_text(json.dumps(QUIET | {"renewal": "b"}))
      time.sleep(2 * lease.LEASE_S)
    return seen

  monkeypatch.setattr(lease, "_read", pausing_read)
  with pytest.raises(UserError, match="is in use by process 7"), claim_lease(workdir, print):
    pass


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"null", b'{"boot": 3}'])
@pytest.mark.some(2, slow=0)
def test_any_content_of_a_lock_is_waited_for(workdir, content):
  (workdir / "lock" / "00000004").write_bytes(content)
  said = []
  with claim_lease(workdir, said.append):
    assert "was not closed by another process" in said[0]


def test_of_two_that_wait_one_succeeds(workdir, monkeypatch):
  monkeypatch.setattr(lease, "LEASE_S", 2.0)  # a busy machine may renew late
  leave(workdir)
  results = []
  start = threading.Barrier(2)
  done = threading.Barrier(2)

  def attempt():
    start.wait()
    try:
      with claim_lease(workdir, lambda line: None):
        results.append("held")
        done.wait()
    except UserError as error:
      results.append(str(error))
      done.wait()

  threads = [threading.Thread(target=attempt) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(result == "held" for result in results) == [False, True]
  assert any("is in use by" in result for result in results)


def test_a_process_that_lost_its_lock_is_told(workdir):
  with claim_lease(workdir, print) as held:
    (workdir / "lock" / "00000002").write_text("another")
    for _ in range(1000):
      time.sleep(0.05)
      if held._lost:
        break
    with pytest.raises(RunError, match=r"another process has taken over workdir 'gs://bucket/run'"):
      held.check()
  assert (workdir / "lock" / "00000002").exists()


def test_a_store_that_refuses_writes_is_one_line(workdir, store):
  store.fault = lambda method, path, query: 403 if method == "POST" else None
  with (
    pytest.raises(UserError, match=r"^cannot write into workdir 'gs://bucket/run': .*Forbidden"),
    claim(workdir, Config()),
  ):
    pass


def test_a_missing_bucket_is_one_line(workdir):
  with (
    pytest.raises(UserError, match=r"'gs://missing/run': no such bucket or object$"),
    claim(storage_path("gs://missing/run"), Config()),
  ):
    pass


def test_claiming_writes_the_config(workdir, store):
  with claim(workdir, Config()) as claimed:
    claimed.check_lock()
    assert json.loads(store.read("run/config.json"))["algorithm"]["name"] == "gtpo"
