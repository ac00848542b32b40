"""Writes a tokenizer in a form that Transformers 4 and 5, and the programs built on them, read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from etils import epath

from gtpo_jax.runtime.paths import is_remote, list_files

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

CONFIG = "tokenizer_config.json"
# Arguments of the call that loaded the tokenizer, which Transformers 5 writes too.
NEW_CLASS, CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
LOADING_ARGUMENTS = ("backend", "is_local", "local_files_only")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: epath.Path) -> None:
  """Writes the tokenizer's files to the folder `out`.

  Transformers 5 writes the special tokens without a role of their own as a list named
  `extra_special_tokens`. Transformers 4 expects an object there and fails. Both versions read the
  older name, `additional_special_tokens`. Likewise, Transformers 5 gives the general class of
  tokenizers, which Llama 3 has, a name that Transformers 4 does not know.
  """
  with tempfile.TemporaryDirectory(prefix="gtpo_") as folder:
    _save_locally(tokenizer, Path(folder))
    for name in list_files(epath.Path(folder)):
      if not is_remote(out):
        (out / name).parent.mkdir(exist_ok=True)
      (out / name).write_bytes((Path(folder) / name).read_bytes())


def _save_locally(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
  tokenizer.save_pretrained(out)
  file = out / CONFIG
  values = json.loads(file.read_text(encoding="utf-8"))
  for name in LOADING_ARGUMENTS:
    values.pop(name, None)
  if values.get("tokenizer_class") == NEW_CLASS:
    values["tokenizer_class"] = CLASS_OF_BOTH
  if isinstance(values.get("extra_special_tokens"), list):
    values["additional_special_tokens"] = values.pop("extra_special_tokens")
  text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
  file.write_text(text + "\n", encoding="utf-8")
