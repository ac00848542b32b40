"""The options of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from etils import epath

import gtpo_jax
from gtpo_jax.cli import commands
from gtpo_jax.cli.eval import evaluate
from gtpo_jax.cli.probe import probe
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.paths import storage_path

COMMANDS = (
  *("train", "probe", "eval", "sample", "export", "serve", "tinker", "plan", "report", "configs"),
  "doctor",
)
OVERRIDE = "--config."  # prefix of the options that set a config field
CONFIG_HELP = (
  "a config file, or a name that `gtpo configs` lists; --config.a.b=VALUE overrides a field"
)
STEP_HELP = "checkpoint step; 0 for the base model (default: the newest checkpoint)"
JSON_HELP = "also write the numbers to this file"


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  """Parses the arguments after `gtpo`.

  Returns:
    The options, among them the command's function as `run`, and the overrides of config fields.

  Raises:
    UserError: an argument is wrong or missing.
    SystemExit: help was requested, or there are no arguments.
  """
  # argparse would reject the overrides as unknown options.
  overrides = [arg for arg in argv if arg.startswith(OVERRIDE)]
  for override in overrides:
    if "=" not in override:
      raise UserError(f"{override} needs a value after an equals sign: {override}=VALUE")
  rest = [arg for arg in argv if not arg.startswith(OVERRIDE)]
  parser, by_command = _make_parser()
  if not rest:
    parser.print_help()
    raise SystemExit(2)
  if rest[0] in COMMANDS:  # report a misspelt option before argparse reports a missing one
    by_command[rest[0]].check_options(rest[1:])
  args = parser.parse_args(rest)
  of_run = args.command in ("sample", "eval")  # the model's own config can be overridden
  if overrides and not of_run and not getattr(args, "config", None):
    raise UserError(f"{overrides[0]} needs a --config=FILE to override")
  return args, overrides


class _Parser(argparse.ArgumentParser):
  """An argparse parser that raises one-line errors with the nearest valid name."""

  def error(self, message: str) -> None:
    if message.startswith("argument {") and "invalid choice: '" in message:
      word = message.split("invalid choice: '")[1].split("'")[0]
      hint = did_you_mean(word, COMMANDS)
      message = f"unknown command {word!r}{hint}; valid are {', '.join(COMMANDS)}"
    raise UserError(message)

  def check_options(self, argv: Sequence[str]) -> None:
    """Raises UserError for the first option that this command does not have."""
    options = [option for action in self._actions for option in action.option_strings]
    for word in (arg.split("=")[0] for arg in argv if arg.startswith("--")):
      if word not in options:
        hint = did_you_mean(word, options)
        raise UserError(f"unknown option {word!r}{hint}; valid are {', '.join(sorted(options))}")


def _path(name: str) -> epath.Path:
  try:
    return storage_path(name)
  except UserError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def _make_parser() -> tuple[_Parser, dict[str, _Parser]]:
  """Returns the parser of `gtpo`, and the parsers of its commands by name."""
  parser = _Parser(
    prog="gtpo", description="Reinforcement learning of language models with entropy-shaped credit."
  )
  version = f"%(prog)s {gtpo_jax.__version__}"
  parser.add_argument("--version", action="version", version=version)
  subparsers = parser.add_subparsers(
    dest="command", metavar="{" + ",".join(COMMANDS) + "}", parser_class=_Parser
  )

  def add(name: str, run: Callable[..., int], description: str) -> _Parser:
    command = subparsers.add_parser(
      name, help=description, description=description, allow_abbrev=False
    )
    command.set_defaults(run=run)
    return command

  _add_train(add("train", commands.train, "train a policy; run the same command again to resume"))
  _add_probe(add("probe", probe, "compare the gradients of recipes before one trains"))
  _add_eval(add("eval", evaluate, "estimate mean@n, pass@k, best@k and maj@k on held-out problems"))
  _add_sample(add("sample", commands.sample, "print completions of a prompt"))
  _add_serve(add("serve", commands.serve, "answer requests in OpenAI's protocol"))
  _add_tinker(add("tinker", commands.tinker, "train and sample for clients of Tinker's API"))
  _add_export(add("export", commands.export, "write a run's policy as a Hugging Face folder"))
  _add_plan(
    add("plan", commands.plan, "check whether a run fits on hardware that this machine lacks")
  )
  _add_report(add("report", commands.report, "write an HTML file with figures and a credit viewer"))
  _add_configs(add("configs", commands.configs, "list the configs that come with gtpo_jax"))
  add("doctor", commands.doctor, "check this machine: what works, what is missing, how to get it")
  return parser, subparsers.choices


def _add_train(parser: _Parser) -> None:
  parser.add_argument("--config", required=True, help=CONFIG_HELP)
  parser.add_argument("--workdir", required=True, type=_path, help="the run's folder")


def _add_probe(parser: _Parser) -> None:
  parser.add_argument("--config", required=True, help=CONFIG_HELP)
  parser.add_argument(
    "--workdir", required=True, type=_path, help="a folder; the same command again resumes"
  )
  parser.add_argument(
    "--arms",
    default="grpo,gtpo",
    help="recipes with settings, such as grpo,gtpo(alpha2=1); the others are compared with the "
    "first (default: grpo,gtpo)",
  )
  parser.add_argument(
    "--batches", type=int, default=12, help="batches to compare the arms on (default: 12)"
  )
  parser.add_argument(
    "--reference", type=int, default=48, help="batches of the true gradient (default: 48)"
  )
  parser.add_argument(
    "--controls", action="store_true", help="also measure each entropy arm with shuffled entropies"
  )
  parser.add_argument("--json", type=_path, help=JSON_HELP)


def _add_eval(parser: _Parser) -> None:
  parser.add_argument(
    "--model",
    required=True,
    type=_path,
    help="the workdir of a run; with --config also a Hugging Face folder or hub id",
  )
  parser.add_argument("--config", help="a config file (default: the run's own config)")
  parser.add_argument("--step", type=int, help=STEP_HELP)
  parser.add_argument(
    "--data",
    help="replaces data.eval: a .jsonl or .parquet file, hf:ID, tfds:NAME, rg:NAME, or a task",
  )
  parser.add_argument(
    "--k", default="", help="the ks of pass@k, such as 1,4,32; the largest sets the samples"
  )
  parser.add_argument("--json", type=_path, help=JSON_HELP)
  parser.add_argument(
    "--completions", type=_path, help="also write all problems and completions to this .jsonl file"
  )


def _add_sample(parser: _Parser) -> None:
  parser.add_argument(
    "--model",
    required=True,
    type=_path,
    help="the workdir of a run, a Hugging Face folder, or a hub id",
  )
  parser.add_argument("--prompt", required=True, help="the user's message")
  parser.add_argument("--step", type=int, help=STEP_HELP)
  parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
  parser.add_argument("--top_k", type=int, default=0, help="0 keeps all tokens (default: 0)")
  parser.add_argument("--top_p", type=float, default=1.0, help="1 keeps all tokens (default: 1)")
  parser.add_argument("--min_p", type=float, default=0.0, help="0 keeps all tokens (default: 0)")
  parser.add_argument(
    "--max_tokens",
    type=int,
    help="maximum tokens of a completion (default: the run's own limit; 256 for a folder)",
  )
  parser.add_argument(
    "--stop",
    action="append",
    help="a string that ends a completion, whose text is cut before it; repeat the option for more "
    "(default: the run's sampling.stop; none for a folder)",
  )
  parser.add_argument(
    "--row",
    default="{}",
    help="with an environment (--config.env.make, or the run's), further fields of its row, "
    "as a JSON object",
  )
  parser.add_argument("--n", type=int, default=1, help="number of completions (default: 1)")
  parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")


def _add_serve(parser: _Parser) -> None:
  parser.add_argument(
    "--model",
    required=True,
    type=_path,
    help="the workdir of a run, a Hugging Face folder, or a hub id",
  )
  parser.add_argument("--step", type=int, help=STEP_HELP)
  _add_server(parser, "GTPO_SERVE_TOKEN", queue=1024)


def _add_tinker(parser: _Parser) -> None:
  parser.add_argument("--model", required=True, type=_path, help="a Hugging Face folder or hub id")
  parser.add_argument(
    "--workdir",
    required=True,
    type=_path,
    help="a folder for saved weights and the database; the same command again resumes",
  )
  _add_server(parser, "GTPO_TINKER_KEY", queue=4096, name="its path or hub id")
  parser.add_argument(
    "--max_rank", type=int, default=128, help="the highest rank of adapters (default: 128)"
  )
  parser.add_argument(
    "--models", type=int, default=8, help="models that are trained at once (default: 8)"
  )
  parser.add_argument(
    "--policies",
    type=int,
    default=2,
    help="sets of weights that are kept ready for sampling (default: 2)",
  )
  parser.add_argument(
    "--merge_adapters",
    choices=("auto", "always", "never"),
    default="auto",
    help="always: sample from copies of the base with adapters merged; never: compute adapters "
    "beside one base (default: auto, by the memory)",
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="seed of requests that have none (default: 0)"
  )


def _add_server(
  parser: _Parser, secret: str, queue: int, name: str = "the name of its folder"
) -> None:
  parser.add_argument(
    "--host",
    default="127.0.0.1",
    help=f"the address; one that others reach needs {secret} (default: 127.0.0.1)",
  )
  parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
  parser.add_argument("--name", default="", help=f"what clients call the model (default: {name})")
  parser.add_argument(
    "--max_prompt_tokens",
    type=int,
    help="maximum tokens of a prompt (default: the model's context)",
  )
  parser.add_argument(
    "--max_tokens", type=int, help="maximum tokens of an answer (default: the model's context)"
  )
  parser.add_argument(
    "--compute_dtype",
    help="float32, bfloat16 or float16 (default: the run's own, or what suits the device)",
  )
  parser.add_argument(
    "--slots",
    type=int,
    default=0,
    help="completions that run at once (default: 32 on a CPU, what the memory holds elsewhere)",
  )
  parser.add_argument(
    "--queue",
    type=int,
    default=queue,
    help=f"completions that may wait for a slot; more are refused (default: {queue})",
  )
  parser.add_argument(
    "--batch_invariant",
    action="store_true",
    help="give an answer the bits that it would have alone, whatever runs beside it",
  )


def _add_export(parser: _Parser) -> None:
  parser.add_argument("--workdir", required=True, type=_path, help="the workdir of a run")
  parser.add_argument(
    "--out", required=True, type=_path, help="the folder to write; it must not exist yet"
  )
  parser.add_argument("--step", type=int, help=STEP_HELP)
  parser.add_argument(
    "--dtype", help="float32, bfloat16 or float16 (default: the dtype of the run's parameters)"
  )
  parser.add_argument(
    "--adapter", action="store_true", help="write only the LoRA adapters, as a PEFT folder"
  )
  parser.add_argument(
    "--push", metavar="OWNER/NAME", help="also upload the folder to this model of the hub"
  )


def _add_plan(parser: _Parser) -> None:
  parser.add_argument("--config", required=True, help=CONFIG_HELP)
  parser.add_argument(
    "--topology",
    required=True,
    help="a TPU slice (v5e:4x4, v5p:4x4x4, v6e:4x4; needs libtpu); GPUs in one node or several "
    "(h100:8, h100:4x8, t4, l4, a100-40, a100, h200, b200; needs JAX's CUDA plugin); or cpu:8",
  )
  parser.add_argument(
    "--lengths",
    help="say what sampling.staleness would change for completions of these lengths: a file of "
    "numbers of tokens, or lognormal:MEDIAN,SIGMA",
  )
  parser.add_argument("--json", type=_path, help=JSON_HELP)


def _add_report(parser: _Parser) -> None:
  parser.add_argument(
    "--workdir",
    required=True,
    type=_path,
    action="append",
    help="the workdir of a run; repeat the option for more runs",
  )
  parser.add_argument("--out", required=True, type=_path, help="the HTML file to write")


def _add_configs(parser: _Parser) -> None:
  parser.add_argument("name", nargs="?", help="print this config instead, to start your own from")
  parser.add_argument(
    "--fields", action="store_true", help="print every field with its default and meaning instead"
  )
