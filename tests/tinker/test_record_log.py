"""The journal: what was written is read, and a torn end is cut off."""

import pytest

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.tinker.ledger.record_log import Record, RecordLog

RECORDS = [
  Record({"kind": "a", "n": 1}, b"body"),
  Record({"kind": "b"}),
  Record({"n": 2}, b"\0" * 9),
]


def write(file):
  journal = RecordLog(file)
  for record in RECORDS:
    journal.sync(journal.append(record))
  journal.close()
  return file.read_bytes()


def test_records_come_back(tmp_path):
  file = tmp_path / "journal"
  write(file)
  journal = RecordLog(file)
  assert list(journal.records()) == RECORDS
  journal.rewrite(lambda head: head.get("kind") != "b")
  journal.append(RECORDS[1])
  assert list(journal.records()) == [RECORDS[0], RECORDS[2], RECORDS[1]]
  journal.close()


def test_an_end_that_a_kill_has_torn_is_cut_off_wherever_it_is(tmp_path):
  whole = write(tmp_path / "whole")
  for size in range(len(whole)):
    file = tmp_path / "torn" / "journal"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(whole[:size])
    journal = RecordLog(file)
    kept = list(journal.records())
    assert kept == RECORDS[: len(kept)]
    journal.append(Record({"kind": "next"}))
    assert list(journal.records()) == [*kept, Record({"kind": "next"})]
    journal.close()


def test_a_changed_byte_ends_what_is_read(tmp_path):
  file = tmp_path / "journal"
  data = bytearray(write(file))
  data[-1] ^= 1
  file.write_bytes(data)
  journal = RecordLog(file)
  assert list(journal.records()) == RECORDS[:2]
  journal.close()


def test_two_processes_do_not_share_a_journal(tmp_path):
  journal = RecordLog(tmp_path / "journal")
  with pytest.raises(UserError, match="another process serves"):
    RecordLog(tmp_path / "journal")
  journal.close()
  RecordLog(tmp_path / "journal").close()
