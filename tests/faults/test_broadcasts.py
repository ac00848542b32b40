"""Broadcasts between two real processes."""

import pytest
from preloaded import python
from processes import start_together

PROGRAM = """
import jax
from gtpo_jax.logs.profile import compile_count
from gtpo_jax.runtime.cluster.joining import join_processes
from gtpo_jax.runtime.startup import prepare_devices, prepare_jax
compile_count()
prepare_jax()
join_processes()
prepare_devices()
import numpy as np
from gtpo_jax.runtime.distributed import any_process, broadcast_from_first, first_nonempty_text
from gtpo_jax.runtime.errors import UserError
first = jax.process_index() == 0

def exchange(length):
  sent = {"text": "x" * length, "array": np.arange(length % 7)}
  seen = broadcast_from_first(lambda: sent if first else None)
  assert seen["text"] == sent["text"] and seen["array"].tolist() == sent["array"].tolist()
  try:
    broadcast_from_first(lambda: (_ for _ in ()).throw(UserError("y" * length)))
  except UserError as error:
    assert str(error) == "y" * length
  else:
    raise AssertionError("not raised")
  assert first_nonempty_text("" if first else "z" * length) == ("z" * length)[:256]
  assert any_process(first)
  assert not any_process(False)

exchange(5)
warm = compile_count()
for length in (0, 1, 17, 1000, 65499, 65535, 65536, 65537, 131072, 1000000):
  exchange(length)
print("compiled", warm, compile_count() - warm)
"""


@pytest.mark.slow
def test_payloads_of_any_length_share_their_programs():
  codes, printed = start_together([[*python(), "-c", PROGRAM]] * 2)
  assert codes == [0, 0], printed
  for text in printed:
    word, warm, more = text.splitlines()[-1].split()
    assert (word, more) == ("compiled", "0") and int(warm) > 0
