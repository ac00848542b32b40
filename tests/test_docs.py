"""What the documentation claims: its Python runs, its commands are ones, its fields exist, its links lead somewhere, its site builds."""

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
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FIELDS = flatten(to_dict(Config()))
ENV = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}


def blocks(page, *languages):
  fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
  return [text for language, text in fenced if language in languages]


def commands(page):
  """Every command of ours, as words: in blocks, and those but `gtpo` in passing, where much is left out."""
  lines = "".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
  lines += [
    code for code in inline(page) if code.split()[0] in ("make", "pip", "python") and " " in code
  ]
  split = [
    shlex.split(line, comments=True)
    for line in lines
    if line.split()[:1] in (["gtpo"], ["make"], ["pip"], ["python"])
  ]
  return [words for words in split if words]


def inline(page):
  """Every piece of inline code but those in the first column of a table, where others' names may stand."""
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  return re.findall(r"`([^`\n]+)`", re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.MULTILINE))


def run_blocks(page, namespace, change=lambda block: block):
  for block in blocks(page, "python"):
    exec(compile(change(block), str(page), "exec"), namespace)


@pytest.mark.parametrize(
  ("name", "count"), [("algorithms", 5), ("concepts", 1), ("data", 1), ("rewards", 2)]
)
def test_the_python_of_a_page_runs(name, count):
  """Its blocks in order, in one namespace; they assert what the page says."""
  assert len(blocks(DOCS / f"{name}.md", "python")) >= count
  run_blocks(DOCS / f"{name}.md", {})


@pytest.mark.slow
def test_the_python_of_the_quickstart_runs(tmp_path, monkeypatch):
  """As it stands, but for the numbers that make it long."""
  monkeypatch.chdir(tmp_path)
  smaller = {
    "config.steps = 50": "config.steps = 3\nconfig.batch.prompts, config.batch.group = 8, 4\n"
    "config.eval.problems, config.eval.samples, config.eval.batch = 8, 2, 8",
    "config.warm_start.steps = 1000": "config.warm_start.steps = 8",
  }
  whole = "".join(blocks(DOCS / "quickstart.md", "python"))
  assert all(old in whole for old in smaller)

  def change(block):
    for old, new in smaller.items():
      block = block.replace(old, new)
    return block

  namespace = {}
  run_blocks(DOCS / "quickstart.md", namespace, change)
  assert len(namespace["rewards"]) == 2 and namespace["result"].step == 3
  assert not list(tmp_path.iterdir())  # no file is left


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
  """The one that trains is the quickstart's; the one that needs the hub runs with a folder."""
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
  known = blocks(DOCS / "quickstart.md", "python")
  assert any(block in known for block in blocks(ROOT / "README.md", "python"))
  run_blocks(
    ROOT / "README.md",
    namespace,
    lambda block: "" if block in known else block.replace("Qwen/Qwen2.5-0.5B", "Qwen"),
  )
  assert namespace["adv"].shape == shape and (tmp_path / "out" / "config.json").exists()


@BY_NAME
def test_every_command_is_one(page):
  """`gtpo`: the flags and fields are read by the real parser and the config is made; `make`, `pip`, `python`: what they name exists."""
  extras = set(re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE))
  targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  for words in commands(page):
    program, *rest = words
    if program == "gtpo":
      check_gtpo(rest)
    elif program == "make":
      assert {word for word in rest if "=" not in word} <= targets, words
    elif program == "pip":
      assert {
        extra
        for word in rest
        for found in re.findall(r"\[(.+)\]", word)
        for extra in found.split(",")
      } <= extras, words
    elif rest[0] != "-m":
      assert (ROOT / rest[0]).is_file(), words


def check_gtpo(words):
  args, overrides = cli._parse(words)
  assert {
    override.removeprefix("--config.").split("=")[0] for override in overrides
  } <= FIELDS.keys()
  if getattr(args, "config", None):
    file = "configs/base.py" if args.config == "configs/mine.py" else args.config
    config.load(
      str(ROOT / file), [override for override in overrides if "model.path" not in override]
    )  # the hub is not asked


@BY_NAME
def test_what_is_named_in_passing_exists(page):
  """Inline code: the fields of configs, and the options of commands."""
  sections = {name.split(".")[0] for name in FIELDS if "." in name}
  for code in inline(page):
    named = re.match(r"(?:--config\.)?([a-z_]+(?:\.[a-z_0-9]+)+)(?= ?=|$)", code)
    if named and named[1].split(".")[0] in sections and not named[1].endswith(".py"):
      assert any(name == named[1] or name.startswith(named[1] + ".") for name in FIELDS), code
    if code.startswith("gtpo "):
      words = re.sub(r"\[.*?\]", "", code).replace("...", "x").split()[1:]
      assert words[0] in cli.COMMANDS, code
      try:
        cli._parse(words)
      except UserError as error:
        assert "are required" in str(error), code


@pytest.mark.slow
def test_the_commands_of_the_quickstart_run(tmp_path):
  """From the tiny run to a model of one's own task, in an empty folder, as the page has it, but small."""
  page = DOCS / "quickstart.md"
  tiny = "configs/tiny.py"
  (tmp_path / "configs").mkdir()
  (tmp_path / tiny).write_text((ROOT / tiny).read_text())
  (mine,) = [block for block in blocks(page, "python") if block.startswith("# configs/mine.py")]
  (tmp_path / "configs" / "mine.py").write_text(mine)
  for name in ("train.jsonl", "test.jsonl"):
    (tmp_path / name).write_text("".join(blocks(page, "json")))
  small = [
    "steps=2",
    "batch.prompts=2",
    "batch.group=4",
    "eval.problems=8",
    "eval.samples=2",
    "eval.batch=8",
  ]
  done = []
  for words in commands(page):
    if (
      words[0] == "gtpo"
      and words[1] in ("train", "sample", "eval", "export")
      and not any("0_5b" in word for word in words)
    ):
      more = (
        [*small, *(["warm_start.steps=8"] if f"--config={tiny}" in words else [])]
        if words[1] == "train"
        else []
      )
      call = [sys.executable, "-m", "gtpo_jax", *words[1:], *(f"--config.{item}" for item in more)]
      result = subprocess.run(
        call, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300
      )
      assert result.returncode == 0, (call, result.stderr)
      done.append(words[1])
  assert done == ["train", "sample", "eval", "export", "train", "export", "sample"]
  assert {file.name for file in (tmp_path / "hf").iterdir()} == {"tiny", "mine"}


@pytest.mark.slow
@pytest.mark.parametrize(
  "script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda script: script.name
)
def test_the_options_of_a_benchmark_exist(script):
  """Each option with which some page calls it."""
  named = {
    word.split("=")[0]
    for page in PAGES
    for words in commands(page)
    if words[:2] == ["python", f"benchmarks/{script.name}"]
    for word in words
    if word.startswith("--")
  }
  if named:
    done = subprocess.run(
      [sys.executable, str(script), "--help"],
      cwd=ROOT,
      env=ENV,
      capture_output=True,
      text=True,
      timeout=200,
    )
    assert done.returncode == 0 and all(option in done.stdout for option in named), done.stderr


@BY_NAME
def test_links_lead_somewhere(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if not re.match(r"[a-z]+:|#", target):
      assert (page.parent / target.split("#")[0]).exists(), target


def test_the_page_of_configs_is_as_the_code_has_it():
  spec = importlib.util.spec_from_file_location("make_configs", DOCS / "make_configs.py")
  make_configs = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(make_configs)
  page = make_configs.page()
  assert make_configs.PAGE.read_text() == page, "docs/configs.md is out of date: make docs"
  for name in FIELDS:
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \| \w+ \| `.+?` \| (.+) \|$", page, re.MULTILINE)
    assert len(row) > 5, name


def test_the_site_builds_without_warnings(tmp_path):
  """Links and anchors within it are checked by MkDocs; every public function of the API page is there."""
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
  assert not re.findall(
    r'<(?:script|link)[^>]+(?:src|href)="https?://', page
  )  # nothing is fetched from elsewhere
