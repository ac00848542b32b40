"""The memory that programs can use."""

import os

from gtpo_jax.runtime import chips
from gtpo_jax.runtime.chips import CHIPS, host_memory


def test_a_container_has_the_memory_of_its_limit(tmp_path, monkeypatch):
  machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  limit = tmp_path / "memory.max"
  monkeypatch.setattr(chips, "CONTAINER_LIMITS", (tmp_path / "missing", limit))
  assert host_memory() == machine
  limit.write_text("max\n")
  assert host_memory() == machine
  limit.write_text("1048576\n")
  assert host_memory() == 1048576
  limit.write_text(f"{2 * machine}\n")
  assert host_memory() == machine


def test_a_tenth_of_a_gpu_is_left_to_cuda():
  assert CHIPS["h100"].usable_memory == 76_448_681_164
  assert CHIPS["v5e"].usable_memory == 16 * 2**30
