"""XLA's errors become messages that say what happened and quote XLA's text in full."""

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from gtpo_jax.runtime.device_errors import ADVICE, explain, phase, status

LONG = "x" * 500 + "\nthe cause is on the second line"


def caught(error, name):
  """Returns the error after it was raised in a phase."""
  with pytest.raises(type(error)) as raised, phase(name):
    raise error
  return raised.value


@pytest.mark.parametrize(
  ("name", "advice"),
  [
    ("update", "raise batch.micro_batches, set a smaller batch.head_chunk, raise mesh.fsdp"),
    ("sampling", "lower sampling.slots, set sampling.kv_dtype=int8"),
    ("evaluation", "lower eval.batch or sampling.slots"),
    ("set-up", "raise mesh.fsdp or mesh.tensor, set model.param_dtype=bfloat16"),
  ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_running_out_of_memory(name, advice, processes):
  with pytest.raises(JaxRuntimeError) as raised, phase(name):
    jnp.zeros(1 << 50, jnp.int8).block_until_ready()
  assert status(raised.value) == "RESOURCE_EXHAUSTED"
  message = explain(raised.value, processes)
  assert message.startswith(f"out of memory during the {name}: {advice}")
  assert "`gtpo plan` shows what each program needs" in message
  assert message.endswith(
    "XLA reports: RESOURCE_EXHAUSTED: Out of memory allocating 1125899906842624 bytes."
  )


def test_running_out_of_memory_outside_any_phase():
  message = explain(JaxRuntimeError(f"RESOURCE_EXHAUSTED: {LONG}"), 1)
  assert message.startswith(f"out of memory: {ADVICE['']}; ")
  assert message.endswith(LONG)


def test_the_innermost_phase_counts():
  with pytest.raises(JaxRuntimeError) as raised, phase("update"), phase("sampling"):
    raise JaxRuntimeError("RESOURCE_EXHAUSTED: out")
  assert "out of memory during the sampling" in explain(raised.value, 1)


@pytest.mark.parametrize(
  "text",
  [
    f"UNAVAILABLE: {LONG}",
    f"DEADLINE_EXCEEDED: {LONG}",
    f"INTERNAL: Gloo all-reduce failed: Connection reset by peer {LONG}",
    f"INTERNAL: NCCL error: remote process exited or there was a network error {LONG}",
  ],
)
def test_a_peer_that_does_not_answer(text):
  error = caught(JaxRuntimeError(text), "update")
  assert explain(error, 2) == f"another process exited or is unreachable ({text})"
  assert explain(error, 1) is None  # there is no other process


@pytest.mark.parametrize(
  "error",
  [
    JaxRuntimeError(f"INVALID_ARGUMENT: {LONG}"),
    JaxRuntimeError(f"INTERNAL: {LONG}"),
    JaxRuntimeError("a message without a status"),
    RuntimeError("RESOURCE_EXHAUSTED: not by XLA"),
    ValueError("wrong"),
  ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_other_errors_keep_their_traceback(error, processes):
  assert explain(caught(error, "update"), processes) is None


def test_only_xla_errors_get_a_note():
  assert caught(JaxRuntimeError("INTERNAL: x"), "update").__notes__ == [
    "This happened during the update."
  ]
  assert not hasattr(caught(RuntimeError("x"), "update"), "__notes__")
  assert status(jax.errors.JaxRuntimeError("no status")) == "UNKNOWN"
