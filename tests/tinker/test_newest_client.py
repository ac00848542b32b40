"""The newest client of PyPI, in an environment of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from live import options_for, running


@pytest.mark.manual
def test_the_newest_client_works(model, tmp_path):
  subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
  python = tmp_path / "venv" / "bin" / "python"
  subprocess.run([python, "-m", "pip", "install", "--quiet", "tinker"], check=True)
  script = Path(__file__).parent / "client_check.py"
  with running(options_for(model, tmp_path / "workdir")) as (url, _):
    done = subprocess.run([python, script, url, "tiny"], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "it works" in done.stdout
