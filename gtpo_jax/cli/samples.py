"""Prints completions and episodes for `gtpo sample`; imports modules that import JAX inside."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import find_problem

if TYPE_CHECKING:
  from gtpo_jax.environments.turns import Episode
  from gtpo_jax.logs.display import Display
  from gtpo_jax.rollout.worker import RolloutWorker

STREAM_INTERVAL = 4  # tokens between updates on a terminal
SHOWN_PROMPT = 80  # characters of a prompt in a command to try


def options_to_sample(workdir: Path) -> list[str]:
  """Returns options of `gtpo sample` with the last prompt of a run's samples.

  An episode also needs the answer of its row. The prompt is "..." if there is none that fits into
  a command.
  """
  from gtpo_jax.logs.log_files import read_jsonl

  rows = read_jsonl(workdir / "samples.jsonl")
  last = rows[-1] if rows else {}
  prompt = str(last.get("prompt", ""))
  fits = prompt.isprintable() and 0 < len(prompt) <= SHOWN_PROMPT
  row = {"answer": last["answer"]} if last.get("answer") else {}
  return [f"--prompt={prompt if fits else '...'}", *([f"--row={json.dumps(row)}"] if row else [])]


def print_samples(args: argparse.Namespace, overrides: Sequence[str], display: Display) -> int:
  """Samples completions and prints them, while they are sampled if stdout is a terminal."""
  _check_options(args)
  from gtpo_jax.config.sections import STOP
  from gtpo_jax.sampling.settings import SamplingParams

  if args.stop and (problem := find_problem(tuple(args.stop), STOP)):
    raise UserError(f"--stop {problem}")
  names = {field.name for field in dataclasses.fields(SamplingParams)}
  sampling_params = SamplingParams(**{name: x for name, x in vars(args).items() if name in names})
  import jax

  from gtpo_jax.data.records import user
  from gtpo_jax.logs.text import visible
  from gtpo_jax.rollout.policies import open_policy
  from gtpo_jax.rollout.sample import sample_prompt

  with display.waiting("reading the model"):
    worker, _, params, _ = open_policy(
      args.model, args.step, None, args.max_tokens, args.stop, overrides
    )
  stream = sys.stdout.isatty()
  # A terminal would act on control characters, for example move its cursor.
  show = functools.partial(visible, keep="\n\t") if stream else str
  policy = worker.policy(params)
  keys = policy.engine.completion_keys(jax.random.key(args.seed), 1, args.n)
  if worker.episodes:
    row = parse_row(args.row)
    with display.waiting("playing"):
      for completion in sample_prompt(worker, policy, args.prompt, row, keys, sampling_params):
        transcript = _transcript(worker, completion.tokens, completion.mask, show)
        print(transcript, _outcome(completion.episode), sep="\n")
    return 0
  prompt = worker.chat.encode_prompt(user(args.prompt))
  printed = ""
  texts = [""] * args.n
  engine = policy.engine
  rows = engine.completions([prompt], keys)
  text_of = lambda completion: worker.decode([completion.tokens])[0]
  chunks = engine.generate(
    policy.params,
    rows,
    sampling_params=sampling_params,
    stream_interval=STREAM_INTERVAL if stream else None,
  )
  with display.waiting("compiling"):
    first = next(chunks)
  for ended in itertools.chain([first], chunks):
    if stream and args.n == 1:
      # Without an incomplete character, which needs more tokens.
      text = text_of(rows[0][0]).rstrip("\ufffd")
      if worker.stop_strings:
        text = worker.stop_strings.without_begun(text)
      text = show(text)
      print(text[len(printed) :], end="", flush=True)
      printed = text
    for completion in ended:
      texts[completion.index] = show(text_of(completion))
      if stream and args.n > 1:  # print each completion when it is complete
        print(texts[completion.index], flush=True)
  if not stream:
    print(*texts, sep="\n")
  elif args.n == 1:
    print(texts[0][len(printed) :])
  return 0


def _check_options(args: argparse.Namespace) -> None:
  """Validates the options of `gtpo sample` that are not config fields."""
  if not args.prompt.strip():
    raise UserError("--prompt is empty; give it some text")
  try:
    args.prompt.encode()
  except UnicodeEncodeError:
    raise UserError(f"--prompt is not valid UTF-8: {args.prompt!r}") from None
  if not 0 <= args.seed < 2**32:
    raise UserError(f"--seed must be in [0, 2**32), got {args.seed}")
  if args.n < 1:
    raise UserError(f"--n must be at least 1, got {args.n}")
  if args.max_tokens is not None and args.max_tokens < 1:
    raise UserError(f"--max_tokens must be at least 1, got {args.max_tokens}")


DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # how a terminal shows tokens that the model has read


def parse_row(text: str) -> Mapping[str, Any]:
  """Returns the row of `--row`, which is a JSON object."""
  try:
    row = json.loads(text)
  except ValueError as error:
    raise UserError(f"--row is not valid JSON: {error}") from error
  if not isinstance(row, dict):
    raise UserError(f'--row must be a JSON object, such as \'{{"answer": "20"}}\', got {text!r}')
  return row


def _transcript(
  worker: RolloutWorker, tokens: np.ndarray, drawn: np.ndarray, show: Callable[[str], str]
) -> str:
  """Returns the text of a completion. On a terminal, observations are dim."""
  if not len(tokens):  # the environment has failed before the first turn
    return ""
  begins = np.flatnonzero(np.diff(drawn, prepend=~drawn[0]))
  parts = []
  for begin, end in zip(begins, [*begins[1:], len(drawn)], strict=True):
    text = show(worker.decode([tokens[begin:end]])[0])
    is_read = not drawn[begin] and sys.stdout.isatty()
    parts.append(f"{DIM}{text}{PLAIN}" if is_read else text)
  return "".join(parts)


def _outcome(episode: Episode) -> str:
  verdict = {True: "correct", False: "incorrect", None: "no verdict"}[episode.correct]
  reason = f" ({episode.reason})" if episode.reason else ""
  return (
    f"[{episode.stop}{reason}: {verdict}, reward {episode.reward:g}, {len(episode.turns)} turns, "
    f"{episode.calls} calls]"
  )
