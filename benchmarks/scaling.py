"""Compiles a GTPO update of 7B and 32B models for 64, 256 and 1,024 TPU v5p chips.

    python benchmarks/scaling.py [--json FILE] [--only 32b-weak-256 ...]

The programs are compiled ahead of time; no TPU is used. Sequences have 20,480 positions, 2,048 of
them for the prompt. Parameters and AdamW are float32, compute is bfloat16, with full remat and
without micro-batches. Weak scaling has 64 sequences for every 64 chips; strong scaling has 256
sequences for any number of chips. A row is printed as soon as its programs are compiled, which
takes minutes.
"""

from __future__ import annotations

import argparse
import json

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

from gtpo_jax.config import Config, default_config, freeze
from gtpo_jax.planning.plan import measure
from gtpo_jax.planning.run_programs import RunPrograms, build_model
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.runtime.errors import UserError

SLICES = {64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"}
GROUP = 4  # completions of each prompt
KEYS = ("batch.prompts", "mesh.data", "mesh.fsdp", "mesh.context", "mesh.tensor")
# The values of KEYS by number of chips. Positions are sharded over context for 7B, over tensor for
# 32B, and over both for 64 prompts on 1,024 chips.
SHAPES = {
  "7b-weak": {64: (16, 1, 16, 4, 1), 256: (64, 4, 16, 4, 1), 1024: (256, 16, 16, 4, 1)},
  "7b-strong": {64: (64, 1, 16, 4, 1), 256: (64, 4, 16, 4, 1), 1024: (64, 4, 16, 4, 4)},
  "32b-weak": {64: (16, 1, 16, 1, 4), 256: (64, 4, 16, 1, 4), 1024: (256, 16, 16, 1, 4)},
  "32b-strong": {64: (64, 1, 16, 1, 4), 256: (64, 4, 16, 1, 4), 1024: (64, 4, 16, 4, 4)},
}
ROWS = {
  f"{name}-{chips}": (name.partition("-")[0], chips, shape)
  for name, shapes in SHAPES.items()
  for chips, shape in shapes.items()
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json")
  parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
  args = parser.parse_args()
  results = {}
  for name in args.only:
    results[name] = measure_row(*ROWS[name])
    print(name, *(f"{key} {value}" for key, value in results[name].items()), sep="  ", flush=True)
    if args.json:
      with open(args.json, "w") as out:
        json.dump(results, out, indent=2)


def row_config(size: str, shape: tuple[int, ...]) -> Config:
  config = default_config()
  values = {
    "model.preset": f"qwen2.5-{size}",
    "model.compute_dtype": "bfloat16",
    "batch.group": GROUP,
    "data.max_prompt_tokens": 2048,
    "sampling.max_tokens": 18432,
    **dict(zip(KEYS, shape, strict=True)),
  }
  with config.unlocked():
    config.update_from_flattened_dict(values)
  return freeze(config)


def measure_row(size: str, chips: int, shape: tuple[int, ...]) -> dict[str, object]:
  config = row_config(size, shape)
  devices, chip = topology_devices(SLICES[chips])
  try:
    result = measure(config, RunPrograms(config, build_model(config, devices)), chip)
  except UserError as error:
    return {"refused": str(error)}
  gib = lambda key: None if result[key] is None else round(result[key] / 2**30, 2)
  return {
    "chips": chips,
    "mesh": result["mesh"],
    "sequences": shape[0] * GROUP,
    "update_gib": gib("update.peak_bytes"),
    "sample_gib": gib("sample.peak_bytes"),
    "sent_gib": gib("update.sent_bytes"),
    "seconds": result["update.seconds"],
    "fits": result["fits"],
    "seconds_compile": round(result["seconds_compile"], 1),
  }


if __name__ == "__main__":
  main()
