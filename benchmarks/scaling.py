"""What one GTPO update of 7B and 32B needs on 64, 256 and 1,024 chips, from ahead-of-time compiles for TPU v5p. No TPU is used.

    python benchmarks/scaling.py [--json FILE] [--only 32b-weak-256 ...]

Sequences of 20,480 positions (2,048 of prompt), float32 parameters and AdamW, bfloat16 compute, full remat, no micro-batches. Weak: 64
sequences for every 64 chips. Strong: 256 sequences whatever the chips. Prints a row when its programs are compiled (minutes each).
"""

from __future__ import annotations

import argparse
import json

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

from gtpo_jax.config import default_config, freeze
from gtpo_jax.planning.plan import laid_out, measured
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.runtime.errors import UserError

SLICES = {64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"}
GROUP = 4  # completions of each prompt
# By chips: prompts, and shards of data, fsdp, context and tensor; 7B has its positions over context, 32B over
# tensor, and both over both on 1,024 chips that share 64 prompts.
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
    results[name] = row(*ROWS[name])
    print(name, *(f"{key} {value}" for key, value in results[name].items()), sep="  ", flush=True)
    if args.json:
      with open(args.json, "w") as out:
        json.dump(results, out, indent=2)


def row(size: str, chips: int, shape: tuple[int, ...]) -> dict[str, object]:
  config = default_config()
  with config.unlocked():
    config.update_from_flattened_dict(
      {
        "model.preset": f"qwen2.5-{size}",
        "model.compute_dtype": "bfloat16",
        "batch.group": GROUP,
        "data.max_prompt_tokens": 2048,
        "sampling.max_tokens": 18432,
        **dict(
          zip(
            ("batch.prompts", "mesh.data", "mesh.fsdp", "mesh.context", "mesh.tensor"),
            shape,
            strict=True,
          )
        ),
      }
    )
  devices, chip = topology_devices(SLICES[chips])
  try:
    found = measured(frozen := freeze(config), laid_out(frozen, devices), chip)
  except UserError as error:
    return {"refused": str(error)}
  gib = lambda key: None if found[key] is None else round(found[key] / 2**30, 2)
  return {
    "chips": chips,
    "mesh": found["mesh"],
    "sequences": shape[0] * GROUP,
    "update_gib": gib("update.peak_bytes"),
    "sample_gib": gib("sample.peak_bytes"),
    "sent_gib": gib("update.sent_bytes"),
    "seconds": found["update.seconds"],
    "fits": found["fits"],
    "seconds_compile": round(found["seconds_compile"], 1),
  }


if __name__ == "__main__":
  main()
