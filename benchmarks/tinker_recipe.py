"""Runs a recipe of tinker-cookbook, unchanged, against a server; in an environment with the recipe.

python benchmarks/tinker_recipe.py RECIPE URL MODEL [--steps=N] [--credit=NAME] [--json=FILE] ...

MODEL is what the server calls the model; the tokenizer is read from a folder of that name in the
current folder, or anywhere. The recipes' data sets are not needed: a few rows take their place.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
RENDERER = "qwen3_instruct"
WORDS = ("tree", "river", "stone", "cloud", "bird", "night", "field", "snow")


def rows(name):
  """Returns rows with the columns of a data set that a recipe reads."""
  rng = random.Random(0)
  say = lambda: " ".join(rng.sample(WORDS, 4))
  turn = lambda role, content: {"role": role, "content": content}
  if "no_robots" in name:
    return [{"messages": [turn("user", say()), turn("assistant", say())]} for _ in range(64)]
  if "gsm8k" in name:
    numbers = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(64)]
    return [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in numbers]
  pairs = []
  for _ in range(64):
    question = f"\n\nHuman: {say()}\n\nAssistant: "
    pairs.append({"chosen": question + say(), "rejected": question + say()})
  return pairs


def offline():
  """Lets `datasets.load_dataset` return the rows."""
  import datasets

  def load(name, *args, split=None, **settings):
    made = datasets.Dataset.from_list(rows(name))
    return made if split else datasets.DatasetDict({"train": made, "test": made})

  datasets.load_dataset = load


def bound_summands(largest):
  """Lets the recipe draw summands from 0 to `largest` instead of 100."""
  from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset

  class Smaller:
    def __init__(self, rng):
      self._rng = rng

    def randint(self, low, high):
      return self._rng.randint(low, min(high, largest + 1))

  make = ArithmeticDataset._make_env_group_builder
  ArithmeticDataset._make_env_group_builder = lambda self, rng: make(self, Smaller(rng))


def math_rl(options, folder, **more):
  """The arithmetic of math_rl; 0.6.1 sends spans, 0.5.8 does not."""
  from tinker_cookbook.recipes.math_rl import train

  bound_summands(options.largest)
  if options.credit:
    more["loss_fn_config"] = {"credit": options.credit}
  config = train.CLIConfig(
    model_name=options.model,
    renderer_name=RENDERER,
    base_url=options.url,
    env="arithmetic",
    group_size=options.group,
    groups_per_batch=options.groups,
    learning_rate=options.rate,
    max_steps=options.steps,
    loss_fn=options.loss,
    log_path=str(folder),
    eval_every=0,
    behavior_if_log_dir_exists="resume",
    **{"save_every": 0, **more},
  )
  asyncio.run(train.cli_main(config))


def math_rl_kl(options, folder):
  """math_rl with a penalty on the divergence from the base model."""
  from tinker_cookbook.rl import train

  inner = train.main

  async def main(config, *args, **settings):
    import chz

    reference = train.KLReferenceConfig(base_model=options.model)
    await inner(chz.replace(config, kl_reference_config=reference), *args, **settings)

  from tinker_cookbook.recipes.math_rl import train as recipe

  recipe.main = main
  math_rl(options, folder, kl_penalty_coef=0.1)


def math_rl_resumed(options, folder):
  """math_rl, half of it; then the same command again, which goes on from its checkpoint."""
  steps = options.steps
  options.steps = max(steps // 2, 1)
  math_rl(options, folder, save_every=1)
  options.steps = steps
  math_rl(options, folder, save_every=1)


def sl_loop(options, folder):
  """The minimal loop of supervised learning."""
  from tinker_cookbook.recipes import sl_loop as recipe

  settings = {"base_url": options.url, "log_path": str(folder), "model_name": options.model}
  recipe.main(
    recipe.Config(**settings, batch_size=8, max_steps=options.steps, save_every=2, max_length=256)
  )


def rl_loop(options, folder):
  """The minimal loop of reinforcement learning."""
  from tinker_cookbook.recipes import rl_loop as recipe

  settings = {"base_url": options.url, "log_path": str(folder), "model_name": options.model}
  more = {"loss_fn": options.loss, "max_steps": options.steps} if _is_new(recipe) else {}
  recipe.main(
    recipe.Config(**settings, batch_size=4, group_size=4, max_tokens=16, save_every=0, **more)
  )


def _is_new(recipe):
  """Whether a recipe can be told its loss and when to end."""
  return hasattr(recipe.Config, "loss_fn")


def dpo(options, folder):
  """Direct preference optimisation, a loss that runs in the client."""
  from tinker_cookbook.recipes.preference.dpo import train

  train.cli_main(
    train.CLIConfig(
      model_name=options.model,
      renderer_name=RENDERER,
      base_url=options.url,
      log_path=str(folder),
      batch_size=8,
      max_length=256,
      max_steps=options.steps,
      behavior_if_log_dir_exists="delete",
    )
  )


RECIPES = {x.__name__: x for x in (math_rl, math_rl_kl, math_rl_resumed, sl_loop, rl_loop, dpo)}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("recipe", choices=RECIPES)
  parser.add_argument("url")
  parser.add_argument("model")
  parser.add_argument("--steps", type=int, default=4)
  parser.add_argument("--group", type=int, default=4)
  parser.add_argument("--groups", type=int, default=8)
  parser.add_argument("--rate", type=float, default=1e-4)
  parser.add_argument("--loss", default="importance_sampling")
  parser.add_argument("--credit", default="")
  parser.add_argument("--largest", type=int, default=100, help="summand of math_rl")
  parser.add_argument("--json", type=Path)
  options = parser.parse_args()
  folder = Path(tempfile.mkdtemp())
  offline()
  steps = options.steps
  began = time.perf_counter()
  RECIPES[options.recipe](options, folder)
  seconds = time.perf_counter() - began
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  found = {
    "recipe": options.recipe,
    "cookbook": importlib.metadata.version("tinker-cookbook"),
    "client": importlib.metadata.version("tinker"),
    "steps": steps,
    "seconds": seconds,
    "metrics": [json.loads(line) for line in lines],
  }
  if options.json:
    options.json.write_text(json.dumps(found) + "\n")
  print(f"{options.recipe} of tinker-cookbook {found['cookbook']}: {len(lines)} lines of metrics")


if __name__ == "__main__":
  main()
