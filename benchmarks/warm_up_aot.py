"""Times the compilation of every program of sampling, for TPUs or GPUs that are not attached.

    python benchmarks/warm_up_aot.py --config=configs/colab_0_5b_gsm8k.py --topology=v5e:1x1 \\
      [--json FILE] [--config.KEY=VALUE ...]

These are the programs that `sampling.warm_up` compiles before the first step: the layout of the
weights, prefill for every length of prompts, and decoding for every number of slots, with the
filters of training and those of evaluation. One is compiled after another. Each line has the
seconds of one program.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

from gtpo_jax.config import load
from gtpo_jax.config.workloads import SAMPLING, run_workloads
from gtpo_jax.models.params import abstract_params
from gtpo_jax.planning.run_programs import build_engine, build_model
from gtpo_jax.planning.topology import compile_deviceless, topology_devices
from gtpo_jax.sampling.inventory import reachable
from gtpo_jax.sampling.programs import abstract_decode_params


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True)
  parser.add_argument("--topology", required=True)
  parser.add_argument("--json")
  args, overrides = parser.parse_known_args()
  config = load(args.config, overrides)
  devices, _ = topology_devices(args.topology)
  model = build_model(config, devices)
  programs = build_engine(config, model).programs
  stored = abstract_params(model)
  seconds: list[tuple[str, float]] = []

  def compile_timed(name, lower):
    started = time.perf_counter()
    compiled = compile_deviceless(lower(), devices)
    seconds.append((name, time.perf_counter() - started))
    print(f"{name:<12} {seconds[-1][1]:6.1f} s", flush=True)
    return compiled

  layout = compile_timed("layout", lambda: programs.layout.lower(stored))
  params = abstract_decode_params(programs, stored, layout)
  workloads = run_workloads(config)
  for program in reachable(programs, [workloads[SAMPLING], workloads["evaluation"]]).values():
    if program.beside:
      compile_timed(program.kind, lambda program=program: program.lower(params))
  total = sum(value for _, value in seconds)
  print(f"{'together':<12} {total:6.1f} s, at most {max(value for _, value in seconds):.1f} s")
  if args.json:
    Path(args.json).write_text(json.dumps({"programs": seconds, "seconds": total}, indent=2) + "\n")


if __name__ == "__main__":
  main()
