"""The comparison of what processes are going to do; real pairs are in tests/faults."""

import random
import threading
import time
import types

import pytest

from gtpo_jax.config import default_config, flatten, freeze, resolved_dict
from gtpo_jax.runtime.cluster import agreement
from gtpo_jax.runtime.cluster.agreement import agree, difference, process_identity
from gtpo_jax.runtime.errors import RunError, UserError


class Store:
  """The key-value store of a coordinator."""

  def __init__(self):
    self.values = {}
    self.changed = threading.Condition()

  def key_value_set(self, key, value):
    with self.changed:
      assert key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  def blocking_key_value_get(self, key, timeout_ms):
    with self.changed:
      if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
        raise TimeoutError("DEADLINE_EXCEEDED")
      return self.values[key]


def together(monkeypatch, everyone, late=()):
  """What `agree` raises in each process, as threads; those of `late` never call it."""
  monkeypatch.setattr(agreement, "END_S", 0.0)
  store = Store()
  here = threading.local()
  monkeypatch.setattr(agreement, "_state", lambda: here.state)
  monkeypatch.setattr(agreement, "next", lambda rounds: 0, raising=False)
  errors = [None] * len(everyone)

  def process(i):
    here.state = types.SimpleNamespace(client=store, process_id=i, num_processes=len(everyone))
    try:
      agree(everyone[i])
    except (UserError, RunError) as error:
      errors[i] = error

  threads = [threading.Thread(target=process, args=(i,)) for i in range(len(everyone))]
  for i, thread in enumerate(threads):
    if i not in late:
      thread.start()
  for i, thread in enumerate(threads):
    if i not in late:
      thread.join(30)
  return errors


def identity():
  return process_identity() | flatten(resolved_dict(freeze(default_config())))


def test_any_difference_is_named_on_every_process(monkeypatch):
  """50 random ones: another value, one that is missing, or one that only this process has."""
  rng = random.Random(0)
  values = {name: str(value) for name, value in identity().items()}
  assert len(values) > 150
  for _ in range(50):
    count = rng.randint(2, 4)
    odd = rng.randrange(count)
    name = rng.choice(list(values))
    changed = dict(values)
    how = rng.choice(["other", "missing", "new"])
    if how == "missing":
      del changed[name]
    else:
      name = name if how == "other" else "unknown"
      changed[name] = rng.choice(["other", "x" * 500, ""]) + values.get(name, "")[:3] + "?"
    errors = together(monkeypatch, [changed if i == odd else values for i in range(count)])
    for error in errors:
      assert isinstance(error, UserError) and str(error).startswith(
        f"{name} is not the same on all"
      )
      assert "\n" not in str(error) and len(str(error)) < 500
      assert f"process {odd or 1} " in str(error)


def test_processes_that_agree_go_on(monkeypatch):
  assert together(monkeypatch, [identity()] * 3) == [None] * 3


def test_several_differences_are_listed():
  first = dict.fromkeys("abcdefgh", "1")
  assert difference([first, first, {**first, "b": "2", "c": "3"}]) == (
    "b is not the same on all processes: the first process has 1, process 2 2; nor are c; start "
    "all of them alike"
  )
  other = dict.fromkeys("abcdefgh", "2")
  assert "; nor are b, c, d, e, f, ...; start" in difference([first, other])
  assert difference([first, {}]).startswith("a is not the same on all processes: the first process")
  assert difference([first, {"error": "disk full"}]) == "process 1 has failed: disk full"


def test_a_process_that_does_not_come_is_named(monkeypatch):
  monkeypatch.setenv("GTPO_JOIN_TIMEOUT_S", "1")
  began = time.monotonic()
  error = together(monkeypatch, [{"a": 1}] * 2, late=[1])[0]
  assert "process 1 has not begun the run within 1 s" in str(error)
  assert time.monotonic() - began < 20


@pytest.mark.parametrize(
  ("name", "value", "same"),
  [
    ("XLA_FLAGS", "--xla_dump_to=/tmp/a", True),
    ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", False),
    ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=9", False),
  ],
)
def test_what_a_process_logs_is_its_own(name, value, same, monkeypatch):
  monkeypatch.delenv(name, raising=False)
  before = process_identity()
  monkeypatch.setenv(name, value)
  assert (process_identity() == before) == same
  assert {"jax_enable_x64", "jax_default_matmul_precision", "jax", "python"} <= before.keys()
  assert not {"jax_compilation_cache_dir", "jax_log_compiles", "jax_platforms"} & before.keys()
