"""A hub on this machine that answers 429 or 503: waits, the cache, and one download."""

import email.utils
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ROOT
from hub import Busy, hub

from gtpo_jax.runtime.busy_hub import _seconds_to_wait

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
FIND = """
import sys
from gtpo_jax.models.hf.folder import find
from gtpo_jax.runtime.errors import UserError
try:
  print(find("us/small"))
except UserError as error:
  print("UserError:", error)
"""


def start(address, home, program=FIND):
  environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
  environment.pop("HF_HUB_CACHE", None)
  return subprocess.Popen(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  return out.strip(), err


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
def test_it_waits_as_the_hub_asks(status, tmp_path):
  busy = Busy(2, status, {"Retry-After": "2"})
  with hub({"us/small": FILES}, busy=busy) as address:
    folder, err = finish(start(address, tmp_path))
  # The hub's library itself repeats the later requests, after a time of its own.
  assert max(after - before for before, after in itertools.pairwise(busy.asked)) >= 2
  assert f"the hub answers {status} (" in err and "for 'us/small'; trying again in 2 s" in err
  assert {name: (Path(folder) / name).read_bytes() for name in FILES} == FILES


@pytest.mark.slow
def test_a_complete_cache_is_used(tmp_path):
  with hub({"us/small": FILES}) as address:
    folder, _ = finish(start(address, tmp_path))
  with hub({"us/small": FILES}, busy=Busy(10**9, 429, {"Retry-After": "100"})) as address:
    assert finish(start(address, tmp_path))[0] == folder
    os.remove(f"{folder}/model.safetensors")
    program = "import gtpo_jax.runtime.busy_hub as hub\nhub.LONGEST_WAIT_S = 50\n" + FIND
    out, _ = finish(start(address, tmp_path, program))
  assert out.startswith(
    "UserError: 'us/small' is not complete in the cache, and the hub answers 429"
  )


@pytest.mark.slow
def test_every_process_says_when_it_gives_up(tmp_path):
  with hub({"us/small": FILES}, busy=Busy(10**9, 429, {"Retry-After": "5000"})) as address:
    both = [start(address, tmp_path) for _ in range(2)]
    for out, err in map(finish, both):
      assert len(out.splitlines()) == 1 and "trying again" not in err
      assert "the hub answers 429 (too many requests; next try in 5000 s); try again" in out


@pytest.mark.slow
def test_one_process_of_a_host_downloads_and_the_others_wait(tmp_path):
  busy = Busy(0)
  with hub({"us/small": FILES}, busy=busy) as address:
    folders = {finish(process)[0] for process in [start(address, tmp_path) for _ in range(3)]}
  assert len(folders) == 1 and "UserError" not in folders.pop()
  assert sum(path.endswith("model.safetensors") for path in busy.served) == 1


DATASET = """
from gtpo_jax.data.sources import load_source
from gtpo_jax.runtime.errors import UserError
try:
  print(load_source("hf:us/rows").problems[0].answer)
except UserError as error:
  print("UserError:", error)
"""


@pytest.mark.slow
def test_a_dataset_waits_too(tmp_path):
  pytest.importorskip("datasets")
  row = json.dumps({"prompt": "1+1", "answer": "2"}).encode()
  stored = {"datasets/us/rows": {"train.jsonl": row}}
  with hub(stored, busy=Busy(1, 429, {"Retry-After": "1"})) as address:
    assert finish(start(address, tmp_path, DATASET))[0] == "2"


def test_what_the_headers_ask_for():
  assert _seconds_to_wait({"Retry-After": "30"}) == 30
  date = email.utils.formatdate(time.time() + 60, usegmt=True)
  assert 55 < _seconds_to_wait({"Retry-After": date}) <= 60
  assert _seconds_to_wait({"RateLimit": '"api";r=0;t=55'}) == 55
  assert _seconds_to_wait({}) is None
  assert _seconds_to_wait({"Retry-After": "soon"}) is None
