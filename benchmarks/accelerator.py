"""Measures decoding, the update and a whole step on this machine's accelerators, against floors.

    python benchmarks/accelerator.py [--presets qwen2.5-0.5b,qwen2.5-1.5b] \\
      [--prompts 16] [--group 16] [--prompt_tokens 512] [--tokens 1024] \\
      [--set model.remat=none] [--json FILE]

The weights are random, and nearly every completion has its maximum length. Floors are what the
device's data sheet allows (`gtpo_jax/runtime/chips.py`; `--flops` and `--bandwidth` replace it):
decoding reads all weights and all cached keys and values for every token, or computes the matrix
products if that takes longer; an update computes its model FLOP. A model whose parameters, gradient
and moments do not fit in float32 is trained in bfloat16. `--set` changes any setting of the run.

    python benchmarks/accelerator.py --card FOLDER [--base qwen3-8b] [--quantize int4]

does, within eight minutes, what one wants to know of a card that is lent: the floors of 0.5B and
1.5B, `configs/tiny.py` killed, resumed and compared bit for bit with an undisturbed run, and three
steps of adapters on a large frozen base. FOLDER/table.md is written after each part. Each part is a
process of its own, because a process keeps the device's memory; one that exceeds its time is ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax
from measuring import median_seconds, show, store, versions

from gtpo_jax.arrays import Rewards
from gtpo_jax.cli.planning.run_programs import build_engine, build_model
from gtpo_jax.config import Config, default_config, freeze
from gtpo_jax.config.roofline import sample_seconds, update_flops
from gtpo_jax.config.updates import run_optimizer, run_update
from gtpo_jax.models import PRESETS, init_params
from gtpo_jax.models.params import matmul_params
from gtpo_jax.runtime.chips import Chip, chip_of, memory_of
from gtpo_jax.runtime.mesh import shard_batch
from gtpo_jax.training.state import init_state

STATE_BYTES = 16  # of a parameter in float32 with its gradient and two moments
STATE_FRACTION = 0.7  # the part of the memory that these may take
MAX_ROW_TOKENS = 65_536  # of a micro-batch on one device


def make_config(preset: str, args: argparse.Namespace) -> Config:
  """Returns the config of the measured run: GTPO, everything sharded over all devices."""
  devices = jax.devices()
  memory = memory_of(devices[0]) or 2**34
  exact = matmul_params(PRESETS[preset]) * STATE_BYTES / len(devices) < STATE_FRACTION * memory
  on_cpu = devices[0].platform == "cpu"
  row = args.group * args.tokens + args.prompt_tokens
  rows = args.prompts // len(devices)
  divisors = [n for n in range(1, rows + 1) if rows % n == 0]
  parts = next((n for n in divisors if row * rows / n <= MAX_ROW_TOKENS), rows)
  config = default_config()
  values = {
    "model.preset": preset,
    "model.random_weights": True,
    "model.compute_dtype": "float32" if on_cpu else "bfloat16",
    "model.param_dtype": "float32" if exact else "bfloat16",
    "mesh.data": 1,
    "mesh.fsdp": -1,
    "data.max_prompt_tokens": args.prompt_tokens,
    "sampling.max_tokens": args.tokens,
    "sampling.slots": args.prompts * args.group,
    "batch.prompts": args.prompts,
    "batch.group": args.group,
    "batch.micro_batches": parts,
    "warm_start.steps": 0,
  }
  for name, value in (x.split("=", 1) for x in args.set):
    values[name] = int(value) if value.isdigit() else value
  with config.unlocked():
    config.update_from_flattened_dict(values)
  return freeze(config)


def measure(preset: str, args: argparse.Namespace, chip: Chip) -> dict[str, Any]:
  """Returns times, rates, and shares of the floors for one model."""
  config = make_config(preset, args)
  model = build_model(config, jax.devices())
  engine = build_engine(config, model)
  optimizer = run_optimizer(config, model)
  state = init_state(init_params(model, jax.random.key(0)), optimizer, model)
  update = run_update(config, model, optimizer)
  rng = np.random.default_rng(0)
  vocab = model.config.vocab_size
  prompts = rng.integers(1, vocab, (args.prompts, args.prompt_tokens)).tolist()
  correct = rng.random((args.prompts, args.group)) < 0.5
  rewards = Rewards(correct, correct.astype(np.float32), np.zeros(correct.shape, np.float32))
  params = engine.layout(state.params)
  rollouts = None

  def sample() -> np.ndarray:
    nonlocal rollouts
    rollouts = engine.sample(
      params, prompts, jax.random.key(0), group=args.group, sampling_params=config.sampling_params
    )
    return rollouts.tokens

  def step() -> Any:
    nonlocal state, params
    state, metrics = update(state, *shard_batch((rollouts, rewards), model.mesh))
    params = engine.layout(state.params)
    return metrics

  slots = engine.programs.config.slots
  result = {
    "preset": preset,
    "param_dtype": config.model.param_dtype,
    "micro_batches": config.batch.micro_batches,
    "remat": config.model.remat,
    "slots": slots,
  }
  flops = update_flops(config, model.config)
  floor_s = flops / model.mesh.size / chip.flops
  sample_floor_s = sample_seconds(config, model.config, chip, engine.model.mesh.shape, slots)
  repeats = args.repeats if "sample" in args.parts else 0
  compile_s, sample_s = median_seconds(sample, repeats)  # an update needs rollouts in any case
  result["sample_compile_s"] = compile_s
  if repeats:
    tokens = int(rollouts.mask.sum())
    result["sample_s"] = sample_s
    result["sample_tokens_per_s"] = tokens / sample_s
    result["sample_s_per_token_of_all_slots"] = sample_s * slots / tokens
    result["sample_share"] = sample_floor_s / sample_s
  if "update" in args.parts:
    result["mismatch_kl"] = float(step()["mismatch/kl"])  # of the weights that have sampled
    result["update_compile_s"], update_s = median_seconds(step, args.repeats)
    result["update_s"] = update_s
    result["update_tflops_per_device"] = flops / model.mesh.size / update_s / 1e12
    result["update_share"] = floor_s / update_s
    result["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  if "step" in args.parts:
    _, step_s = median_seconds(lambda: (sample(), step()), args.repeats)
    result["step_s"] = step_s
    result["step_share"] = (floor_s + sample_floor_s) / step_s
  return result


CARD_S = 480  # for all parts of `--card`
TIMES = ("time/", "tokens/s", "compiles")  # metrics that no two runs share


def train(workdir: Path, *settings: str) -> list[str]:
  """Returns the command of a run of `configs/tiny.py`, with settings "a.b=value"."""
  options = [f"--config.{setting}" for setting in settings]
  command = [sys.executable, "-m", "gtpo_jax", "train", "--config=configs/tiny.py"]
  return [*command, f"--workdir={workdir}", *options]


def read_steps(workdir: Path) -> list[dict[str, float]]:
  """Returns the metrics of a run's steps."""
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [row for row in rows if "time/step" in row]


def killed_run(folder: Path, limit_s: Callable[[], float]) -> list[tuple[str, str]]:
  """Compares a run that is killed after step 5 and resumed with an undisturbed one.

  Returns:
    Rows (what, result) of the table.
  """
  settings = ["steps=10", "checkpoint.every=5", "eval.every=0", "warm_start.steps=100"]
  began = time.perf_counter()
  with (folder / "tiny.log").open("w") as log:
    streams = {"stdout": log, "stderr": log}
    subprocess.run(train(folder / "whole", *settings), check=True, timeout=limit_s(), **streams)
    seconds = time.perf_counter() - began
    command = train(folder / "killed", *settings)
    process = subprocess.Popen(command, **streams)
    while process.poll() is None and not (folder / "killed/checkpoints/5").is_dir():
      time.sleep(0.01)
      if limit_s() < 0:
        break
    process.kill()
    process.wait()
    subprocess.run(command, check=True, timeout=limit_s(), **streams)
  whole, resumed = (
    [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_steps(folder / name)]
    for name in ("whole", "killed")
  )
  step_s = float(np.median([row["time/step"] for row in read_steps(folder / "whole")][1:]))
  differ = sorted({k for a, b in zip(whole, resumed, strict=True) for k in a if a[k] != b.get(k)})
  result = f"{', '.join(differ)} differ" if differ else f"all {len(whole[-1])} metrics equal"
  return [
    ("`configs/tiny.py`, 10 steps, 100 of warm start", f"{seconds:.0f} s, {step_s:.2f} s a step"),
    ("the same killed after step 5 and resumed, steps 1 to 10", result),
  ]


def large_base(
  folder: Path, preset: str, quantize: str, limit_s: Callable[[], float]
) -> list[tuple[str, str]]:
  """Trains adapters on a large base with random weights for three steps.

  Returns:
    Rows (what, result) of the table.
  """
  settings = ["steps=3", "warm_start.steps=0", "eval.every=0", "model.random_weights=True"]
  settings += [f"model.preset={preset}", f"model.quantize={quantize}", "model.lora_rank=16"]
  settings += ["model.param_dtype=bfloat16", "data.max_prompt_tokens=256"]
  settings += ["sampling.max_tokens=512", "batch.prompts=8", "batch.group=8"]
  with (folder / "base.log").open("w") as log:
    command = train(folder / "base", *settings)
    subprocess.run(command, check=True, timeout=limit_s(), stdout=log, stderr=log)
  steps = [row["time/step"] for row in read_steps(folder / "base")]
  what = f"`{preset}` {quantize}, adapters of rank 16, 8 x 8 completions of up to 512 tokens"
  return [(what, f"steps of {', '.join(f'{s:.1f}' for s in steps)} s")]


def measure_card(folder: Path, args: argparse.Namespace) -> None:
  """Measures a card in `CARD_S` seconds; writes folder/table.md."""
  folder.mkdir(parents=True)
  ends = time.monotonic() + CARD_S

  def limit_s() -> float:
    return ends - time.monotonic()

  def floors() -> list[tuple[str, str]]:
    options = ["--presets", args.presets, "--parts", "sample,update", "--repeats", "2"]
    options += ["--json", str(folder / "floors.json")]
    for name in ("flops", "bandwidth", "prompts", "group", "prompt_tokens", "tokens"):
      if getattr(args, name) is not None:
        options += [f"--{name}", str(getattr(args, name))]
    command = [sys.executable, __file__, *options]
    with (folder / "floors.log").open("w") as log:
      subprocess.run(command, check=True, timeout=limit_s() / 2, stdout=log, stderr=log)
    rows = []
    result = json.loads((folder / "floors.json").read_text())
    about.append(f"{result['devices']} x {result['device']}, jax {result['jax']}")
    for row in result["rows"]:
      sampled = f"{row['sample_tokens_per_s']:,.0f} tokens a second, {row['sample_share']:.0%}"
      rows.append((f"{row['preset']}, sampling, {row['slots']} slots", f"{sampled} of the floor"))
      updated = f"{row['update_s']:.2f} s, {row['update_share']:.0%} of the floor"
      peak = f", peak {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
      parts = f"remat={row['remat']}, {row['micro_batches']} micro-batches"
      rows.append((f"{row['preset']}, update, {parts}", updated + peak))
    return rows

  about: list[str] = []
  table: list[tuple[str, str]] = []
  parts = {
    "floors": floors,
    "tiny": lambda: killed_run(folder, limit_s),
    "base": lambda: large_base(folder, args.base, args.quantize, limit_s),
  }
  for name, part in parts.items():
    try:
      table += part()
    except (subprocess.SubprocessError, OSError) as error:
      reason = "out of time" if isinstance(error, subprocess.TimeoutExpired) else "failed"
      table.append((name, f"{reason}, see {name}.log"))
    lines = [f"{', '.join([time.strftime('%Y-%m-%d'), *about])}", "", "| | measured |", "|---|---|"]
    lines += [f"| {what} | {result} |" for what, result in table]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
  print((folder / "table.md").read_text())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--presets", default="qwen2.5-0.5b,qwen2.5-1.5b")
  sizes = {"prompts": 16, "group": 16, "prompt_tokens": 512, "tokens": 1024, "repeats": 5}
  for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--parts", default="sample,update,step", help="what to time")
  parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
  parser.add_argument("--flops", type=float, help="FLOP/s of a device, instead of its data sheet's")
  parser.add_argument("--bandwidth", type=float, help="bytes/s of a device's memory")
  parser.add_argument("--json")
  parser.add_argument("--card", type=Path, metavar="FOLDER", help="measure a lent card")
  parser.add_argument("--base", default="qwen3-8b", help="with --card: preset of a frozen base")
  parser.add_argument("--quantize", default="int4", help="with --card: format of that base")
  args = parser.parse_args()
  if args.card:  # before this process takes the device's memory
    measure_card(args.card, args)
    return
  device = jax.devices()[0]
  chip = chip_of(device) or Chip(memory_of(device) or 0)
  chip = dataclasses.replace(
    chip, flops=args.flops or chip.flops, memory_bandwidth=args.bandwidth or chip.memory_bandwidth
  )
  if not chip.flops or not chip.memory_bandwidth:
    parser.error(f"the rates of {device.device_kind} are not known; give --flops and --bandwidth")
  rows = []
  for preset in args.presets.split(","):
    rows.append(measure(preset, args, chip))
    show(rows[-1])
  result = {
    **versions(),
    "flops": chip.flops,
    "bandwidth": chip.memory_bandwidth,
    **{name: getattr(args, name) for name in sizes},
    "rows": rows,
  }
  store(result, args.json)


if __name__ == "__main__":
  main()
