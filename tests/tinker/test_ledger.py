"""The ledger: what is acknowledged is on disk, and a damaged database is not used."""

import dataclasses
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.requests import ApiError
from gtpo_jax.tinker.ledger import Ledger
from gtpo_jax.tinker.wire import ERROR, JSON, SAMPLE, StoredResult, Submission

BODY = b'{"x": 1}' * 40
DONE = StoredResult(JSON, b"{}")


def open_ledger(folder, identity="base", models=8, samples=100):
  return Ledger(folder / "ledger.sqlite", identity, 0, samples, models, lambda name: -1)


def model_of(ledger):
  """Returns a new model of a new session, whose making is request 0."""
  session = ledger.open_session("me")
  ledger.number_session(session)
  model = f"{session}:train:0"
  ledger.submit(Submission("create_model", model, 0, BODY, digest=b"0", spec={"rank": 4}))
  return model


def closed(ledger):
  ledger.close()
  ledger.close_file()


def test_requests_and_results_are_there_after_a_restart(tmp_path):
  ledger = open_ledger(tmp_path)
  model = model_of(ledger)
  ledger.submit(Submission("forward", model, 1, BODY, b"drawn", b"1"))
  request, known = ledger.take()
  assert request.seq == 0 and known is None
  ledger.finish(request, DONE)
  closed(ledger)
  ledger = open_ledger(tmp_path)
  # Without a snapshot, all is carried out again, and the results that were seen are kept.
  request, known = ledger.take()
  assert (request.seq, request.body, known.body) == (0, BODY, b"{}")
  ledger.finish(request, DONE)
  request, known = ledger.take()
  assert request == Submission("forward", model, 1, BODY, b"drawn", b"1") and known is None
  assert ledger.spec(model) == {"rank": 4} and ledger.owner(model) == "me"
  closed(ledger)


def test_a_refused_request_is_answered_and_the_next_one_runs(tmp_path):
  ledger = open_ledger(tmp_path)
  model = model_of(ledger)
  ledger.finish(ledger.take()[0], DONE)
  refused = Submission("forward", model, 1, b"", digest=b"1")
  ledger.submit(refused, answer=StoredResult(ERROR, b"no", "user"))
  ledger.submit(Submission("forward", model, 2, BODY, digest=b"2"))
  request, known = ledger.take()
  assert request.seq == 1 and known.body == b"no"
  ledger.finish(request, known)
  assert ledger.take()[0].seq == 2
  closed(ledger)


def test_a_number_means_one_request(tmp_path):
  ledger = open_ledger(tmp_path)
  model = model_of(ledger)
  first = Submission("forward", model, 1, BODY, digest=b"1")
  ledger.submit(first)
  ledger.submit(first)  # sent again
  with pytest.raises(ApiError, match="seq_id 1 was another request"):
    ledger.submit(dataclasses.replace(first, digest=b"2"))
  with pytest.raises(ApiError, match="seq_id 9999 is far from the model's next one, 0"):
    ledger.submit(Submission("forward", model, 9999, BODY))
  closed(ledger)


def test_a_full_disk_loses_nothing_and_ends_with_it(tmp_path):
  """SQLite says that the database is full, as it does when the disk is."""
  ledger = open_ledger(tmp_path)
  model = model_of(ledger)
  pages = ledger._one("PRAGMA page_count")[0]
  ledger._db.execute(f"PRAGMA max_page_count = {pages + 2}")
  large = Submission("forward", model, 1, BODY * 1000, digest=b"1")
  for _ in range(2):
    with pytest.raises(
      ApiError, match="cannot write its ledger: database or disk is full"
    ) as error:
      ledger.submit(large)
    assert error.value.status == 503 and not ledger.is_known(large)
  request, _ = ledger.take()
  finishing = threading.Thread(
    target=ledger.finish, args=(request, StoredResult(JSON, b"x" * 10**5))
  )
  finishing.start()  # waits for space
  finishing.join(0.5)
  assert finishing.is_alive()
  ledger._db.execute("PRAGMA max_page_count = 100000")
  finishing.join(30)
  assert not finishing.is_alive() and ledger._result_bytes == 10**5
  ledger.submit(large)
  assert ledger.take()[0] == large
  closed(ledger)


def damaged(folder, change):
  file = folder / "ledger.sqlite"
  content = bytearray(file.read_bytes())
  change(content)
  file.write_bytes(content)


def flip(content):
  content[content.index(BODY)] ^= 4


def cut(content):
  del content[len(content) // 2 :]


def begin(content):
  content[:50] = bytes(50)


@pytest.mark.parametrize("change", [flip, cut, begin])
def test_a_damaged_database_is_refused(tmp_path, change):
  ledger = open_ledger(tmp_path)
  model_of(ledger)
  ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
  closed(ledger)
  closed(open_ledger(tmp_path))
  damaged(tmp_path, change)
  with pytest.raises(UserError, match=r"ledger.sqlite' (is damaged|cannot be read)") as error:
    open_ledger(tmp_path)
  assert "\n" not in str(error.value)


def test_what_does_not_belong_together_is_refused(tmp_path):
  ledger = open_ledger(tmp_path)
  with pytest.raises(UserError, match="another process serves"):
    open_ledger(tmp_path)
  for _ in range(2):
    model_of(ledger)
  closed(ledger)
  with pytest.raises(UserError, match="was begun with another base model"):
    open_ledger(tmp_path, identity="other")
  with pytest.raises(UserError, match=r"has 2 models in training, over --models=1"):
    open_ledger(tmp_path, models=1)


def test_only_so_many_samples_wait(tmp_path):
  ledger = open_ledger(tmp_path, samples=1)
  session = ledger.open_session("me")
  ask = lambda seq: Submission(SAMPLE, f"{session}:sample:0", seq, BODY, digest=bytes([seq]))
  ledger.submit(ask(0))
  with pytest.raises(ApiError, match="busy"):
    ledger.submit(ask(1))
  ledger.finish(ledger.take_sample(), DONE)
  ledger.submit(ask(1))
  assert ledger.take_sample().seq == 1
  closed(ledger)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ledger import BODY, Submission, model_of, open_ledger
ledger = open_ledger(Path(sys.argv[1]))
model = model_of(ledger)
for seq in range(1, 10**6):
  ledger.submit(Submission("forward", model, seq, BODY, digest=b"%d" % seq))
  print(seq, flush=True)
  if seq % 3000 == 0:
    ledger.next[model] = seq
"""


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path):
  code = KILLED.format(tests=str(Path(__file__).parent))
  command = [sys.executable, "-c", code, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    for line in process.stdout:
      if int(line) == 50:
        process.send_signal(signal.SIGKILL)
        break
    last = max([50, *map(int, process.stdout.read().split())])
  ledger = open_ledger(tmp_path)
  (model,) = ledger.next
  seqs = [x for (x,) in ledger._db.execute("SELECT seq FROM requests ORDER BY seq")]
  assert seqs in (list(range(last + 1)), list(range(last + 2)))  # the last may not have been said
  assert ledger.take()[0].target == model
  closed(ledger)


def test_the_database_of_a_newer_sqlite_or_another_program_is_refused(tmp_path):
  with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
    other.execute("CREATE TABLE requests (id TEXT)")
  other.close()
  with pytest.raises(UserError, match=r"ledger.sqlite' cannot be read"):
    open_ledger(tmp_path)


def test_no_request_is_lost_in_silence_wherever_the_file_is_cut(tmp_path):
  ledger = open_ledger(tmp_path)
  model = model_of(ledger)
  for seq in range(1, 60):
    ledger.submit(Submission("forward", model, seq, BODY, digest=b"%d" % seq))
    ledger.finish(Submission("forward", model, seq, BODY), DONE)
  ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
  closed(ledger)
  content = (tmp_path / "ledger.sqlite").read_bytes()
  refused = 0
  for size in range(0, len(content), 1000):
    (tmp_path / "ledger.sqlite").write_bytes(content[:size])
    try:
      ledger = open_ledger(tmp_path)
    except UserError:
      refused += 1
      continue
    counts = [ledger._one(f"SELECT count(*) FROM {x}")[0] for x in ("requests", "results")]
    closed(ledger)
    assert counts == [60, 59] or not size
  assert refused > len(content) / 1000 - 5


def test_no_request_is_lost_in_silence_wherever_the_log_is_damaged(tmp_path):
  """SQLite drops the rest of a log from the first damaged place on."""
  ledger = open_ledger(tmp_path / "open")
  model = model_of(ledger)
  for seq in range(1, 20):
    ledger.submit(Submission("forward", model, seq, BODY, digest=b"%d" % seq))
  name = "ledger.sqlite-wal"
  size = (tmp_path / "open" / name).stat().st_size
  killed = tmp_path / "killed"

  def reopened(change):
    shutil.rmtree(killed, ignore_errors=True)
    shutil.copytree(tmp_path / "open", killed)
    change(killed / name)
    return open_ledger(killed)

  def flip(place):
    return lambda file: file.write_bytes(
      (content := file.read_bytes())[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
    )

  def cut(place):
    return lambda file: file.write_bytes(file.read_bytes()[:place])

  def clear(place):
    return lambda file: file.write_bytes(file.read_bytes()[:place] + bytes(size - place))

  for make in (flip, cut, clear):
    for place in (5, size // 3, size - 9000, size - 3000):
      with pytest.raises(UserError, match=r"of \d+ changes; restore it with its -wal") as error:
        reopened(make(place))
      assert "\n" not in str(error.value)
  with pytest.raises(UserError, match="changes"):
    reopened(lambda file: file.unlink())
  again = reopened(lambda file: None)
  assert again._one("SELECT count(*) FROM requests")[0] == 20
  closed(again)
  again = reopened(lambda file: file.with_name("ledger.lock").unlink() or cut(size - 9000)(file))
  assert again._one("SELECT count(*) FROM requests")[0] < 20
  closed(again)
  closed(ledger)
