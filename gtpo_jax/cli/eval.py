"""`gtpo eval`: evaluates a run or a Hugging Face folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path

from gtpo_jax.cli.processes import check_writable, in_all_processes, stderr_display, write
from gtpo_jax.runtime.cluster.agreement import agree
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.paths import is_remote


@in_all_processes
def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo eval`."""
  from gtpo_jax import config as configs
  from gtpo_jax.logs.summary import MUCH
  from gtpo_jax.loop.evaluation.evaluate import evaluate_run
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
  try:
    ks = [int(part) for part in args.k.split(",") if part]
  except ValueError as error:
    raise UserError(
      f"--k must be whole numbers separated by commas, such as 1,4,32; got {args.k!r}"
    ) from error
  if any(k < 1 for k in ks):
    raise UserError(f"--k must be at least 1, got {args.k!r}")
  for file in (args.json, args.completions):
    broadcast_from_first(lambda file=file: check_writable(file))
  own_config = configs.load(args.config, overrides) if args.config else None
  fields = () if own_config else tuple(overrides)  # of the run's own config
  agree(configs.flatten(configs.resolved_dict(own_config)) if own_config else dict.fromkeys(fields))
  worker, config, read = find_policy(args.model, args.step, own_config, overrides=fields)
  if args.data:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=args.data))
  problems = held_out_problems(config, worker, say)  # before the weights, which take longer to read
  display = stderr_display(is_first_process())
  reward_manager = RewardManager(config)
  reward_manager.grader.probe(say)
  if not is_folder and not is_remote(args.model):
    reward_manager.grader.use_cache(Path(args.model))
  with display.waiting("reading the weights"):
    params, step = read()
  with contextlib.ExitStack() as stack:
    stack.callback(reward_manager.close)
    stack.callback(worker.close)
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
    write(args.json, json.dumps(summary, indent=2) + "\n")
  if args.completions:
    write(args.completions, "".join(json.dumps(row) + "\n" for row in result.rows()))
  for key, value in summary.items():
    if key != "intervals":
      low, high = summary["intervals"].get(key, (None, None))
      interval = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
      text = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
      print(f"{key:<32} {text}{interval}")
  cut_off = 1 - result.sampled.finished.mean()
  if cut_off > MUCH:
    print(
      f"warning: {cut_off:.0%} of the completions were cut off at sampling.max_tokens = "
      f"{config.sampling.max_tokens}, and count as wrong; raise it, with "
      f"--config.sampling.max_tokens={2 * config.sampling.max_tokens} for example"
    )
  return 0
