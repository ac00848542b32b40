"""Tests that the Python of the documentation runs, and that what it refers to exists.

This covers commands, config fields, files and links. The site must build without warnings.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gtpo_jax import cli, config
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "launch" / "README.md"])
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FIELDS = flatten(to_dict(Config()))
ENV = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}


def blocks(page, *languages):
  """Returns the fenced blocks of `page` that are marked with one of `languages`."""
  fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
  return [text for language, text in fenced if language in languages]


def commands(page):
  """Returns every `gtpo`, `make`, `pip` and `python` command of `page`, split into arguments.

  All commands in blocks count. Inline `gtpo` commands may be abbreviated, so they do not count.
  """
  lines = "".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
  lines += [
    code for code in inline(page) if code.split()[0] in ("make", "pip", "python") and " " in code
  ]
  ours = [line for line in lines if line.split()[:1] in (["gtpo"], ["make"], ["pip"], ["python"])]
  return [shlex.split(line, comments=True) for line in ours]


def inline(page):
  """Returns the inline code of `page`.

  Skips the first column of tables, which may contain names from other libraries.
  """
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  return re.findall(r"`([^`\n]+)`", re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.MULTILINE))


def run_blocks(page, namespace, change=lambda block: block):
  """Runs the Python blocks of `page` in order, in one namespace, after `change` edits them."""
  for block in blocks(page, "python"):
    exec(compile(change(block), str(page), "exec"), namespace)


@pytest.mark.parametrize(
  ("name", "count"), [("algorithms", 5), ("concepts", 1), ("data", 1), ("rewards", 2)]
)
def test_the_python_of_a_page_runs(name, count):
  """The blocks contain asserts of the claims on the page."""
  assert len(blocks(DOCS / f"{name}.md", "python")) >= count
  run_blocks(DOCS / f"{name}.md", {})


@pytest.mark.slow
def test_the_python_of_the_quickstart_runs(tmp_path, monkeypatch):
  """Only numbers that make the Python slow are changed."""
  monkeypatch.chdir(tmp_path)
  smaller = {
    "config.steps = 50": "config.steps = 3\nconfig.batch.prompts, config.batch.group = 8, 4\n"
    "config.eval.problems, config.eval.samples, config.eval.batch = 8, 2, 8",
    "config.warm_start.steps = 1000": "config.warm_start.steps = 8",
  }
  source = "".join(blocks(DOCS / "quickstart.md", "python"))
  assert all(old in source for old in smaller)

  def change(block):
    for old, new in smaller.items():
      block = block.replace(old, new)
    return block

  namespace = {}
  run_blocks(DOCS / "quickstart.md", namespace, change)
  assert len(namespace["rewards"]) == 2 and namespace["result"].step == 3
  assert not list(tmp_path.iterdir())  # no file is left behind


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
  """The block that trains is tested with the quickstart; the hub id is replaced with a folder."""
  import jax

  from gtpo_jax import models
  from gtpo_jax.runtime.mesh import single_device_mesh

  shape = (2, 4, 3)
  rng = np.random.default_rng(0)
  namespace = {
    "H": rng.random(shape, np.float32),
    "m": np.ones(shape, bool),
    "c": np.tile([True, False], (2, 2)),
    "r": np.ones(shape[:2], np.float32),
    "lp": np.float32(-rng.random(shape)),
    "lp0": np.float32(-rng.random(shape)),
  }
  model = models.Qwen2(models.PRESETS["tiny"], single_device_mesh())
  models.save(model, models.init_params(model, jax.random.key(0)), None, tmp_path / "Qwen")
  namespace |= {"tokens": np.ones((1, 4), np.int32), "tokenizer": None}
  monkeypatch.chdir(tmp_path)
  quickstart = blocks(DOCS / "quickstart.md", "python")
  assert any(block in quickstart for block in blocks(ROOT / "README.md", "python"))
  run_blocks(
    ROOT / "README.md",
    namespace,
    lambda block: "" if block in quickstart else block.replace("Qwen/Qwen2.5-0.5B", "Qwen"),
  )
  assert namespace["adv"].shape == shape and (tmp_path / "out" / "config.json").exists()


@EVERY_PAGE
def test_every_command_is_valid(page):
  """The parser accepts `gtpo` commands; targets, extras and scripts of other commands exist."""
  extras = set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE))
  targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  assert "dev" in extras and "test" in targets
  for program, *arguments in commands(page):
    if program == "gtpo":
      check_gtpo(arguments)
    elif program == "make":
      assert {target for target in arguments if "=" not in target} <= targets, arguments
    elif program == "pip":
      named = re.findall(r"\[(.+?)\]", " ".join(arguments))
      assert set(",".join(named).split(",")) <= extras | {""}, arguments
    elif arguments[0] != "-m":
      assert (ROOT / arguments[0]).is_file(), arguments


def check_gtpo(arguments):
  """Checks flags and fields of a `gtpo` command and builds its config, without asking the hub."""
  args, overrides = cli.parse(arguments)
  named = {override.removeprefix("--config.").split("=")[0] for override in overrides}
  assert named <= FIELDS.keys()
  if getattr(args, "config", None):
    file = "configs/base.py" if args.config == "configs/mine.py" else args.config
    offline = [override for override in overrides if "model.path" not in override]
    config.load(str(ROOT / file), offline)


@EVERY_PAGE
def test_inline_code_names_what_exists(page):
  """Checks config fields, options of commands, and Python files."""
  sections = {name.split(".")[0] for name in FIELDS if "." in name}
  for code in inline(page):
    named = re.match(r"(?:--config\.)?([a-z_]+(?:\.[a-z_0-9]+)+)(?= ?=|$)", code)
    if named and named[1].split(".")[0] in sections and not named[1].endswith(".py"):
      assert any(name == named[1] or name.startswith(named[1] + ".") for name in FIELDS), code
    if re.fullmatch(r"\w+/[\w/]+\.py", code) and code != "configs/mine.py":
      assert (ROOT / code).is_file() or (ROOT / "gtpo_jax" / code).is_file(), code
    if code.startswith("gtpo "):
      arguments = re.sub(r"\[.*?\]", "", code).replace("...", "x").split()[1:]
      assert arguments[0] in cli.COMMANDS, code
      try:
        cli.parse(arguments)
      except UserError as error:
        assert "are required" in str(error), code


@pytest.mark.slow
def test_the_commands_of_the_quickstart_run(tmp_path):
  """Runs all commands at a small size in an empty folder, from the tiny run to a custom task."""
  page = DOCS / "quickstart.md"
  tiny = "configs/tiny.py"
  (tmp_path / "configs").mkdir()
  (tmp_path / tiny).write_text((ROOT / tiny).read_text())
  (mine,) = [block for block in blocks(page, "python") if block.startswith("# configs/mine.py")]
  (tmp_path / "configs" / "mine.py").write_text(mine)
  for name in ("train.jsonl", "test.jsonl"):
    (tmp_path / name).write_text("".join(blocks(page, "json")))
  small = ["steps=2", "batch.prompts=2", "batch.group=4"]
  small += ["eval.problems=8", "eval.samples=2", "eval.batch=8"]
  done = []
  for program, *arguments in commands(page):
    if program != "gtpo" or any("0_5b" in argument for argument in arguments):
      continue
    if arguments[0] not in ("train", "sample", "eval", "export"):
      continue
    fields = small if arguments[0] == "train" else []
    if f"--config={tiny}" in arguments:
      fields = [*fields, "warm_start.steps=8"]
    overrides = [f"--config.{field}" for field in fields]
    call = [sys.executable, "-m", "gtpo_jax", *arguments, *overrides]
    result = subprocess.run(
      call, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, (call, result.stderr)
    done.append(arguments[0])
  assert done == ["train", "sample", "eval", "export", "train", "export", "sample"]
  assert {file.name for file in (tmp_path / "hf").iterdir()} == {"tiny", "mine"}


@pytest.mark.slow
@pytest.mark.parametrize(
  "script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda script: script.name
)
def test_the_options_of_a_benchmark_exist(script):
  """Every option that a page passes to the script is in its --help."""
  calls = [call for page in PAGES for call in commands(page)]
  options = {
    argument.split("=")[0]
    for call in calls
    if call[:2] == ["python", f"benchmarks/{script.name}"]
    for argument in call
    if argument.startswith("--")
  }
  if not options:
    return
  call = [sys.executable, str(script), "--help"]
  done = subprocess.run(call, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=200)
  assert done.returncode == 0 and all(option in done.stdout for option in options), done.stderr


@EVERY_PAGE
def test_links_to_files_exist(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if not re.match(r"[a-z]+:|#", target):
      assert (page.parent / target.split("#")[0]).exists(), target


def test_the_page_of_configs_is_up_to_date():
  spec = importlib.util.spec_from_file_location("make_configs", DOCS / "make_configs.py")
  make_configs = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(make_configs)
  page = make_configs.page()
  assert make_configs.PAGE.read_text() == page, "docs/configs.md is out of date: make docs"
  for name in FIELDS:
    pattern = rf"^\| `{re.escape(name)}` \| \w+ \| (?:`.+?`|-) \| (.+) \|$"
    (meaning,) = re.findall(pattern, page, re.MULTILINE)
    assert len(meaning) > 5, name


def test_the_site_builds_without_warnings(tmp_path):
  """MkDocs checks links and anchors; the API page contains every function that it names."""
  pytest.importorskip("mkdocstrings")
  done = subprocess.run(
    [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
    cwd=ROOT,
    env={**ENV, "NO_MKDOCS_2_WARNING": "1"},
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
  page = (tmp_path / "site" / "api" / "index.html").read_text()
  for name in re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.MULTILINE):
    assert f'id="{name}"' in page, name
  assert "held_out" in page and "Raises" in page
  # The page loads nothing from other sites.
  assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://', page)
