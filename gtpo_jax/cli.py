"""The command line. Exit status: 0 done, 2 the user's input is wrong (one line says what), 130 / 143 stopped and saved, 1 else."""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from gtpo_jax.errors import UserError, nearest

COMMANDS = ("train", "eval", "sample", "plan", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit status."""
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    args, overrides = _parse(argv)
    return args.run(args, overrides)
  except UserError as error:
    print(f"gtpo: {error}", file=sys.stderr)
    return 2
  except BrokenPipeError:  # the reader of our output went away
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = _Parser(prog="gtpo", description="Reinforcement learning of language models with entropy-shaped credit.")
  commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(COMMANDS) + "}", parser_class=_Parser)

  train = commands.add_parser("train", help="the main job; the same command again resumes", allow_abbrev=False)
  train.add_argument("--config", required=True, help="a config file, such as configs/tiny.py; --config.a.b=VALUE overrides a field")
  train.add_argument("--workdir", required=True, type=Path, help="the run's folder")
  train.set_defaults(run=_train)

  evaluation = commands.add_parser("eval", help="mean@n and pass@k on held-out problems", allow_abbrev=False)
  evaluation.add_argument("--model", required=True, type=Path, help="the workdir of a run")
  evaluation.add_argument("--config", help="a config file; the run's own unless given")
  evaluation.add_argument("--step", type=int, help="which checkpoint: a step number, 0 for the base model; the newest unless given")
  evaluation.add_argument("--k", default="", help="the ks of pass@k, such as 1,4,32; samples = the largest")
  evaluation.add_argument("--json", type=Path, help="write the numbers into this file too")
  evaluation.set_defaults(run=_eval)

  sample = commands.add_parser("sample", help="prints completions of a prompt", allow_abbrev=False)
  sample.add_argument("--model", required=True, type=Path, help="the workdir of a run")
  sample.add_argument("--prompt", required=True)
  sample.add_argument("--step", type=int, help="which checkpoint: a step number, 0 for the base model; the newest unless given")
  sample.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token")
  sample.add_argument("--top_k", type=int, default=0)
  sample.add_argument("--top_p", type=float, default=1.0)
  sample.add_argument("--min_p", type=float, default=0.0)
  sample.add_argument("--max_tokens", type=int, help="the longest completion; the run's own limit unless given")
  sample.add_argument("--n", type=int, default=1, help="how many completions")
  sample.add_argument("--seed", type=int, default=0)
  sample.set_defaults(run=_sample)

  planner = commands.add_parser("plan", help="does a run fit hardware that is not here?", allow_abbrev=False)
  planner.add_argument("--config", required=True, help="a config file; --config.a.b=VALUE overrides a field")
  planner.add_argument("--topology", required=True, help="such as v5p:4x4x4 or v5e:4x4 (needs libtpu), or cpu:8")
  planner.add_argument("--json", type=Path, help="write the numbers into this file too")
  planner.set_defaults(run=_plan)

  doctor = commands.add_parser("doctor", help="what is here, what is missing, how to get it", allow_abbrev=False)
  doctor.set_defaults(run=_doctor)

  # argparse takes "--config.a=1" for an unknown option; those are the config's own.
  overrides = [arg for arg in argv if arg.startswith("--config.")]
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
      message = f"unknown command {word!r}{nearest(word, COMMANDS)}; valid are {', '.join(COMMANDS)}"
    raise UserError(message)

  def refuse_unknown(self, argv: Sequence[str]) -> None:
    """Refuses the first option that this command does not have."""
    options = [option for action in self._actions for option in action.option_strings]
    for word in (arg.split("=")[0] for arg in argv if arg.startswith("--")):
      if word not in options:
        raise UserError(f"unknown option {word!r}{nearest(word, options)}; valid are {', '.join(sorted(options))}")


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
  _prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.reporting.display import Display
  from gtpo_jax.train import train
  config, display, stop = configs.load(args.config, overrides), Display(), _StopSignals()
  with stop:
    result = train(config, args.workdir, display, stop.asked)
  display.say(result.summary)
  again = f"gtpo train --config={args.config} --workdir={args.workdir} " + " ".join(overrides)
  if not result.finished:
    display.say(f"to go on: {again.strip()}")
    return 128 + (stop.signal or signal.SIGINT)
  display.say(f"curves: {args.workdir / 'curves.png'}; try: gtpo sample --model={args.workdir} --prompt=...")
  return 0


def _eval(args: argparse.Namespace, overrides: list[str]) -> int:
  _prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.data.pipeline import held_out
  from gtpo_jax.evaluation import evaluate
  ks = _numbers(args.k)
  actor, config, params, step = _open(args.model, args.step, configs.load(args.config, overrides) if args.config else None)
  samples = max([*ks, config.eval.samples]) if not ks else max(ks)
  import jax
  name = config.data.eval or config.data.train
  result = evaluate(actor, params, name, held_out(config.eval_task, config.eval.problems), jax.random.key(config.seed),
                    samples=samples, batch=config.eval.batch, sampler=config.eval_sampler)
  metrics = {"step": step, "problems": len(result.correct), **result.metrics(ks or None)}
  for key, value in metrics.items():
    print(f"{key:<32} {value:.4f}" if isinstance(value, float) else f"{key:<32} {value}")
  if args.json:
    _write(args.json, json.dumps(metrics, indent=2) + "\n")
  return 0


def _sample(args: argparse.Namespace, overrides: list[str]) -> int:
  if not args.prompt.strip():
    raise UserError("--prompt is empty; give it some text")
  if args.n < 1:
    raise UserError(f"--n must be at least 1, got {args.n}")
  if args.max_tokens is not None and args.max_tokens < 1:
    raise UserError(f"--max_tokens must be at least 1, got {args.max_tokens}")
  from gtpo_jax.sampling.filters import Sampler
  sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p)
  _prepare_jax()
  import jax

  from gtpo_jax.data.records import user
  from gtpo_jax.parallel import fetch
  actor, _, params, _ = _open(args.model, args.step, None, args.max_tokens)
  ids = actor.chat.encode_prompt(user(args.prompt))
  rollouts = actor.engine.sample(params, [ids], jax.random.key(args.seed), group=args.n, sampler=sampler)
  tokens, mask = fetch((rollouts.tokens[0], rollouts.mask[0]))
  for text in actor.chat.decode(tokens, mask):
    print(text)
  return 0


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
  _prepare_jax()
  from gtpo_jax import config as configs
  from gtpo_jax.plan import plan, table
  result = plan(configs.load(args.config, overrides), args.topology)
  print(table(result))
  if args.json:
    _write(args.json, json.dumps(result, indent=2) + "\n")
  return 0


def _doctor(args: argparse.Namespace, overrides: list[str]) -> int:
  _prepare_jax()
  from gtpo_jax.doctor import examine
  return examine()


def _open(workdir: Path, step: int | None, config=None, max_tokens: int | None = None):
  """The actor, config, sampling parameters and step of a run's checkpoint."""
  import dataclasses

  from gtpo_jax.checkpoint import Checkpoints
  from gtpo_jax.rollout import Actor
  from gtpo_jax.train import load_config
  if not workdir.is_dir():
    raise UserError(f"no folder at {str(workdir)!r}; --model is the workdir of a `gtpo train`")
  config = config or load_config(workdir)
  if max_tokens:
    config = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, max_tokens=max(max_tokens, 2)))
  folder = workdir / ("base" if step == 0 else "checkpoints")
  found = Checkpoints(folder) if folder.is_dir() else None
  steps = found.steps() if found else []
  if not steps or (step is not None and step not in steps):
    have = ", ".join(map(str, steps)) or "none"
    raise UserError(f"no checkpoint{'' if step is None else f' of step {step}'} in {str(folder)!r}; steps there: {have}")
  actor = Actor(config)
  params = actor.engine.layout(found.restore_params(actor.model, step))
  found.close()
  return actor, config, params, max(steps) if step is None else step


def _prepare_jax() -> None:
  """Settings that must stand before JAX starts: the compile cache, and no search for chips that are not there."""
  if importlib.util.find_spec("libtpu") and not any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio")):
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if importlib.util.find_spec("jax_cuda13_plugin") else "cpu")
  import jax
  if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "gtpo_jax" / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _StopSignals:
  """Turns the first Ctrl-C or SIGTERM into a wish to stop at the next step; the second one leaves at once."""

  def __init__(self):
    self.signal: int | None = None
    self._before: dict[int, object] = {}

  def asked(self) -> bool:
    return self.signal is not None

  def __enter__(self) -> _StopSignals:
    for number in (signal.SIGINT, signal.SIGTERM):
      self._before[number] = signal.signal(number, self._on_signal)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, _: object) -> None:
    if self.signal is not None:
      os._exit(128 + number)
    self.signal = number
    print("\ngtpo: stopping at the next step boundary and saving; once more to leave at once", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
  try:
    numbers = [int(part) for part in text.split(",") if part]
  except ValueError as error:
    raise UserError(f"--k must be whole numbers joined by commas, such as 1,4,32; got {text!r}") from error
  if any(number < 1 for number in numbers):
    raise UserError(f"--k must be at least 1, got {text!r}")
  return numbers


def _write(file: Path, text: str) -> None:
  try:
    file.write_text(text)
  except OSError as error:
    raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from error
