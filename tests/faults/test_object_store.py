"""Two processes train in an object store that fails: killed, cut off, refused; nothing is lost."""

import json
import subprocess
import sys

import pytest
from object_store import CUT
from processes import ROOT, environment, read_result, start_two
from processes import SETTINGS as LONGER

from gtpo_jax.runtime.paths import storage_path

pytestmark = pytest.mark.slow
SETTINGS = {**LONGER, "steps": 4}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The result of two processes that write into a local folder."""
  workdir = tmp_path_factory.mktemp("faults") / "two"
  codes, printed = start_two(workdir, "-", 0, SETTINGS)
  assert codes == [0, 0], printed
  return read_result(workdir)


def gtpo(*args):
  """Runs one process of `gtpo` and returns what it prints."""
  done = subprocess.run(
    [sys.executable, "-m", "gtpo_jax", *map(str, args)],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.manual
def test_a_killed_run_resumes_and_its_model_goes_on(store, undisturbed):
  url = f"{store.url}/run"
  codes, printed = start_two(url, "kill:saving:1", 0, SETTINGS)
  assert 0 not in codes, printed
  codes, printed = start_two(url, "-", 0, SETTINGS)
  assert codes == [0, 0], printed
  assert read_result(storage_path(url)) == undisturbed
  assert not store.names("run/lock")

  evaluated = f"{store.url}/eval.json"
  gtpo("eval", f"--model={url}", "--k=1,2", f"--json={evaluated}")
  assert json.loads(store.read("eval.json"))["step"] == SETTINGS["steps"]
  assert gtpo("report", f"--workdir={url}", f"--out={store.url}/report.html")
  exported = f"{store.url}/hf/run"
  gtpo("export", f"--workdir={url}", f"--out={exported}")
  options = ["--prompt=1+2:", "--temperature=0", "--max_tokens=8"]
  of_run = gtpo("sample", f"--model={url}", *options)
  assert gtpo("sample", f"--model={exported}", *options) == of_run


def every(count, fault):
  """Returns a fault of each `count`th request."""
  seen = 0

  def of(method, path, query):
    nonlocal seen
    seen += 1
    return fault if seen % count == 0 else None

  return of


@pytest.mark.manual
@pytest.mark.parametrize("fault", [503, CUT])
def test_a_store_that_fails_now_and_then_changes_nothing(store, undisturbed, fault):
  store.fault = every(40, fault)
  codes, printed = start_two(f"{store.url}/run", "-", 0, SETTINGS)
  store.fault = every(10**9, None)
  assert codes == [0, 0], printed
  assert read_result(storage_path(f"{store.url}/run")) == undisturbed


@pytest.mark.manual
def test_a_full_quota_ends_in_one_line_and_loses_nothing(store, undisturbed):
  url = f"{store.url}/run"
  full = "run/checkpoints/4/"
  name = lambda path, query: query.get("name") or path
  store.fault = lambda method, path, query: (
    403 if method in ("POST", "PUT") and full in name(path, query) else None
  )
  codes, printed = start_two(url, "-", 0, SETTINGS)
  assert 0 not in codes
  for text in printed:  # of both processes, if the second notices before the first has ended
    assert "Traceback" not in text, printed
  assert "cannot save the checkpoint of step 4" in "".join(printed)
  store.fault = every(10**9, None)
  codes, printed = start_two(url, "-", 0, SETTINGS)
  assert codes == [0, 0], printed
  assert "resumed at step 2" in printed[0]
  assert read_result(storage_path(url)) == undisturbed
