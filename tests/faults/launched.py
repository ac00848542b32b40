"""`gtpo` as a launcher starts it: `python launched.py train ...`.

`python launched.py join` only joins the other processes and prints what this one then sees.

If JAX finds no TPU chips when it is imported, it disables Cloud TPU's metadata server. This script
enables the server again, because the tests use it.
"""

import json
import os
import sys

skips_metadata = "TPU_SKIP_MDS_QUERY" in os.environ  # GKE sets it

import jax  # noqa: E402, sets it

if not skips_metadata:
  del os.environ["TPU_SKIP_MDS_QUERY"]

from gtpo_jax.cli import main  # noqa: E402
from gtpo_jax.runtime.cluster.joining import join_processes  # noqa: E402
from gtpo_jax.runtime.startup import prepare_devices, prepare_jax  # noqa: E402


def join():
  prepare_jax()
  join_processes()
  prepare_devices()
  from gtpo_jax.runtime.distributed import broadcast_from_first

  seen = {
    "process": jax.process_index(),
    "processes": jax.process_count(),
    "devices": jax.device_count(),
    "received": broadcast_from_first(lambda: f"from process {jax.process_index()}"),
  }
  print(json.dumps(seen))


if __name__ == "__main__":
  sys.exit(join() if sys.argv[1] == "join" else main(sys.argv[1:]))
