"""Writes a tokenizer in a form that Transformers 4 and 5, and the programs built on them, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

CONFIG = "tokenizer_config.json"
# Arguments of the call that loaded the tokenizer, which Transformers 5 writes too.
LOADING_ARGUMENTS = ("backend", "is_local", "local_files_only")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
  """Writes the tokenizer's files to the folder `out`.

  Transformers 5 writes the special tokens without a role of their own as a list named
  `extra_special_tokens`. Transformers 4 expects an object there and fails. Both versions read the
  older name, `additional_special_tokens`.
  """
  tokenizer.save_pretrained(out)
  file = out / CONFIG
  values = json.loads(file.read_text(encoding="utf-8"))
  for name in LOADING_ARGUMENTS:
    values.pop(name, None)
  if isinstance(values.get("extra_special_tokens"), list):
    values["additional_special_tokens"] = values.pop("extra_special_tokens")
  text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
  file.write_text(text + "\n", encoding="utf-8")
