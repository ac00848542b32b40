"""Limits of memory: freed arrays go back to the operating system."""

import ctypes
import subprocess
import sys

import pytest

# Allocates 64 arrays of 4 MiB and writes to them, then a small one, and frees the arrays. A first
# array that is freed makes glibc keep the later ones in its heap.
FREED_ARRAYS = """
import ctypes, resource, sys
from gtpo_jax.runtime.resource_limits import STATUS, return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: int(STATUS.read_text().split()[1]) * resource.getpagesize() / 2**20
libc.free(libc.malloc(8 * 2**20))
before = resident()
arrays = [libc.malloc(4 * 2**20) for _ in range(64)]
for array in arrays:
  ctypes.memset(array, 1, 4 * 2**20)
last = libc.malloc(1000)
for array in arrays[:-1]:
  libc.free(array)
if sys.argv[1] == "return":
  return_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
@pytest.mark.parametrize(("mode", "low", "high"), [("keep", 200, 300), ("return", 0, 20)])
def test_freed_arrays_are_returned(mode, low, high):
  """Megabytes that stay allocated, of 256."""
  command = [sys.executable, "-c", FREED_ARRAYS, mode]
  done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
  assert low < float(done.stdout) < high
