"""Tests that the Python of the documentation runs, and that what it refers to exists.

This covers commands, config fields, files and links. The site must build without warnings.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import command_line
import numpy as np
import pytest
from judge_server import serving
from toys import save_llama

from gtpo_jax import cli, config
from gtpo_jax.algorithms import OBJECTIVES, RECIPES
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.data.chat import load_chat
from gtpo_jax.rewards.judge.judge import Judge
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.requests import ChatRequest, checked, parse_object

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "launch" / "README.md"])
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FIELDS = flatten(to_dict(Config()))
ENV = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}


def blocks(page, *languages):
  """Returns the fenced blocks of `page` that are marked with one of `languages`."""
  pattern = r"^( *)```(\w*)\n(.*?)^\1```$"
  fenced = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
  return [textwrap.dedent(text) for _, language, text in fenced if language in languages]


PROGRAMS = r"(?:[A-Z_]+=\S* +)*(?:gtpo|make|pip|python|docker|gcloud|sbatch|launch/\S+) "


def shell_lines(page):
  """Returns every command in the blocks of `page`, split into arguments."""
  lines = "".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
  return [shlex.split(line, comments=True) for line in lines if re.match(PROGRAMS, line)]


def without_variables(words):
  """Returns a command without the environment variables that are set before it."""
  return list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))


def commands(page):
  """Returns every `gtpo`, `make`, `pip` and `python` command of `page`, split into arguments.

  All commands in blocks count. Inline `gtpo` commands may be abbreviated, so they do not count.
  """
  found = [without_variables(words) for words in shell_lines(page)]
  found += [
    shlex.split(code, comments=True)
    for code in inline(page)
    if code.split()[0] in ("make", "pip", "python") and " " in code
  ]
  return [words for words in found if words and words[0] in ("gtpo", "make", "pip", "python")]


def inline(page):
  """Returns the inline code of `page`.

  Skips the first column of tables, which may contain names from other libraries.
  """
  text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  return re.findall(r"`([^`\n]+)`", re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.MULTILINE))


def run_blocks(page, namespace, change=lambda block: block):
  """Runs the Python blocks of `page` in order, in one namespace, after `change` edits them."""
  for block in blocks(page, "python"):
    exec(compile(change(block), str(page), "exec"), namespace)


@pytest.mark.parametrize(
  ("name", "count"),
  [
    pytest.param("algorithms", 1, marks=pytest.mark.slow),
    ("data", 1),
    ("episodes", 4),
    ("rewards", 3),
    ("from_trl", 2),
    ("own_task", 3),
  ],
)
def test_the_python_of_a_page_runs(name, count, tmp_path, monkeypatch):
  """The blocks contain asserts of the claims on the page. A config in them is valid."""
  assert len(blocks(DOCS / f"{name}.md", "python")) >= count
  monkeypatch.chdir(tmp_path)
  namespace = {}
  run_blocks(DOCS / f"{name}.md", namespace)
  if "get_config" in namespace:
    values = namespace["get_config"]()
    values.model.path = ""  # the model is on the hub
    assert config.freeze(values).data.train == "train.jsonl"


def test_the_functions_ported_from_trl_score_as_the_script_does():
  page = DOCS / "from_trl.md"
  (script,) = blocks(page, "py")
  functions = script[script.index("def reward_len") : script.index("config = GRPOConfig")]
  trl, ours = {}, {}
  exec(functions, trl)
  exec(blocks(page, "python")[0], ours)
  completions = ["so it is 120", "no"]
  answers = ["120"] * 2
  targets = [200, 100]
  extras = [{"target": target} for target in targets]
  prompts = ["How many minutes are 2 hours?"] * 2
  assert ours["length"](prompts, completions, answers, extras) == trl["reward_len"](
    completions, target=targets
  )
  assert ours["correct"](prompts, completions, answers, extras) == [True, False]
  assert trl["reward_correct"](completions, answer=answers) == [1.0, 0.0]
  # Every numbered line has its counterpart, in the functions, the config or the text.
  numbers = re.findall(r"# (\d+)$", script, re.MULTILINE)
  assert numbers == [str(i) for i in range(1, 22)]
  ported = re.findall(r"# (\d+)", "".join(blocks(page, "python")))
  text = page.read_text().split("The first command is")[1].split("## ")[0]
  assert {*ported, *re.findall(r"\d+", text)} == {*numbers}


def test_the_judge_of_the_rewards_page_grades():
  grades = iter(["Grade: 5", "Good.\nGrade: 3"])
  namespace = {}
  run_blocks(DOCS / "rewards.md", namespace)
  with serving(lambda message, count: next(grades)) as server:
    namespace["judge"].base_url = server.url
    section = config.freeze(namespace["config"]).reward.judge
    with contextlib.closing(Judge(section)) as judge:
      (reward,) = judge.grade(["a long text"], ["its summary"], ["a better one"])
    assert reward == 0.75 >= section.threshold  # the mean of 1 and 0.5
    faithful, short = sorted(server.messages)[::-1]
  assert faithful.startswith(
    "You grade summaries. Is the summary faithful to the text?\n\nText: a l"
  )
  assert short.startswith("You grade summaries. Is it at most two sentences long?")
  mark = re.search(r"two lines (\w{16})\.", short)[1]
  assert f"\n{mark}\nits summary\n{mark}\n" in short and "A good summary: a better one" in short


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


@pytest.mark.slow
def test_the_python_of_the_readme_trains(tmp_path, monkeypatch):
  """A model with random weights takes the place of the published one, and trains for two steps."""
  monkeypatch.chdir(tmp_path)
  save_llama(tmp_path / "small", load_chat().tokenizer)
  (block,) = blocks(ROOT / "README.md", "python")
  for old, new in {
    "HuggingFaceTB/SmolLM2-135M-Instruct": str(tmp_path / "small"),
    "sampling.max_tokens = 64, 32": "sampling.max_tokens = 48, 16",
    "config.steps, config.batch.prompts, config.batch.group = 20, 8, 8": "config.eval.samples = 2\n"
    "config.steps, config.batch.prompts, config.batch.group = 2, 8, 4",
  }.items():
    assert old in block
    block = block.replace(old, new)
  namespace = {}
  exec(compile(block, "README.md", "exec"), namespace)
  assert namespace["result"].step == 2


def test_the_python_of_short_pages_runs(tmp_path, monkeypatch):
  """The hub id is replaced with a folder."""
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
  model = models.Transformer(models.PRESETS["tiny"], single_device_mesh())
  models.save(model, models.init_params(model, jax.random.key(0)), None, tmp_path / "Qwen")
  namespace |= {"tokens": np.ones((1, 4), np.int32), "tokenizer": None}
  monkeypatch.chdir(tmp_path)
  for page in (DOCS / "reference.md", DOCS / "models.md"):
    run_blocks(page, namespace, lambda block: block.replace("Qwen/Qwen2.5-0.5B", "Qwen"))
  assert namespace["adv"].shape == shape and (tmp_path / "out" / "config.json").exists()


@EVERY_PAGE
def test_every_command_is_valid(page):
  """The parser accepts `gtpo` commands; targets, extras and scripts of other commands exist."""
  extras = set(re.findall(r'^    "([\w-]+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE))
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
def test_commands_that_rent_and_launch_are_valid(page):
  """Checks `launch/` scripts with their variables, `docker`, and the flags of `gcloud`."""
  for words in shell_lines(page):
    variables = dict(word.split("=", 1) for word in words[: -len(without_variables(words)) or None])
    program, *arguments = without_variables(words) or [""]
    script = next((word for word in words if word.startswith("launch/")), "")
    if script.endswith(".sh"):
      text = (ROOT / script).read_text()
      assert all(re.search(rf"\b{name}\b", text) for name in variables), variables
      required = set(re.findall(r"\$\{(\w+):\?", text))
      assert required <= variables.keys(), required - variables.keys()
      overrides = [word for word in arguments if word.startswith("--config.")]
      check_gtpo(
        [
          "train",
          f"--config={variables['CONFIG']}",
          f"--workdir={variables['WORKDIR']}",
          *overrides,
        ]
      )
    elif program == "docker" and arguments[0] == "build":
      assert "--build-arg" in arguments and (ROOT / arguments[arguments.index("-f") + 1]).is_file()
    elif program == "gcloud":
      assert arguments[:2] == ["compute", "tpus"], words
      assert re.fullmatch(r"tpu-vm|queued-resources", arguments[2])
      assert arguments[3] in ("create", "ssh", "delete") and arguments[4] == "gtpo"
      names = {word.split("=")[0] for word in arguments[5:]}
      assert names <= GCLOUD_FLAGS[arguments[3]] and "--zone" in names, words


GCLOUD_FLAGS = {
  "create": {"--zone", "--accelerator-type", "--version"},
  "ssh": {"--zone", "--worker", "--command"},
  "delete": {"--zone", "--force"},
}


def test_the_requests_to_servers_are_json():
  text = (DOCS / "serving.md").read_text()
  own, vllm = map(json.loads, re.findall(r"-d '(\{.*?\})'", text, re.DOTALL))
  assert vllm["messages"][0]["role"] == "user"
  del own["model"]
  body = parse_object(json.dumps(own).encode())
  assert checked(ChatRequest, body).messages == own["messages"]


def test_every_algorithm_and_objective_has_a_line():
  for page, title, names in (
    ("choosing.md", "All algorithms", RECIPES),
    ("algorithms.md", "Objectives", OBJECTIVES),
  ):
    sections = (DOCS / page).read_text().split("\n## ")
    (section,) = [text for text in sections if text.startswith(title)]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert len(tables) == 1  # an empty line would end it
    first_cells = re.findall(r"^\|([^|]+)\|", tables[0], re.MULTILINE)
    listed = [name for cell in first_cells[1:] for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(names)
  counted = f"{len(RECIPES)} algorithms, {len(OBJECTIVES)} objectives"
  assert counted in (ROOT / "README.md").read_text()


def test_the_table_of_contrast_is_right():
  """A group of g completions, each right with probability p, has contrast so often."""
  rows = re.findall(r"^\| (\d+) % \|(.+)\|$", (DOCS / "choosing.md").read_text(), re.MULTILINE)
  assert len(rows) == 6
  for percent, cells in rows:
    p = int(percent) / 100
    expected = [round(100 * (1 - p**g - (1 - p) ** g)) for g in (4, 8, 16, 32)]
    assert [int(cell.strip(" %")) for cell in cells.split("|")] == expected


def test_every_page_has_one_name():
  """The navigation, the heading and the links to a page use the same name, except for Home."""
  nav = re.findall(r"- (.+): (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
  names = {file: name for name, file in nav}
  assert names["index.md"] == "Home"
  names["index.md"] = "gtpo_jax"
  headings = {file.name: file.read_text().splitlines()[0] for file in DOCS.glob("*.md")}
  headings["launching.md"] = (ROOT / "launch" / "README.md").read_text().splitlines()[0]
  assert {file: f"# {name}" for file, name in names.items()} == headings
  for page in (ROOT / "README.md", DOCS / "index.md"):
    for text, target in re.findall(r"\[([^\]`!]+)\]\((?:docs/)?(\w+\.md)\)", page.read_text()):
      if target in names:
        assert " ".join(text.split()) == names[target], (page.name, text)


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


def run_gtpo(arguments, fields, folder):
  """Runs a `gtpo` command with further config fields. It must succeed; returns its output."""
  call = command_line.quick_command_line(*arguments, *(f"--config.{field}" for field in fields))
  variables = command_line.environment()
  done = subprocess.run(
    call, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, (call, done.stderr)
  return done.stdout


SMALL = ("steps=2", "batch.prompts=2", "batch.group=4", "batch.micro_batches=1")
SMALL += ("eval.problems=8", "eval.samples=2", "eval.batch=8")


def folder_with_configs(folder):
  (folder / "configs").mkdir()
  for name in ("tiny", "base"):
    (folder / f"configs/{name}.py").write_text((ROOT / f"configs/{name}.py").read_text())
  return folder


@pytest.mark.manual
def test_the_commands_of_the_quickstart_run(tmp_path):
  """Runs the commands of the tiny run at a small size in an empty folder."""
  folder = folder_with_configs(tmp_path)
  done = []
  for program, *arguments in commands(DOCS / "quickstart.md"):
    tiny = any("tiny" in argument for argument in arguments)
    if program == "gtpo" and tiny and arguments[0] != "plan":
      fields = [*SMALL, "warm_start.steps=8"] if arguments[0] == "train" else []
      run_gtpo(arguments, fields, folder)
      done.append(arguments[0])
  assert done == ["train", "report", "sample", "eval", "export"]
  assert (folder / "hf" / "tiny" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_commands_of_an_own_task_run(tmp_path, monkeypatch):
  """Runs the commands at a small size, first the second part of the page.

  The model that this part exports replaces the one from the hub in the first part. Commands of the
  first part that only read its workdir run once, on that of the second.
  """
  page = DOCS / "own_task.md"
  folder = folder_with_configs(tmp_path)
  monkeypatch.chdir(folder)
  (mine,) = [block for block in blocks(page, "python") if block.startswith("# configs/mine.py")]
  (verify,) = [block for block in blocks(page, "python") if "def verify" in block]
  (data,) = [block for block in blocks(page, "python") if "sort_demos.jsonl" in block]
  (rows,) = [block for block in blocks(page, "json") if "answer" in block]
  hub = "Qwen/Qwen2.5-0.5B-Instruct"
  assert hub in mine
  (folder / "configs" / "mine.py").write_text(mine.replace(hub, "hf/sort"))
  (folder / "my_rewards.py").write_text(verify)
  for name in ("train.jsonl", "test.jsonl"):
    (folder / name).write_text(rows)
  exec(data, {})
  ours = [arguments for program, *arguments in commands(page) if program == "gtpo"]
  ours = [arguments for arguments in ours if arguments[0] != "plan"]
  ours.sort(key=lambda arguments: "sort" not in " ".join(arguments))  # a stable sort
  done = []
  for arguments in ours:
    if arguments[0] in done and arguments[0] != "train":
      continue
    arguments = [argument.replace(hub, "hf/sort") for argument in arguments]
    fields = [*SMALL, "sampling.max_tokens=16"] if arguments[0] in ("train", "eval") else []
    if "warm_start" in " ".join(arguments):
      fields.append("warm_start.steps=8")
    elif arguments[0] == "train":
      fields.append("reward.verifier=my_rewards:verify")
    run_gtpo(arguments, fields, folder)
    done.append(arguments[0])
  assert done == ["train", "report", "export", "sample", "eval", "train"]
  assert json.loads((folder / "base.jsonl").read_text().splitlines()[0])["answer"] in ("205", "428")


HELP = """
import contextlib, io, json, runpy, sys

printed = {}
for script in sys.argv[1:]:
  sys.argv = [script, "--help"]
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    try:
      runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
      assert not end.code, script
  printed[script] = out.getvalue()
print(json.dumps(printed))
"""


@pytest.mark.slow
def test_the_options_of_the_benchmarks_exist():
  """Every option that a page passes to a script is in its --help.

  All fields of the config are one option, `--config.FIELD`.
  """
  options = {}
  for call in (call for page in PAGES for call in commands(page)):
    if call[0] == "python" and call[1].startswith("benchmarks/"):
      options.setdefault(call[1], set()).update(
        re.sub(r"^--config\..*", "--config.FIELD", argument.split("=")[0])
        for argument in call
        if argument.startswith("--")
      )
  assert len(options) > 5
  environment = {**ENV, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
  call = [sys.executable, "-c", HELP, *options]
  done = subprocess.run(
    call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
  )
  assert done.returncode == 0, done.stderr
  printed = json.loads(done.stdout)
  missing = [(script, x) for script in options for x in options[script] if x not in printed[script]]
  assert not missing


@EVERY_PAGE
def test_links_to_files_exist(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if not re.match(r"[a-z]+:|#", target):
      assert (page.parent / target.split("#")[0]).exists(), target


@EVERY_PAGE
def test_tables_begin_after_an_empty_line(page):
  """Markdown takes any other for text."""
  assert not re.findall(r"^[^|\n].*\n\|.*\n\|---", page.read_text(), re.MULTILINE)


def test_every_field_is_described(capsys):
  assert cli.main(["configs", "--fields"]) == 0
  printed = capsys.readouterr().out
  for name in FIELDS:
    (meaning,) = re.findall(rf"^{re.escape(name)} \([\w ]+, .+?\): (.+)$", printed, re.MULTILINE)
    assert len(meaning) > 5, name


@pytest.mark.slow
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
  page = (tmp_path / "site" / "reference" / "index.html").read_text()
  for name in re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE):
    assert f'id="{name}"' in page, name
  assert "held_out" in page and "Raises" in page
  for page_name, names in (("reference", FIELDS), ("algorithms", RECIPES)):
    generated = (tmp_path / "site" / page_name / "index.html").read_text()
    assert all(f"<td><code>{name}</code></td>" in generated for name in names)
  # The page loads nothing from other sites.
  assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://', page)
