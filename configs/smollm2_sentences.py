"""SmolLM2-135M-Instruct, a pretrained model, learns to follow an instruction on a laptop's CPU.

    make real
    gtpo train --config=configs/smollm2_sentences.py --workdir=runs/real
    gtpo train --config=configs/smollm2_sentences.py:lora --workdir=runs/real_lora

The instruction is of the form "Write one short sentence about a whale. Use the word rope in it."
Whether a sentence obeys is checked by a rule: one sentence of 6 to 20 words with both words,
neither quoted nor talked about. The problems are generated, so the model is the only download: 270
MB from the hub. The environment variable GTPO_SMOLLM2 names a folder to use instead.

Hardware: two CPU cores with bfloat16 units and 7 GB of memory, four minutes (longer in float32). On
an accelerator, use a larger model.
Expected (seeds 0 to 2): held-out pass@1 rises from 7-9 % to 91-96 %, and greedy from 38 % to
97-98 %. `:lora`, which trains only adapters of rank 32, reaches 98 % (seed 0). docs/real_model.md
has the numbers, and texts.
"""

import os

from gtpo_jax.config import default_config

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def get_config(variant=""):
  config = default_config()
  config.steps = 20
  config.model.path = os.environ.get("GTPO_SMOLLM2") or HUB_ID
  config.data.train = "sentences"
  config.data.max_prompt_tokens = 64
  config.sampling.max_tokens = 32
  config.batch.prompts = 8
  config.batch.group = 8
  config.algorithm.name = "gtpo"
  config.optimizer.learning_rate = 2e-5
  config.eval.every = 5
  config.eval.problems = 64
  config.eval.samples = 4
  if variant == "lora":
    config.model.lora_rank = 32
    config.optimizer.learning_rate = 5e-4
  elif variant:
    raise ValueError(f"the variant of smollm2_sentences must be lora or empty, got {variant!r}")
  return config
