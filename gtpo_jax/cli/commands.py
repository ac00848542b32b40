"""The commands. Each receives its options and the config overrides, and returns the exit status.

Modules that import JAX are imported inside the functions, after `prepare_jax`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from gtpo_jax.cli.processes import (
  check_writable,
  exit_on_failure,
  in_all_processes,
  program_name,
  stderr_display,
  write,
)
from gtpo_jax.cli.samples import options_to_sample, print_samples
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.paths import is_remote
from gtpo_jax.runtime.signals import SIGNAL_EXIT, StopSignals
from gtpo_jax.runtime.startup import (
  place_compile_cache,
  prepare_devices,
  prepare_jax,
  refuse_cpu_fallback,
)


@in_all_processes
def train(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo train`."""
  import jax

  from gtpo_jax import config as configs
  from gtpo_jax import loop
  from gtpo_jax.logs.display import Display
  from gtpo_jax.runtime.compiling import has_abandoned_compiles
  from gtpo_jax.runtime.distributed import is_first_process

  config = configs.load(args.config, overrides)
  place_compile_cache(args.workdir)
  display = Display(is_first_process())
  stop = StopSignals(display.notice)
  with stop:
    try:
      result = loop.train(config, args.workdir, display, stop.requested)
    finally:
      display.end()
  summary = result.summary
  if stop.signal and result.saved_at:
    summary += f" {stop.seconds_before(result.saved_at):.1f} s after the signal"
  display.say(summary)
  program = program_name()
  if not result.finished:
    words = ["train", f"--config={args.config}", f"--workdir={args.workdir}", *overrides]
    display.say(f"to resume: {program} {shlex.join(words)}")
    status = SIGNAL_EXIT + (stop.signal or signal.SIGINT)
    if has_abandoned_compiles():  # a normal exit would wait for the compiler
      jax.distributed.shutdown()
      sys.stdout.flush()
      os._exit(status)
    return status
  words = ["sample", f"--model={args.workdir}", *options_to_sample(args.workdir)]
  display.say(f"curves: {args.workdir / 'curves.png'}; try: {program} {shlex.join(words)}")
  return 0


def sample(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo sample`."""
  prepare_jax()
  refuse_cpu_fallback()
  prepare_devices()
  with exit_on_failure():
    return print_samples(args, overrides, stderr_display(sys.stderr.isatty()))


def serve(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo serve`."""
  _prepare_server(args, "gtpo serve", "serve")
  from gtpo_jax.cli.serve import ServeOptions
  from gtpo_jax.cli.serve import serve as run

  with exit_on_failure():
    run(_served(ServeOptions, args), lambda line: print(line, flush=True))
  return 0


def tinker(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo tinker`."""
  _prepare_server(args, "gtpo tinker", "tinker")
  if args.max_rank < 0 or args.models < 1 or args.policies < 1:
    raise UserError("--max_rank must be at least 0, --models and --policies at least 1")
  if is_remote(args.workdir):
    raise UserError(f"--workdir={args.workdir} must be a local folder: it has a database")
  args.workdir = Path(args.workdir)
  place_compile_cache(args.workdir)
  from gtpo_jax.cli.tinker import TinkerOptions
  from gtpo_jax.cli.tinker import serve as run

  with exit_on_failure():
    run(_served(TinkerOptions, args), lambda line: print(line, flush=True))
  return 0


def _served(options: type, args: argparse.Namespace) -> Any:
  """Returns the options of a server."""
  from gtpo_jax.rollout.policies import ServingLimits

  of = lambda kind: {x: getattr(args, x) for x in kind._fields if hasattr(args, x)}
  return options(**of(options), limits=ServingLimits(**of(ServingLimits)))


def _prepare_server(args: argparse.Namespace, command: str, extra: str) -> None:
  """Checks the options that servers share, and prepares JAX."""
  from gtpo_jax.runtime.installing import require_package

  for package in ("uvicorn", "starlette"):
    require_package(package, command, extra)
  for name in ("max_prompt_tokens", "max_tokens"):
    if (value := getattr(args, name)) is not None and value < 2:
      raise UserError(f"--{name} must be at least 2, got {value}")
  for name in ("slots", "queue"):
    if (value := getattr(args, name)) < 0:
      raise UserError(f"--{name} must be at least 0, got {value}")
  if not 0 <= args.port < 2**16:
    raise UserError(f"--port must be in [0, 65536), got {args.port}")
  prepare_jax()
  refuse_cpu_fallback()
  prepare_devices()


@in_all_processes
def export(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo export`."""
  from gtpo_jax.cli.export import create_on_hub, export_policy, upload
  from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process

  if args.adapter and args.dtype:
    raise UserError("--dtype applies only to complete models; adapters are always float32")
  values = {"workdir": args.workdir, "out": args.out, "step": args.step, "dtype": args.dtype}
  options = [f"--{name}={value}" for name, value in values.items() if value is not None]
  command = ["gtpo", "export", *options, *(["--adapter"] if args.adapter else [])]
  if args.push:
    broadcast_from_first(lambda: create_on_hub(args.push))
  with stderr_display(sys.stderr.isatty()).waiting(f"writing {args.out}"):
    done = export_policy(
      args.workdir, args.out, shlex.join(command), args.step, args.dtype, args.adapter
    )
  if is_first_process():
    print(done)
    if args.push:
      print(upload(args.out, args.push))
  return 0


def plan(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo plan`."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # no accelerator is used, even if there is one
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns that no GPU can time kernels
  if cpus := re.fullmatch(r"cpu:([1-9]\d*)", args.topology):
    os.environ["JAX_NUM_CPU_DEVICES"] = cpus[1]
  prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.cli.planning import plan as planning
  from gtpo_jax.cli.planning.plan import format_table

  check_writable(args.json)
  config = configs.load(args.config, overrides)
  result = planning.plan(config, args.topology, stderr_display().waiting, args.lengths or "")
  print(format_table(result))
  if args.json:
    write(args.json, json.dumps(result, indent=2) + "\n")
  return 0


def report(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo report`."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run in progress may hold the accelerator
  prepare_jax()
  from gtpo_jax.cli.report.report import make_report

  check_writable(args.out)
  with stderr_display(sys.stderr.isatty()).waiting("drawing the figures"):
    page = make_report(args.workdir)
  write(args.out, page)
  print(
    f"{args.out}: {len(args.workdir)} run(s), {len(page) / 1e6:.1f} MB, self-contained; "
    f"open it in any browser"
  )
  return 0


def configs(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo configs`."""
  import ast

  from gtpo_jax.config.config_files import packaged

  files = packaged()
  if args.fields:
    from gtpo_jax.config.describe import describe

    for field in describe():
      default = "-" if field.default is None else repr(field.default)
      values = f"; {field.values}" if field.values else ""
      print(f"{field.name} ({field.kind}, {default}{values}): {field.meaning}")
    return 0
  if args.name:
    if args.name not in files:
      raise UserError(f"unknown config {args.name!r}{did_you_mean(args.name, files)}")
    print(files[args.name].read_text(encoding="utf-8"), end="")
    return 0
  for name, file in files.items():
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    print(f"{name:<{max(map(len, files))}}  {text.split(chr(10))[0]}")
  print("gtpo train --config=NAME --workdir=DIR trains with one; gtpo configs NAME prints it")
  return 0


def doctor(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo doctor`."""
  prepare_jax()
  from gtpo_jax.cli.doctor import examine

  return examine(program_name())
