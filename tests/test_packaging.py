"""What is installed, and what the commands of the documentation leave behind."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gtpo_jax
from gtpo_jax import cli

ROOT = Path(__file__).parents[1]
PAGES = [
  ROOT / "README.md",
  *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "rewards", "own_task")),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """The files that a wheel would contain."""
  folder = tmp_path_factory.mktemp("wheel")
  build = ["build", f"--build-base={folder / 'build'}", f"--build-lib={folder / 'lib'}"]
  info = ["egg_info", f"--egg-base={folder}"]
  done = subprocess.run(
    [sys.executable, "setup.py", "-q", *info, *build],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert done.returncode == 0, done.stderr
  return folder / "lib"


def test_a_wheel_has_every_config(installed, tmp_path):
  names = {file.name for file in (ROOT / "configs").glob("*.py")}
  assert {file.name for file in (installed / "gtpo_jax" / "configs").glob("*.py")} == names
  done = subprocess.run(
    [sys.executable, "-m", "gtpo_jax", "configs"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(installed)},
    capture_output=True,
    text=True,
    timeout=100,
  )
  *lines, last = done.stdout.splitlines()
  assert (done.returncode, done.stderr) == (0, "")
  assert {line.split()[0] for line in lines} == {name.removesuffix(".py") for name in names}
  assert all(len(line.split()) > 3 for line in lines), lines
  assert "gtpo train --config=NAME" in last


def test_a_config_can_be_printed_to_start_from(capsys):
  assert cli.main(["configs", "tiny"]) == 0
  assert capsys.readouterr().out == (ROOT / "configs" / "tiny.py").read_text()


def test_the_version(capsys):
  with pytest.raises(SystemExit):
    cli.main(["--version"])
  assert capsys.readouterr().out == f"gtpo {gtpo_jax.__version__}\n"


def test_no_page_or_message_installs_this_package_by_a_name_on_an_index():
  files = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.split()
  for name in files:
    if name.endswith((".md", ".py", ".sh", ".yaml", ".ipynb")) and not name.startswith("tests/"):
      text = (ROOT / name).read_text(encoding="utf-8")
      assert not re.search(r"pip install[^`\n]*gtpo[_-]jax(?!\[\w*\] @|\S* @|\.git)", text), name


def outputs(page):
  """Yields the files and folders that the commands of a page write, or tell the reader to write."""
  options = (
    r"out|json|completions|workdir|data|config\.data\.(?:train|eval)|config\.warm_start\.data"
  )
  for line in page.read_text().replace("\\\n", " ").splitlines():
    if line.startswith("gtpo "):
      words = " ".join(shlex.split(line, comments=True))
      yield from re.findall(rf"--(?:{options})=(\S+)", words)
      yield from re.findall(r"--config=(configs/mine\.py)", words)
      yield from (f"{name}.py" for name in re.findall(r"\b(my_\w+):\w+", words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_leave_git_clean(page):
  names = {name for name in outputs(page) if not name.startswith(("hf:", "tfds:"))}
  assert names
  for name in names:
    ignored = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=False)
    assert ignored.returncode == 0, name


def test_the_site_is_built_without_torch_and_the_tpu_compiler():
  printed = subprocess.run(
    ["make", "-n", "docs", "VENV=.none"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout
  assert ".[docs]" in printed and "mkdocs build" in printed
  assert "dev" not in printed and "plan" not in printed
