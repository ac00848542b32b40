"""Trains the small Qwen2-style tokenizer in `gtpo_jax/data/tokenizer`.

    python benchmarks/train_tokenizer.py [OUT_DIR]

It follows Qwen2's scheme at a small size: NFC, its splitting pattern (each digit is one token),
byte-level BPE, and the three ChatML control tokens. The result depends only on this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

from gtpo_jax.data.chat import TOKENIZER_DIR

VOCAB_SIZE = 384  # 256 bytes, 125 merges, 3 control tokens: a multiple of 128
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tools are listed by name and parameters, so that prompts stay short. Their descriptions are left
# out: a model of this size learns from a warm start what they do.
CHAT_TEMPLATE = (
  "{% if tools %}{{ '<|im_start|>tools\n<tool_call>' }}{% for tool in tools %}"
  "{{ ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(',') + ')' }}"
  "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
  "system",
  "user",
  "assistant",
  "You are a helpful assistant.",
  "Add the numbers from left to right and write every step.",
  "Reach the target with the given numbers, each used once.",
  "Use each number exactly once with plus, minus and times.",
  "The answer is the last number.",
  "Answer:",
  "Let us think step by step.",
  "What is the sum of these numbers?",
  "Write an expression that equals the target.",
  "make",
  "from",
  "with",
  "total",
  "result",
  "question",
  "problem",
  "solution",
  "because",
  "therefore",
  "and then",
  "the first",
  "the second",
  "there are",
  "how many",
  "in all",
]


def train() -> Tokenizer:
  """Returns a tokenizer trained on CORPUS."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB_SIZE - len(CONTROL),
    min_frequency=1,
    show_progress=False,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  tokenizer.add_special_tokens(
    [AddedToken(token, special=True, normalized=False) for token in CONTROL]
  )
  return tokenizer


def main(out: Path) -> None:
  """Trains the tokenizer and writes it to the folder `out`."""
  out.mkdir(parents=True, exist_ok=True)
  tokenizer = train()
  tokenizer.save(str(out / "tokenizer.json"), pretty=False)
  config = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_prefix_space": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "model_max_length": 32768,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
  }
  (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
  print(f"{tokenizer.get_vocab_size()} tokens in {out}")


if __name__ == "__main__":
  main(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_DIR)
