"""Two processes that share one model write the same folder as one process, byte for byte."""

import dataclasses

import jax
import pytest
from command_line import run_connected

from gtpo_jax.data.chat import load_chat
from gtpo_jax.models import load, save, save_adapter
from gtpo_jax.models.config import Lora, ModelConfig
from gtpo_jax.models.lora import add_lora
from gtpo_jax.models.params import init_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import single_device_mesh

CONFIG = ModelConfig(
  vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, tied=False
)

CHILD = """
import dataclasses
from pathlib import Path
rank, home = int(sys.argv[3]), Path(sys.argv[4])
from gtpo_jax.data.chat import load_chat
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.models import Transformer, load, save, save_adapter
from gtpo_jax.models.lora import add_lora
from gtpo_jax.models.config import Lora
from gtpo_jax.runtime.mesh import make_mesh
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
# The second process gets a path that it cannot write to, because only the first one writes.
model, params = load(home / "source", "float32", make_mesh(data=1, fsdp=2, tensor=2))
assert not params["layers"]["up"]["kernel"].is_fully_addressable
out = home / "two" if rank == 0 else Path("/proc/nowhere")
tokenizer = None if rank else load_chat().tokenizer
save(
  model, params, tokenizer, out, stop=[5], files={"README.md": "# card"}, shard_bytes=20_000
)
wide = Transformer(dataclasses.replace(model.config, lora=Lora(2)), model.mesh)
params = add_lora(wide, params, jax.random.key(1))
save_adapter(wide, params, home / "two-adapters", "base")
assert (home / "two-adapters" / "SHA256SUMS").exists()  # in every process
save(wide, params, None, home / "two-merged", dtype="bfloat16")
for rejected in (
  lambda: save(model, params, None, home / "source"),
  lambda: save_adapter(wide, params, home / "source", "base"),
):
  try:
    rejected()
  except UserError as error:
    print("rejected:", error)
"""


pytestmark = pytest.mark.slow


def contents(folder):
  return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """The folder that two processes wrote to, and the error messages of each process."""
  home = tmp_path_factory.mktemp("processes")
  plain = Transformer(CONFIG, single_device_mesh())
  save(plain, init_params(plain, jax.random.key(0)), None, home / "source")
  outputs = run_connected(CHILD, 2, 2, home)
  return home, [
    [line for line in out.splitlines() if line.startswith("rejected: ")] for out in outputs
  ]


def test_two_processes_write_what_one_writes(two):
  home, _ = two
  model, params = load(home / "source", "float32")
  save(
    model,
    params,
    load_chat().tokenizer,
    home / "one",
    stop=[5],
    files={"README.md": "# card"},
    shard_bytes=20_000,
  )
  assert contents(home / "one") == contents(home / "two") and len(contents(home / "one")) > 8


def test_adapters_and_merged_weights(two):
  home, _ = two
  model, params = load(home / "source", "float32")
  wide = Transformer(dataclasses.replace(model.config, lora=Lora(2)), model.mesh)
  params = add_lora(wide, params, jax.random.key(1))
  save_adapter(wide, params, home / "one-adapters", "base")
  save(wide, params, None, home / "one-merged", dtype="bfloat16")
  assert contents(home / "one-adapters") == contents(home / "two-adapters")
  assert contents(home / "one-merged") == contents(home / "two-merged")


def test_every_process_rejects_and_nothing_is_left(two):
  home, (first, second) = two
  assert len(first) == len(second) == 2 and all("is not empty" in line for line in first)
  assert all(line.startswith(f"rejected: cannot write '{home / 'source'}'") for line in second)
  assert not list(home.glob(".*"))
