"""The commands. Each receives its options and the config overrides, and returns the exit status.

Modules that import JAX are imported inside the functions, after `prepare_jax`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_jax.cli.samples import print_samples, sampled_prompt
from gtpo_jax.runtime.cluster.agreement import agree, announce_failure, process_identity
from gtpo_jax.runtime.cluster.joining import join_processes
from gtpo_jax.runtime.device_errors import explain
from gtpo_jax.runtime.errors import RunError, UserError, did_you_mean
from gtpo_jax.runtime.signals import SIGNAL_EXIT, StopSignals
from gtpo_jax.runtime.startup import (
  place_compile_cache,
  prepare_devices,
  prepare_jax,
  refuse_cpu_fallback,
)
from gtpo_jax.storage.paths import (
  absolute_path,
  check_object_writable,
  is_remote,
  storage_errors,
  storage_path,
)

if TYPE_CHECKING:
  from gtpo_jax.logs.display import Display


def _in_all_processes(command: Callable[..., int]) -> Callable[..., int]:
  """Decorates a command that the processes of a launcher run together."""

  @functools.wraps(command)
  def run(args: argparse.Namespace, overrides: list[str]) -> int:
    prepare_jax()
    join_processes()
    with _exit_on_failure():
      agree({**process_identity(), "the command": command.__name__, **_places(args)})
      refuse_cpu_fallback()
      prepare_devices()
      return command(args, overrides)

  return run


def _places(args: argparse.Namespace) -> dict[str, str]:
  """Returns the options of a command that all processes must share; paths are absolute.

  The config file is not among them: what it says is compared.
  """
  options = {key: value for key, value in vars(args).items() if key not in ("run", "config")}
  return {
    f"--{key}": str(absolute_path(storage_path(value)) if isinstance(value, Path) else value)
    for key, value in options.items()
  }


@contextlib.contextmanager
def _exit_on_failure() -> Iterator[None]:
  """Exits at once when this process fails, if it is one of several.

  A normal exit would wait for the other processes, which may wait for this one in a collective.

  Raises:
    RunError: XLA failed, and `explain` knows what to do about it.
  """
  import jax

  try:
    yield
  except (Exception, SystemExit) as error:  # rich raises SystemExit when its output pipe is closed
    count = jax.process_count()
    reason = explain(error, count)
    if count == 1:
      if reason:
        raise RunError(reason) from error
      raise
    announce_failure(error)
    expected = reason or isinstance(error, UserError | RunError)
    with contextlib.suppress(OSError):  # stderr may be closed
      if not expected:
        traceback.print_exc()
      print(
        f"gtpo: process {jax.process_index()} of {count}: {reason or error}; "
        f"restart all processes to resume",
        file=sys.stderr,
        flush=True,
      )
    os._exit(2 if isinstance(error, UserError) else 1)


@_in_all_processes
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
  program = _program()
  if not result.finished:
    words = ["train", f"--config={args.config}", f"--workdir={args.workdir}", *overrides]
    display.say(f"to resume: {program} {shlex.join(words)}")
    status = SIGNAL_EXIT + (stop.signal or signal.SIGINT)
    if has_abandoned_compiles():  # a normal exit would wait for the compiler
      jax.distributed.shutdown()
      sys.stdout.flush()
      os._exit(status)
    return status
  words = ["sample", f"--model={args.workdir}", f"--prompt={sampled_prompt(args.workdir)}"]
  display.say(f"curves: {args.workdir / 'curves.png'}; try: {program} {shlex.join(words)}")
  return 0


def _program() -> str:
  """Returns how this program was started, for commands that the user can copy."""
  if Path(sys.argv[0]).name == "gtpo":
    on_path = shutil.which("gtpo")
    is_first = on_path and os.path.samefile(on_path, sys.argv[0])
    return "gtpo" if is_first else shlex.quote(sys.argv[0])
  python = shutil.which("python")
  is_first = python and os.path.abspath(python) == os.path.abspath(sys.executable)
  return f"{'python' if is_first else shlex.quote(sys.executable)} -m gtpo_jax"


@_in_all_processes
def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo eval`."""
  from gtpo_jax import config as configs
  from gtpo_jax.evaluation.evaluate import evaluate_run
  from gtpo_jax.models.hf.folder import find, is_hf_folder
  from gtpo_jax.rollout.policies import find_policy
  from gtpo_jax.rollout.problems import held_out_problems
  from gtpo_jax.rollout.scoring.manager import RewardManager
  from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process

  say = print if is_first_process() else lambda line: None
  is_folder = is_hf_folder(find(str(args.model)))
  if is_folder and not args.config:
    raise UserError(
      f"{str(args.model)!r} is a Hugging Face folder: "
      f"give --config=FILE with the problems to evaluate it on"
    )
  ks = _parse_ks(args.k)
  for file in (args.json, args.completions):
    broadcast_from_first(lambda file=file: _check_writable(file))
  own_config = configs.load(args.config, overrides) if args.config else None
  agree(configs.flatten(configs.resolved_dict(own_config)) if own_config else {})
  worker, config, read = find_policy(args.model, args.step, own_config)
  if args.data:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=args.data))
  problems = held_out_problems(config, worker, say)  # before the weights, which take longer to read
  display = _stderr_display(is_first_process())
  reward_manager = RewardManager(config)
  reward_manager.probe_judge(say)
  if not is_folder and not is_remote(args.model):
    reward_manager.use_judge_cache(Path(args.model))
  with display.waiting("reading the weights"):
    params, step = read()
  with contextlib.ExitStack() as stack:
    stack.callback(reward_manager.close)
    if worker.episodes:
      stack.callback(worker.episodes.close)
    result = evaluate_run(
      config,
      worker,
      reward_manager,
      params,
      problems,
      samples=max(ks, default=None),
      counting=display.counting,
    )
  if not is_first_process():
    return 0
  summary = {"step": step, **result.summary(ks)}
  if args.json:
    _write(args.json, json.dumps(summary, indent=2) + "\n")
  if args.completions:
    _write(args.completions, "".join(json.dumps(row) + "\n" for row in result.rows()))
  _print_summary(summary)
  return 0


def _stderr_display(enabled: bool = True) -> Display:
  """Returns a display of progress on stderr, for commands whose result is on stdout."""
  from rich.console import Console

  from gtpo_jax.logs.display import Display

  console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
  return Display(console=console)


def _print_summary(summary: dict[str, object]) -> None:
  """Prints an `Evaluation.summary`, with one metric and its interval per line."""
  intervals = summary["intervals"]
  for key, value in summary.items():
    if key == "intervals":
      continue
    low, high = intervals.get(key, (None, None))
    interval = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
    number = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    print(f"{key:<32} {number}{interval}")


def sample(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo sample`."""
  prepare_jax()
  refuse_cpu_fallback()
  prepare_devices()
  with _exit_on_failure():
    return print_samples(args, overrides, _stderr_display(sys.stderr.isatty()))


def serve(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo serve`."""
  _prepare_server(args, "gtpo serve", "serve")
  from gtpo_jax.cli.serve import ServeOptions
  from gtpo_jax.cli.serve import serve as run

  with _exit_on_failure():
    run(
      ServeOptions(**{name: getattr(args, name) for name in ServeOptions._fields}),
      lambda line: print(line, flush=True),
    )
  return 0


def tinker(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo tinker`."""
  _prepare_server(args, "gtpo tinker", "tinker")
  if args.max_rank < 0 or args.models < 1 or args.policies < 1:
    raise UserError("--max_rank must be at least 0, --models and --policies at least 1")
  if is_remote(args.workdir):
    raise UserError(f"--workdir={args.workdir} must be a local folder: it has a journal")
  args.workdir = Path(args.workdir)
  place_compile_cache(args.workdir)
  from gtpo_jax.cli.tinker import TinkerOptions
  from gtpo_jax.cli.tinker import serve as run

  with _exit_on_failure():
    run(
      TinkerOptions(**{name: getattr(args, name) for name in TinkerOptions._fields}),
      lambda line: print(line, flush=True),
    )
  return 0


def _prepare_server(args: argparse.Namespace, command: str, extra: str) -> None:
  """Checks the options that servers share, and prepares JAX.

  Raises:
    UserError: a package is missing, or a value is out of bounds.
  """
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


@_in_all_processes
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
  with _stderr_display(sys.stderr.isatty()).waiting(f"writing {args.out}"):
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
  prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.planning import plan as planning
  from gtpo_jax.planning.table import format_table

  _check_writable(args.json)
  config = configs.load(args.config, overrides)
  result = planning.plan(config, args.topology, _stderr_display().waiting)
  print(format_table(result))
  if args.json:
    _write(args.json, json.dumps(result, indent=2) + "\n")
  return 0


def report(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo report`."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run in progress may hold the accelerator
  prepare_jax()
  from gtpo_jax.report.report import make_report

  _check_writable(args.out)
  with _stderr_display(sys.stderr.isatty()).waiting("drawing the figures"):
    page = make_report(args.workdir)
  _write(args.out, page)
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

  return examine(_program())


def _parse_ks(text: str) -> list[int]:
  try:
    ks = [int(part) for part in text.split(",") if part]
  except ValueError as error:
    raise UserError(
      f"--k must be whole numbers separated by commas, such as 1,4,32; got {text!r}"
    ) from error
  if any(k < 1 for k in ks):
    raise UserError(f"--k must be at least 1, got {text!r}")
  return ks


def _check_writable(file: Path | None) -> None:
  """Raises UserError if the file cannot be written. Called before the work that fills the file."""
  if file is None:
    return
  if is_remote(file):
    with storage_errors(f"cannot write {str(file)!r}", UserError):
      check_object_writable(file)
    return
  target = file if file.exists() else Path(file).absolute().parent
  if file.is_dir() or not os.access(target, os.W_OK):
    raise UserError(
      f"cannot write {str(file)!r}; name a file in an existing folder that you can write to"
    )


def _write(file: Path, text: str) -> None:
  with storage_errors(f"cannot write {str(file)!r}", UserError):
    file.write_bytes(text.encode())
