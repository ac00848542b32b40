"""AIME 2024: 30 problems, 32 samples each at temperature 1 and top-p 0.7, as DAPO (2503.14476) evaluates.

    gtpo eval --config=configs/eval_aime24.py --model=Qwen/Qwen2.5-7B-Instruct --json=aime24.json
    gtpo eval --config=configs/eval_aime24.py:base --model=Qwen/Qwen2.5-7B --data=aime24.jsonl   # a base model; a file of your own

Hardware: one accelerator of 80 GiB for 7B, 16 GiB for 0.5B, or a smaller eval.batch (computed, not tried).
Expected: not run here; 2508.04349 reports mean@32 34.2 %, pass@4 48.0 %,
pass@32 64.9 % for a 7B trained by GTPO, 28.4 / 36.2 / 46.0 % by GRPO.
Prompt: the question, then the wish to reason step by step and to box the answer, through the chat template;
`:base` puts bare text. An answer that does not end within sampling.max_tokens is wrong.
Data: from the hub (`pip install -e '.[data]'`), or --data=FILE with the columns problem and answer.
"""

from gtpo_jax.config import default_config

TEMPLATES = {
  "chat": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
  "base": "Question: {prompt}\nAnswer: Let us think step by step, and put the final answer within \\boxed{}.\n",
}


def get_config(model="chat"):
  config = default_config()
  config.data.eval = "hf:HuggingFaceH4/aime_2024:train"
  config.data.template = TEMPLATES[model]
  config.data.chat = model == "chat"
  config.data.max_prompt_tokens = 1024
  config.sampling.max_tokens = 4096
  config.eval.problems = 30
  config.eval.samples = 32
  config.eval.batch = 6
  config.eval.top_p = 0.7
  config.model.param_dtype = config.model.compute_dtype = (
    "bfloat16"  # of a model folder; a run has its own
  )
  return config
