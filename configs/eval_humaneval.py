r"""HumanEval: 164 functions, checked by their tests in a sandbox.

Reports pass@k from 16 samples at temperature 0.8 and top-p 0.95.

    gtpo eval --config=configs/eval_humaneval.py --model=Qwen/Qwen2.5-7B-Instruct \
              --json=humaneval.json

A base model, with problems from a file of your own:

    gtpo eval --config=configs/eval_humaneval.py:base --model=Qwen/Qwen2.5-7B --data=humaneval.jsonl

Hardware: one accelerator with 80 GiB of memory for 7B or 16 GiB for 0.5B; with less memory, set a
smaller eval.batch (computed, not tried). The sandbox needs bubblewrap.
Expected: not run here. Qwen's report gives 84.8 % for 7B-Instruct and 35.4 % for 0.5B-Instruct
(greedy).
Prompt: the beginning of the function in a Python block and the instruction to complete it, in the
chat template; `:base` uses only the beginning. A completion that does not end within
sampling.max_tokens is wrong.
Data: from the hub (`pip install -e '.[data]'`), or --data=FILE with the columns task_id, prompt,
test, entry_point.
"""

from gtpo_jax.config import default_config

TEMPLATES = {
  "chat": (
    "Complete this Python function. Answer with the whole function in one block of Python.\n\n"
    "```python\n{prompt}\n```"
  ),
  "base": "{prompt}",
}


def get_config(model="chat"):
  config = default_config()
  config.data.eval = "hf:openai/openai_humaneval:test"
  config.data.template = TEMPLATES[model]
  config.data.chat = model == "chat"
  config.data.max_prompt_tokens = 1024
  config.sampling.max_tokens = 1024
  config.eval.problems = 164
  config.eval.samples = 16
  config.eval.batch = 16
  config.eval.temperature = 0.8
  config.eval.top_p = 0.95
  # For model folders and hub ids; a run is evaluated in the formats it was trained in.
  config.model.param_dtype = "bfloat16"
  return config
