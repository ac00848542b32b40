r"""GSM8K: the 1,319 word problems of the test split; mean@4, pass@k, maj@4 and greedy.

    gtpo eval --config=configs/eval_gsm8k.py --model=Qwen/Qwen2.5-7B-Instruct \
              --json=gsm8k.json

A base model, with problems from a file of your own:

    gtpo eval --config=configs/eval_gsm8k.py:base --model=Qwen/Qwen2.5-7B --data=gsm8k.jsonl

Hardware: one accelerator with 80 GiB of memory for 7B or 16 GiB for 0.5B; with less memory, set a
smaller eval.batch (computed, not tried).
Expected: not run here. Qwen's report gives 91.6 % for 7B-Instruct and 49.6 % for 0.5B-Instruct
(greedy).
Prompt: the question and the instruction to reason step by step and box the answer, in the chat
template; `:base` uses plain text. A completion that does not end within sampling.max_tokens is
wrong.
Data: from the hub (`pip install -e '.[data]'`), or --data=FILE with the columns question and
answer.
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
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.template = TEMPLATES[model]
  config.data.chat = model == "chat"
  config.data.max_prompt_tokens = 512
  config.sampling.max_tokens = 1024
  config.eval.problems = 1319
  config.eval.samples = 4
  config.eval.batch = 64
  # For model folders and hub ids; a run is evaluated in the formats it was trained in.
  config.model.param_dtype = "bfloat16"
  return config
