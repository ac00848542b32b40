"""`benchmarks/accelerator.py --card` on this machine's CPU, with small sizes."""

import subprocess
import sys

import pytest
from command_line import ROOT, environment


@pytest.mark.manual
def test_one_command_measures_a_card(tmp_path):
  folder = tmp_path / "card"
  options = {
    "--card": folder,
    "--presets": "tiny",
    "--prompts": 4,
    "--group": 4,
    "--prompt_tokens": 24,
    "--tokens": 32,
    "--flops": 4e11,
    "--bandwidth": 2e10,
    "--base": "tiny",
    "--quantize": "int8",
  }
  command = [sys.executable, "benchmarks/accelerator.py"]
  command += [str(x) for option in options.items() for x in option]
  subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=600)
  lines = (folder / "table.md").read_text().splitlines()
  rows = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
  assert len(rows) == 5, lines
  assert rows[0][0] == "| tiny, sampling, 16 slots" and "% of the floor" in rows[0][1]
  assert rows[3][1].startswith("all ") and rows[3][1].endswith(" metrics equal |")
  assert rows[4][1].startswith("steps of ")
