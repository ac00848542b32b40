"""The command line. Exit status: 0 done, 2 the user's input is wrong (one line says what), 130 / 143 stopped by a signal, 1 else."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from etils import epath

from gtpo_jax.runtime.errors import RunError, UserError, first_line, nearest
from gtpo_jax.runtime.signals import StopSignals
from gtpo_jax.runtime.startup import join_processes, prepare_jax

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
COMMANDS = ("train", "eval", "sample", "export", "plan", "report", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit status."""
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    args, overrides = _parse(argv)
    return args.run(args, overrides)
  except UserError as error:
    print(f"gtpo: {error}", file=sys.stderr)
    return 2
  except RunError as error:
    print(f"gtpo: {error}", file=sys.stderr)
    return 1
  except PermissionError as error:
    print(
      f"gtpo: no permission for {error.filename!r}; name another place, or have it opened to you",
      file=sys.stderr,
    )
    return 2
  except KeyboardInterrupt:
    return 128 + signal.SIGINT
  except BrokenPipeError:  # the reader of our output went away
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    if error.errno not in FULL:
      raise
    print(
      f"gtpo: cannot write {str(error.filename or 'a file')!r}: {error.strerror}; what was saved is whole; free some space, then "
      f"give the same command again",
      file=sys.stderr,
    )
    return 1


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = _Parser(
    prog="gtpo", description="Reinforcement learning of language models with entropy-shaped credit."
  )
  commands = parser.add_subparsers(
    dest="command", metavar="{" + ",".join(COMMANDS) + "}", parser_class=_Parser
  )

  train = commands.add_parser(
    "train", help="the main job; the same command again resumes", allow_abbrev=False
  )
  train.add_argument(
    "--config",
    required=True,
    help="a config file, such as configs/tiny.py; --config.a.b=VALUE overrides a field",
  )
  train.add_argument("--workdir", required=True, type=epath.Path, help="the run's folder")
  train.set_defaults(run=_train)

  evaluation = commands.add_parser(
    "eval", help="mean@n, pass@k, best@k, maj@k on held-out problems", allow_abbrev=False
  )
  evaluation.add_argument(
    "--model",
    required=True,
    type=Path,
    help="the workdir of a run, or (with --config) a Hugging Face folder or hub id",
  )
  evaluation.add_argument("--config", help="a config file; the run's own unless given")
  evaluation.add_argument(
    "--step",
    type=int,
    help="which checkpoint: a step number, 0 for the base model; the newest unless given",
  )
  evaluation.add_argument(
    "--data",
    help="evaluate on this instead of data.eval: a .jsonl or .parquet file, hf:ID, tfds:NAME, a task",
  )
  evaluation.add_argument(
    "--k", default="", help="the ks of pass@k, such as 1,4,32; samples = the largest"
  )
  evaluation.add_argument("--json", type=Path, help="write the numbers into this file too")
  evaluation.add_argument(
    "--completions", type=Path, help="write every problem and completion into this .jsonl file"
  )
  evaluation.set_defaults(run=_eval)

  sample = commands.add_parser("sample", help="prints completions of a prompt", allow_abbrev=False)
  sample.add_argument(
    "--model",
    required=True,
    type=Path,
    help="the workdir of a run, a Hugging Face folder, or a hub id",
  )
  sample.add_argument("--prompt", required=True)
  sample.add_argument(
    "--step",
    type=int,
    help="which checkpoint: a step number, 0 for the base model; the newest unless given",
  )
  sample.add_argument(
    "--temperature", type=float, default=1.0, help="0 takes the most probable token"
  )
  sample.add_argument("--top_k", type=int, default=0)
  sample.add_argument("--top_p", type=float, default=1.0)
  sample.add_argument("--min_p", type=float, default=0.0)
  sample.add_argument(
    "--max_tokens",
    type=int,
    help="the longest completion; the run's own limit unless given, or 256",
  )
  sample.add_argument("--n", type=int, default=1, help="how many completions")
  sample.add_argument("--seed", type=int, default=0)
  sample.set_defaults(run=_sample)

  exporter = commands.add_parser(
    "export", help="a run's policy as a Hugging Face folder", allow_abbrev=False
  )
  exporter.add_argument("--workdir", required=True, type=epath.Path, help="the workdir of a run")
  exporter.add_argument(
    "--out", required=True, type=Path, help="the folder to write; must not exist yet"
  )
  exporter.add_argument(
    "--step",
    type=int,
    help="which checkpoint: a step number, 0 for the base model; the newest unless given",
  )
  exporter.add_argument("--dtype", help="float32, bfloat16 or float16; the run's own unless given")
  exporter.add_argument(
    "--adapter", action="store_true", help="the LoRA adapters alone, as a PEFT folder"
  )
  exporter.set_defaults(run=_export)

  planner = commands.add_parser(
    "plan", help="does a run fit hardware that is not here?", allow_abbrev=False
  )
  planner.add_argument(
    "--config", required=True, help="a config file; --config.a.b=VALUE overrides a field"
  )
  planner.add_argument(
    "--topology", required=True, help="such as v5p:4x4x4 or v5e:4x4 (needs libtpu), or cpu:8"
  )
  planner.add_argument("--json", type=Path, help="write the numbers into this file too")
  planner.set_defaults(run=_plan)

  reporter = commands.add_parser(
    "report", help="runs as one HTML file: figures, and where the credit goes", allow_abbrev=False
  )
  reporter.add_argument(
    "--workdir",
    required=True,
    type=epath.Path,
    action="append",
    help="the workdir of a run; give it once for each",
  )
  reporter.add_argument("--out", required=True, type=Path, help="the HTML file to write")
  reporter.set_defaults(run=_report)

  doctor = commands.add_parser(
    "doctor", help="what is here, what is missing, how to get it", allow_abbrev=False
  )
  doctor.set_defaults(run=_doctor)

  # argparse takes "--config.a=1" for an unknown option; those are the config's own.
  overrides = [arg for arg in argv if arg.startswith("--config.")]
  for override in overrides:
    if "=" not in override:
      raise UserError(f"{override} needs its value behind an equals sign: {override}=VALUE")
  rest = [arg for arg in argv if not arg.startswith("--config.")]
  if not rest:
    parser.print_help()
    raise SystemExit(2)
  if rest[0] in COMMANDS:  # before argparse complains of what is missing, what is misspelt
    commands.choices[rest[0]].refuse_unknown(rest[1:])
  args = parser.parse_args(rest)
  if overrides and not getattr(args, "config", None):
    raise UserError(f"{overrides[0]} needs a --config=FILE to override")
  return args, overrides


class _Parser(argparse.ArgumentParser):
  """argparse whose complaints are one line, with the nearest valid name."""

  def error(self, message: str) -> None:
    if message.startswith("argument {") and "invalid choice: '" in message:
      word = message.split("invalid choice: '")[1].split("'")[0]
      message = (
        f"unknown command {word!r}{nearest(word, COMMANDS)}; valid are {', '.join(COMMANDS)}"
      )
    raise UserError(message)

  def refuse_unknown(self, argv: Sequence[str]) -> None:
    """Refuses the first option that this command does not have."""
    options = [option for action in self._actions for option in action.option_strings]
    for word in (arg.split("=")[0] for arg in argv if arg.startswith("--")):
      if word not in options:
        raise UserError(
          f"unknown option {word!r}{nearest(word, options)}; valid are {', '.join(sorted(options))}"
        )


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  join_processes()
  from gtpo_jax import config as configs
  from gtpo_jax.loop import train
  from gtpo_jax.reporting.display import Display
  from gtpo_jax.runtime.distributed import is_first_process

  config = configs.load(args.config, overrides)
  display = Display(is_first_process())
  stop = StopSignals()
  with stop, _abreast():
    try:
      result = train(config, args.workdir, display, stop.asked)
    finally:
      display.end()
  display.say(result.summary)
  program = sys.argv[0] if Path(sys.argv[0]).name == "gtpo" else "python -m gtpo_jax"
  if not result.finished:
    again = shlex.join(
      ["train", f"--config={args.config}", f"--workdir={args.workdir}", *overrides]
    )
    display.say(f"to go on: {program} {again}")
    return 128 + (stop.signal or signal.SIGINT)
  display.say(
    f"curves: {args.workdir / 'curves.png'}; try: {program} sample {shlex.quote(f'--model={args.workdir}')} --prompt=..."
  )
  return 0


@contextlib.contextmanager
def _abreast() -> Iterator[None]:
  """Of several processes, one that fails ends at once: the others may wait for it, and it must not wait for them."""
  import jax

  try:
    yield
  except (
    Exception,
    SystemExit,
  ) as error:  # the display makes a SystemExit of an output that nobody reads
    if jax.process_count() == 1:
      raise
    lost = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    what = f"another process is gone or out of reach ({first_line(error)[:120]})" if lost else error
    with contextlib.suppress(OSError):  # there may be nobody to read it
      if not lost and not isinstance(error, UserError | RunError):
        traceback.print_exc()
      print(
        f"gtpo: process {jax.process_index()} of {jax.process_count()}: {what}; start all of them again to go on",
        file=sys.stderr,
        flush=True,
      )
    os._exit(2 if isinstance(error, UserError) else 1)


def _eval(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.evaluation.evaluate import evaluate_run
  from gtpo_jax.models.folder import find, is_hf_folder
  from gtpo_jax.rollout.policies import find_policy
  from gtpo_jax.rollout.problems import held_out_problems

  if is_hf_folder(find(str(args.model))) and not args.config:
    raise UserError(
      f"{str(args.model)!r} is a Hugging Face folder: give --config=FILE, which says what to evaluate it on"
    )
  ks = _numbers(args.k)
  _check_writable(args.json)
  _check_writable(args.completions)
  worker, config, read = find_policy(
    args.model, args.step, configs.load(args.config, overrides) if args.config else None
  )
  if args.data:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=args.data))
  problems = held_out_problems(
    config, worker, print
  )  # refused, where they must be, before the weights are read
  params, step = read()
  result = evaluate_run(config, worker, params, problems, samples=max(ks, default=None))
  summary = {"step": step, **result.summary(ks)}
  if args.json:
    _write(args.json, json.dumps(summary, indent=2) + "\n")
  if args.completions:
    _write(args.completions, "".join(json.dumps(row) + "\n" for row in result.rows()))
  intervals = summary.pop("intervals")
  for key, value in summary.items():
    shown = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    print(
      f"{key:<32} {shown}"
      + (
        " [{:.4f}, {:.4f}]".format(*intervals[key])
        if None not in intervals.get(key, [None])
        else ""
      )
    )
  return 0


def _sample(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  if not args.prompt.strip():
    raise UserError("--prompt is empty; give it some text")
  if not _is_text(args.prompt):
    raise UserError(f"--prompt is not valid UTF-8: {args.prompt!r}")
  if not 0 <= args.seed < 2**32:
    raise UserError(f"--seed must be in [0, 2**32), got {args.seed}")
  if args.n < 1:
    raise UserError(f"--n must be at least 1, got {args.n}")
  if args.max_tokens is not None and args.max_tokens < 1:
    raise UserError(f"--max_tokens must be at least 1, got {args.max_tokens}")
  from gtpo_jax.sampling.filters import SamplingParams

  sampling_params = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
  import jax

  from gtpo_jax.data.records import user
  from gtpo_jax.rollout.policies import open_policy

  worker, _, params, _ = open_policy(args.model, args.step, None, args.max_tokens)
  ids = worker.chat.encode_prompt(user(args.prompt))
  policy = worker.policy(params)
  key = jax.random.key(args.seed)
  live = sys.stdout.isatty()
  shown = ""
  texts = [""] * args.n
  for buffer, ended in policy.engine.generate(
    policy.params,
    [ids],
    key,
    group=args.n,
    sampling_params=sampling_params,
    every=4 if live else None,
  ):
    if live and args.n == 1:  # as it is written, but for a character that is not whole yet
      text = worker.chat.decode([buffer.tokens[0, 0, buffer.mask[0, 0]]])[0].rstrip("\ufffd")
      print(text[len(shown) :], end="", flush=True)
      shown = text
    for _, j in ended:
      (texts[j],) = worker.chat.decode([buffer.tokens[0, j, buffer.mask[0, j]]])
      if live and args.n > 1:  # each when it has ended
        print(texts[j], flush=True)
  if not live:
    print(*texts, sep="\n")
  elif args.n == 1:
    print(texts[0][len(shown) :])
  return 0


def _export(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  from gtpo_jax.export import export

  if args.adapter and args.dtype:
    raise UserError("--dtype is of whole models; adapters are float32")
  given = {"workdir": args.workdir, "out": args.out, "step": args.step, "dtype": args.dtype}
  command = shlex.join(
    [
      "gtpo",
      "export",
      *(f"--{name}={value}" for name, value in given.items() if value is not None),
      *(["--adapter"] if args.adapter else []),
    ]
  )
  print(export(args.workdir, args.out, command, args.step, args.dtype, args.adapter))
  return 0


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.planning.plan import plan, table

  _check_writable(args.json)
  result = plan(configs.load(args.config, overrides), args.topology)
  print(table(result))
  if args.json:
    _write(args.json, json.dumps(result, indent=2) + "\n")
  return 0


def _report(args: argparse.Namespace, overrides: list[str]) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run that is still going may hold the accelerator
  prepare_jax()
  from gtpo_jax.reporting.report import make_report

  _check_writable(args.out)
  page = make_report(args.workdir)
  _write(args.out, page)
  print(
    f"{args.out}: {len(args.workdir)} run(s), {len(page) / 1e6:.1f} MB; it needs nothing else, open it in any browser"
  )
  return 0


def _doctor(args: argparse.Namespace, overrides: list[str]) -> int:
  prepare_jax()
  from gtpo_jax.doctor import examine

  return examine()


def _numbers(text: str) -> list[int]:
  try:
    numbers = [int(part) for part in text.split(",") if part]
  except ValueError as error:
    raise UserError(
      f"--k must be whole numbers joined by commas, such as 1,4,32; got {text!r}"
    ) from error
  if any(number < 1 for number in numbers):
    raise UserError(f"--k must be at least 1, got {text!r}")
  return numbers


def _is_text(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _check_writable(file: Path | None) -> None:
  """Refuses a file that cannot be written, before the work whose result it is to hold."""
  if file and (
    file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK)
  ):
    raise UserError(f"cannot write {str(file)!r}; name a file in a folder that exists and is yours")


def _write(file: Path, text: str) -> None:
  try:
    file.write_text(text, encoding="utf-8")
  except OSError as error:
    raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from error
