"""What one GTPO update of 7B and 32B needs on 64, 256 and 1,024 chips, from ahead-of-time compiles for TPU v5p. No TPU is used.

    python benchmarks/scaling.py [--json FILE] [--only 32b-weak-256 ...]

Sequences of 20,480 positions (2,048 of prompt), float32 parameters and AdamW, bfloat16 compute, full remat, no micro-batches. Weak: 64
sequences for every 64 chips. Strong: 256 sequences whatever the chips. Prints a row when its programs are compiled (minutes each).
"""
from __future__ import annotations

import argparse
import json

from gtpo_jax.start import prepare_jax

prepare_jax()  # before JAX is imported

from gtpo_jax.config import default_config, freeze
from gtpo_jax.errors import UserError
from gtpo_jax.plan import laid_out, measured
from gtpo_jax.topology import topology_devices

SLICES = {64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"}
# (chips, data, fsdp, tensor, prompts, completions of each)
WEAK = [(64, 1, 16, 4, 16, 4), (256, 4, 16, 4, 64, 4), (1024, 16, 16, 4, 256, 4)]
STRONG = [(64, 1, 16, 4, 64, 4), (256, 4, 16, 4, 64, 4), (1024, 8, 16, 8, 128, 2)]
ROWS = {f"{size}-{kind}-{shape[0]}": (size, shape) for size in ("7b", "32b") for kind, shapes in (("weak", WEAK), ("strong", STRONG))
        for shape in shapes}


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


def row(size: str, shape: tuple[int, ...]) -> dict[str, object]:
  chips, data, fsdp, tensor, prompts, group = shape
  config = default_config()
  with config.unlocked():
    config.update_from_flattened_dict({
        "model.preset": f"qwen2.5-{size}", "model.compute_dtype": "bfloat16", "mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor,
        "batch.prompts": prompts, "batch.group": group, "data.max_prompt_tokens": 2048, "sampling.max_tokens": 18432})
  devices, chip = topology_devices(SLICES[chips])
  try:
    found = measured(frozen := freeze(config), laid_out(frozen, devices), chip)
  except UserError as error:
    return {"refused": str(error)}
  gib = lambda key: None if found[key] is None else round(found[key] / 2**30, 2)
  return {"chips": chips, "mesh": found["mesh"], "sequences": prompts * group, "update_gib": gib("update.peak_bytes"),
          "sample_gib": gib("sample.peak_bytes"), "sent_gib": gib("update.sent_bytes"), "seconds": found["update.seconds"],
          "fits": found["fits"], "seconds_compile": round(found["seconds_compile"], 1)}


if __name__ == "__main__":
  main()
