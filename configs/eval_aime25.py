r"""AIME 2025: 30 problems, 32 samples at temperature 1 and top-p 0.7, as in DAPO (2503.14476).

    gtpo eval --config=configs/eval_aime25.py --model=Qwen/Qwen2.5-7B-Instruct \
              --json=aime25.json

A base model, with problems from a file of your own:

    gtpo eval --config=configs/eval_aime25.py:base --model=Qwen/Qwen2.5-7B --data=aime25.jsonl

Hardware: one accelerator with 80 GiB of memory for 7B or 16 GiB for 0.5B; with less memory, set a
smaller eval.batch (computed, not tried).
Expected: not run here; no published number for these settings is known.
Prompt: the question and the instruction to reason step by step and box the answer, in the chat
template; `:base` uses plain text. A completion that does not end within sampling.max_tokens is
wrong.
Data: from the hub (`pip install -e '.[data]'`), or --data=FILE with the columns problem and answer.
"""

from gtpo_jax.config import default_config

TEMPLATES = {
  "chat": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
  "base": (
    "Question: {prompt}\n"
    "Answer: Let us think step by step, and put the final answer within \\boxed{}.\n"
  ),
}


def get_config(model="chat"):
  config = default_config()
  config.data.eval = "hf:math-ai/aime25:test"
  config.data.template = TEMPLATES[model]
  config.data.chat = model == "chat"
  config.data.max_prompt_tokens = 1024
  config.sampling.max_tokens = 4096
  config.eval.problems = 30
  config.eval.samples = 32
  config.eval.batch = 6
  config.eval.top_p = 0.7
  # For model folders and hub ids; a run is evaluated in the formats it was trained in.
  config.model.param_dtype = "bfloat16"
  return config
