"""Turns XLA errors into messages that say what happened and what to do about it.

Importing this module does not import JAX.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# XLA's statuses if another process does not answer. The libraries that send data between hosts may
# report the same failure with another status, such as INTERNAL, so their texts are matched too.
PEER_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
PEER_TEXTS = ("Gloo", "NCCL error: remote process exited", "ncclRemoteError")
PHASE_NOTE = "This happened during the "

SHARD_MORE = "raise mesh.fsdp or mesh.tensor"
ADVICE = {  # by phase
  "set-up": f"{SHARD_MORE}, set model.param_dtype=bfloat16 or optimizer.offload=True, or train "
  f"only adapters (model.lora_rank=16)",
  "sampling": f"lower sampling.slots, set sampling.kv_dtype=int8, lower sampling.max_tokens, or "
  f"{SHARD_MORE}",
  "update": f"raise batch.micro_batches, set a smaller batch.head_chunk, {SHARD_MORE}, set "
  f"optimizer.offload=True, or train only adapters (model.lora_rank=16)",
  "evaluation": f"lower eval.batch or sampling.slots, set sampling.kv_dtype=int8, or {SHARD_MORE}",
  "": "lower sampling.slots, raise batch.micro_batches, set a smaller batch.head_chunk, or "
  f"{SHARD_MORE}",
}


_phases: list[str] = []


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
  """Context manager that names the current phase of the run, such as a key of `ADVICE`.

  Within the context `current_phase` returns the name, and XLA errors get a note that states it.
  """
  _phases.append(name)
  try:
    yield
  except RuntimeError as error:
    if status(error):
      error.add_note(f"{PHASE_NOTE}{name}.")
    raise
  finally:
    _phases.pop()


def current_phase() -> str:
  """Returns the name of the innermost current phase; "" outside all phases."""
  return _phases[-1] if _phases else ""


def status(error: BaseException) -> str:
  """Returns the status of an XLA error, such as "RESOURCE_EXHAUSTED"; "" for other errors."""
  import jax

  if not isinstance(error, jax.errors.JaxRuntimeError):
    return ""
  found = re.match(r"([A-Z_]+)(?::|$)", str(error))
  return found[1] if found else "UNKNOWN"


def explain(error: BaseException, processes: int) -> str | None:
  """Returns a message for an error that needs no traceback; None for all other errors.

  The message includes the complete text of the error.

  Args:
    error: any error.
    processes: number of processes of the run.
  """
  if status(error) == OUT_OF_MEMORY:
    notes = [x for x in getattr(error, "__notes__", ()) if x.startswith(PHASE_NOTE)]
    name = notes[0].removeprefix(PHASE_NOTE).rstrip(".") if notes else ""  # the innermost phase
    where = f" during the {name}" if name else ""
    return (
      f"out of memory{where}: {ADVICE.get(name, ADVICE[''])}; `gtpo plan` shows what each program "
      f"needs; XLA reports: {error}"
    )
  text = str(error)
  if processes > 1 and (status(error) in PEER_STATUSES or any(word in text for word in PEER_TEXTS)):
    return f"another process exited or is unreachable ({text})"
  return None
