"""The options of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

import gtpo_jax
from gtpo_jax.cli import commands
from gtpo_jax.cli.eval import evaluate
from gtpo_jax.cli.probe import probe
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.paths import storage_path

OVERRIDE = "--config."  # prefix of the options that set a config field


def _path(name: str) -> epath.Path:
  try:
    return storage_path(name)
  except UserError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def _option(meaning: str, default: Any = None, **more: Any) -> dict[str, Any]:
  """Returns the arguments of `add_argument` for an option, whose type is that of its default."""
  if default is False:
    return {"help": meaning, "action": "store_true", **more}
  if default is not None:
    more = {"type": type(default), "default": default, **more}
    meaning += "" if default == "" or "(default: " in meaning else " (default: %(default)s)"
  return {"help": meaning, **more}


def _needed(meaning: str, **more: Any) -> dict[str, Any]:
  return _option(meaning, required=True, **more)


CONFIG = _needed(
  "a config file, or a name that `gtpo configs` lists; --config.a.b=VALUE overrides a field "
  "(`gtpo configs --fields` lists them)"
)
STEP = _option("checkpoint step; 0 for the base model (default: the newest checkpoint)", type=int)
JSON = _option("also write the numbers to this file", type=_path)
MODEL = _needed("the workdir of a run, a Hugging Face folder, or a hub id", type=_path)


def _server(secret: str, queue: int, name: str) -> dict[str, dict[str, Any]]:
  """Returns the options that servers share."""
  return {
    "--host": _option(f"the address; one that others reach needs {secret}", "127.0.0.1"),
    "--port": _option("0 takes a free one", 8000),
    "--name": _option(f"what clients call the model (default: {name})", ""),
    "--max_prompt_tokens": _option(
      "maximum tokens of a prompt (default: the model's context)", type=int
    ),
    "--max_tokens": _option("maximum tokens of an answer (default: the model's context)", type=int),
    "--compute_dtype": _option(
      "float32, bfloat16 or float16 (default: the run's own, or what suits the device)"
    ),
    "--slots": _option(
      "completions that run at once (default: 32 on a CPU, what the memory holds elsewhere)", 0
    ),
    "--queue": _option("completions that may wait for a slot; more are refused", queue),
    "--batch_invariant": _option(
      "give an answer the bits that it would have alone, whatever runs beside it", False
    ),
  }


# By command: the function that runs it, a description, and its options.
_COMMANDS: dict[str, tuple[Callable[..., int], str, dict[str, dict[str, Any]]]] = {
  "train": (
    commands.train,
    "train a policy; run the same command again to resume",
    {"--config": CONFIG, "--workdir": _needed("the run's folder", type=_path)},
  ),
  "probe": (
    probe,
    "compare the gradients of recipes before one trains",
    {
      "--config": CONFIG,
      "--workdir": _needed("a folder; the same command again resumes", type=_path),
      "--arms": _option(
        "recipes with settings, such as grpo,gtpo(alpha2=1); the others are compared with the "
        "first",
        "grpo,gtpo",
      ),
      "--batches": _option("batches to compare the arms on", 12),
      "--reference": _option("batches of the true gradient", 48),
      "--controls": _option("also measure each entropy arm with shuffled entropies", False),
      "--json": JSON,
    },
  ),
  "eval": (
    evaluate,
    "estimate mean@n, pass@k, best@k and maj@k on held-out problems",
    {
      "--model": _needed(
        "the workdir of a run; with --config also a Hugging Face folder or hub id", type=_path
      ),
      "--config": _option("a config file (default: the run's own config)"),
      "--step": STEP,
      "--data": _option(
        "replaces data.eval: a .jsonl, .csv, .tsv or .parquet file, hf:ID, tfds:NAME, rg:NAME, or "
        "a task"
      ),
      "--k": _option("the ks of pass@k, such as 1,4,32; the largest sets the samples", ""),
      "--json": JSON,
      "--completions": _option(
        "also write all problems and completions to this .jsonl file", type=_path
      ),
    },
  ),
  "sample": (
    commands.sample,
    "print completions of a prompt",
    {
      "--model": MODEL,
      "--prompt": _needed("the user's message"),
      "--step": STEP,
      "--temperature": _option("0 is greedy", 1.0),
      "--top_k": _option("0 keeps all tokens", 0),
      "--top_p": _option("1 keeps all tokens", 1.0),
      "--min_p": _option("0 keeps all tokens", 0.0),
      "--max_tokens": _option(
        "maximum tokens of a completion (default: the run's own limit; 256 for a folder)", type=int
      ),
      "--stop": _option(
        "a string that ends a completion, whose text is cut before it; repeat the option for more "
        "(default: the run's sampling.stop; none for a folder)",
        action="append",
      ),
      "--row": _option(
        "with an environment (--config.env.make, or the run's), further fields of its row, as a "
        "JSON object",
        "{}",
      ),
      "--n": _option("number of completions", 1),
      "--seed": _option("random seed", 0),
    },
  ),
  "export": (
    commands.export,
    "write a run's policy as a Hugging Face folder",
    {
      "--workdir": _needed("the workdir of a run", type=_path),
      "--out": _needed("the folder to write; it must not exist yet", type=_path),
      "--step": STEP,
      "--dtype": _option(
        "float32, bfloat16 or float16 (default: the dtype of the run's parameters)"
      ),
      "--adapter": _option("write only the LoRA adapters, as a PEFT folder", False),
      "--push": _option("also upload the folder to this model of the hub", metavar="OWNER/NAME"),
    },
  ),
  "serve": (
    commands.serve,
    "answer requests in OpenAI's protocol",
    {
      "--model": MODEL,
      "--step": STEP,
      **_server("GTPO_SERVE_TOKEN", queue=1024, name="the name of its folder"),
    },
  ),
  "tinker": (
    commands.tinker,
    "train and sample for clients of Tinker's API",
    {
      "--model": _needed("a Hugging Face folder or hub id", type=_path),
      "--workdir": _needed(
        "a folder for saved weights and the database; the same command again resumes", type=_path
      ),
      **_server("GTPO_TINKER_KEY", queue=4096, name="its path or hub id"),
      "--max_rank": _option("the highest rank of adapters", 128),
      "--models": _option("models that are trained at once", 8),
      "--policies": _option("sets of weights that are kept ready for sampling", 2),
      "--merge_adapters": _option(
        "always: sample from copies of the base with adapters merged; never: compute adapters "
        "beside one base; auto: by the memory",
        "auto",
        choices=("auto", "always", "never"),
      ),
      "--seed": _option("seed of requests that have none", 0),
    },
  ),
  "plan": (
    commands.plan,
    "check whether a run fits on hardware that this machine lacks",
    {
      "--config": CONFIG,
      "--topology": _needed(
        "a TPU slice (v5e:4x4, v5p:4x4x4, v6e:4x4; needs libtpu); GPUs in one node or several "
        "(h100:8, h100:4x8, t4, l4, a100-40, a100, h200, b200; needs JAX's CUDA plugin); or cpu:8"
      ),
      "--lengths": _option(
        "say what sampling.staleness would change for completions of these lengths: a file of "
        "numbers of tokens, or lognormal:MEDIAN,SIGMA"
      ),
      "--json": JSON,
    },
  ),
  "report": (
    commands.report,
    "write an HTML file with figures and a credit viewer",
    {
      "--workdir": _needed(
        "the workdir of a run; repeat the option for more runs", type=_path, action="append"
      ),
      "--out": _needed("the HTML file to write", type=_path),
    },
  ),
  "configs": (
    commands.configs,
    "list the configs that come with gtpo_jax",
    {
      "name": _option("print this config instead, to start your own from", nargs="?"),
      "--fields": _option("print every field with its default and meaning instead", False),
    },
  ),
  "doctor": (commands.doctor, "check this machine: what works, what is missing, how to get it", {}),
}
COMMANDS = tuple(_COMMANDS)


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
  parser = _Parser(
    prog="gtpo", description="Reinforcement learning of language models with entropy-shaped credit."
  )
  version = f"%(prog)s {gtpo_jax.__version__}"
  parser.add_argument("--version", action="version", version=version)
  subparsers = parser.add_subparsers(
    dest="command", metavar="{" + ",".join(COMMANDS) + "}", parser_class=_Parser
  )
  for name, (run, description, options) in _COMMANDS.items():
    command = subparsers.add_parser(
      name, help=description, description=description, allow_abbrev=False
    )
    command.set_defaults(run=run)
    for option, settings in options.items():
      command.add_argument(option, **settings)
  if not rest:
    parser.print_help()
    raise SystemExit(2)
  if rest[0] in COMMANDS:  # report a misspelt option before argparse reports a missing one
    subparsers.choices[rest[0]].check_options(rest[1:])
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
