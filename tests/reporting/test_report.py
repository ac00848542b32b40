"""The report as its reader meets it: real runs of two steps and of one, opened in a real browser."""

import importlib.util
import itertools
import json
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from gtpo_jax import cli
from gtpo_jax.algorithms import make
from gtpo_jax.config import default_config, freeze
from gtpo_jax.loop import train
from gtpo_jax.reporting.credit import credit_files, read_credit, save_credit
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import read_jsonl
from gtpo_jax.reporting.report import make_report
from gtpo_jax.reporting.viewer import schemes, visible

HERE = Path(__file__).parent
METHODS = ("position", "sequence", "matrix")


def slow_reference():
  """The papers' equations as slow loops, of the tests of the algorithms."""
  spec = importlib.util.spec_from_file_location(
    "slow_reference", HERE.parent / "algorithms" / "slow_reference.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def by_first_digits(prompts, completions, answers, extras):
  """A verifier that finds some of a group right whatever it wrote, so that there is contrast."""
  return [i % 2 == len(text) % 2 for i, text in enumerate(completions)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """GTPO with two seeds, two steps each, and GRPO with one step."""
  module = types.ModuleType("a_verifier")
  module.verify = by_first_digits
  sys.modules["a_verifier"] = module
  folder = tmp_path_factory.mktemp("report")
  for name, changes in {
    "gtpo-0": {},
    "gtpo-1": {"seed": 1},
    "grpo": {"algorithm.name": "grpo", "steps": 1},
  }.items():
    config = default_config()
    config.steps = 2
    config.mesh.data = 2
    config.mesh.fsdp = 2
    config.mesh.tensor = 2
    config.data.terms = 2
    config.data.max_prompt_tokens = 20
    config.sampling.max_tokens = 18
    config.batch.prompts = 8
    config.batch.group = 4
    config.batch.micro_batches = 2
    config.warm_start.steps, config.warm_start.batch = 40, 8
    config.reward.verifier = "a_verifier:verify"
    config.eval.problems = 12
    config.eval.samples = 4
    config.eval.batch = 8
    config.optimizer.learning_rate = 1e-3
    config.log.credit_groups, config.log.tensorboard = 3, False
    config.update_from_flattened_dict(changes)
    assert train(freeze(config), folder / name, Display(enabled=False)).finished
  del sys.modules["a_verifier"]
  return folder


@pytest.fixture(scope="module")
def record(runs):
  return read_credit(credit_files(runs / "gtpo-0")[2])


@pytest.fixture
def opened(browser, tmp_path):
  """Opens the report of some runs; what the page asked for and complained of must be nothing."""
  pages = []

  def open_report(*workdirs, **options):
    out = tmp_path / "report.html"
    assert (
      cli.main(["report", *(f"--workdir={workdir}" for workdir in workdirs), f"--out={out}"]) == 0
    )
    page = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
    page.complaints = []
    page.on(
      "request",
      lambda request: page.complaints.append(request.url) if request.url != out.as_uri() else None,
    )
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(out.as_uri())
    pages.append(page)
    return page

  yield open_report
  for page in pages:
    assert page.complaints == []
    page.close()


def view(page, step, group, run=None):
  """Puts a step's group on view, by its number in the list."""
  if run is not None:
    page.select_option("#v-run", index=run)
  page.select_option("#v-step", label=str(step))
  page.wait_for_selector(".t")
  if group:
    before = page.inner_text("#v-prompt")
    page.select_option("#v-group", index=group)
    page.wait_for_function(
      "before => document.getElementById('v-prompt').innerText !== before", arg=before
    )


def token(page, record, completion, position):
  """The element of a token: completions stand by sides, the correct first."""
  group = record.shown[0]
  order = sorted(range(len(record.lengths[group])), key=lambda j: (not record.correct[group, j], j))
  return page.locator(".row").nth(order.index(completion)).locator(".t").nth(position)


def value(text):
  return float(text.replace("−", "-").split()[0])


def shown_numbers(page):
  """What the panel says of the token in focus: its facts, and (shaped reward, advantage) by each scheme."""
  facts = {
    fact.get_attribute("data-fact"): fact.inner_text()
    for fact in page.locator("#v-token [data-fact]").all()
  }
  table = [
    tuple(value(cell) for cell in row.locator("td").all_inner_texts())
    for row in page.locator("#v-token tbody tr").all()
  ]
  return facts, table


def slow_credit(record, name, **settings):
  """Shaped rewards and advantages f64[n, g, t] of a record, by slow loops."""
  slow = slow_reference()
  s = {**vars(make(name).settings), **settings}
  batch = {
    "entropy": record.entropy,
    "mask": record.mask & record.valid[..., None],
    "correct": record.correct,
    "reward": record.reward,
    "penalty": record.penalty,
  }
  shaped = np.zeros(record.entropy.shape)
  for side in slow.shaped_rewards(name, batch, s):
    for (i, j, k), reward in side.items():
      shaped[(i, j, k) if name in slow.TOKEN_LEVEL else (i, j)] = reward
  return np.where(batch["mask"], shaped, 0), slow.advantages(name, batch, s)


def test_the_record_is_what_was_learned_from(runs, record):
  """Entropies, accuracy and reward of the whole batch are those of the step's metrics, and so are the advantages made again."""
  row = read_jsonl(runs / "gtpo-0" / "metrics.jsonl")[2]
  assert list(credit_files(runs / "gtpo-0")) == [1, 2] and len(record.shown) == 3
  assert record.entropy[record.mask].mean() == pytest.approx(row["entropy/mean"], rel=1e-5)
  assert record.correct.mean() == row["reward/accuracy"] and 0 < row["reward/accuracy"] < 1
  _, advantages = (np.asarray(x) for x in slow_credit(record, "gtpo"))
  informative = record.mask & (record.correct.any(1) & ~record.correct.all(1))[:, None, None]
  for name, side in (
    ("advantage/correct", record.correct),
    ("advantage/incorrect", ~record.correct),
  ):
    assert advantages[informative & side[..., None]].mean() == pytest.approx(row[name], abs=1e-4), (
      name
    )
  mixed = np.minimum(record.correct.sum(1), (~record.correct).sum(1))
  assert (
    sorted(mixed[record.shown], reverse=True)
    == mixed[record.shown].tolist()
    == sorted(mixed, reverse=True)[:3]
  )


def test_every_scheme_is_the_papers_equations(record):
  for scheme in schemes(make("gtpo", alpha2=0.3)):
    shaped, advantages = scheme.credit(record)
    slow_shaped, slow_advantages = slow_credit(
      record, "gtpo", alpha2=0.3, compare=scheme.algorithm.settings.compare
    )
    np.testing.assert_allclose(shaped, slow_shaped[record.shown], atol=1e-5)
    np.testing.assert_allclose(advantages, slow_advantages[record.shown], atol=1e-4)
  assert [scheme.trained for scheme in schemes(make("gtpo", compare="matrix"))] == [
    False,
    False,
    True,
  ]
  assert schemes(make("grpo_s"))[0].label == "grpo_s, as trained"


@pytest.mark.parametrize("completion", [0, 1, 2, 3])
def test_pointing_at_a_token_shows_its_numbers(completion, runs, record, opened):
  page = opened(runs / "gtpo-0")
  view(page, 2, 0)
  group = record.shown[0]
  position = completion + 1
  token(page, record, completion, position).hover()
  facts, table = shown_numbers(page)
  assert value(facts["entropy"]) == pytest.approx(
    record.entropy[group, completion, position], rel=6e-4
  )
  assert value(facts["log-prob"]) == pytest.approx(
    record.log_probs[0, completion, position], rel=6e-4
  )
  assert value(facts["probability"]) == pytest.approx(
    np.exp(record.log_probs[0, completion, position]), rel=6e-4
  )
  assert facts["token id"] == str(record.ids[0, completion, position])
  assert facts["position"] == f"{position + 1} of {record.lengths[group, completion]}"
  assert (
    facts["completion"]
    == f"{completion + 1}, {'correct (O+)' if record.correct[group, completion] else 'wrong (O−)'}"
  )
  text = visible(record.pieces[record.piece[0, completion, position]])
  assert page.text_content("#v-token h4") == (text or "(part of the next character)")
  for method, (shaped, advantage) in zip(METHODS, table, strict=True):
    slow_shaped, slow_advantage = slow_credit(record, "gtpo", compare=method)
    assert shaped == pytest.approx(slow_shaped[group, completion, position], rel=6e-4), method
    assert advantage == pytest.approx(
      slow_advantage[group, completion, position], rel=6e-4, abs=1e-4
    ), method


def test_the_literal_number_of_one_token(runs, opened):
  """Method 1 by hand, from the arrays as they lie in the file: 1 + 0.1 H / (mean of H at the position over the correct)."""
  with np.load(runs / "gtpo-0" / "credit" / "1.npz") as file:
    lengths = file["lengths"]
    correct = file["correct"]
    shown = file["shown"]
    ends = np.cumsum(lengths)
    rows = [
      file["entropy"][end - length : end] for end, length in zip(ends, lengths.ravel(), strict=True)
    ]
  group = shown[0]
  position = 2
  right = [j for j in range(4) if correct[group, j]]
  column = [float(rows[4 * group + j][position]) for j in right]
  page = opened(runs / "gtpo-0")
  view(page, 1, 0)
  page.locator(".side.right .row").nth(len(right) - 1).locator(".t").nth(position).hover()
  _, table = shown_numbers(page)
  assert table[0][0] == float(f"{1 + 0.1 * column[-1] / (sum(column) / len(column)):.4g}")
  assert page.locator(".t.peer").count() == len(right)
  assert f"position 3 of the {len(right)} correct completions" in page.inner_text("#v-token")


def test_colour_and_method_are_switched(runs, record, opened):
  page = opened(runs / "gtpo-0")
  view(page, 2, 0)
  classes = lambda: page.eval_on_selector_all(".t", "all => all.map(each => each.className)")
  wrong = (~record.correct[record.shown[0]]).sum()
  assert {name.split()[1] for name in classes()} == {"plus", "minus"}  # the shaped reward
  seen = [classes()]
  page.check("input[value=entropy]")
  seen.append(classes())
  assert {name.split()[1] for name in seen[-1]} == {"ent"} and any(
    "q8" in name for name in seen[-1]
  )
  assert "Entropy, nats" in page.inner_text("#v-scale")
  page.check("input[value=advantage]")
  token(page, record, 0, 0).hover()
  page.mouse.move(0, 0)
  for method, name in enumerate(METHODS):
    page.check(f"input[name=scheme][value='{method}']")
    seen.append(classes())
    assert page.locator("#v-token tr[aria-current]").count() == 1
    assert page.locator("#v-token tbody tr").nth(method).get_attribute("aria-current") == "true"
    _, slow = slow_credit(record, "gtpo", compare=name)
    here = slow[record.shown[0]][
      record.mask[record.shown[0]] & ~record.correct[record.shown[0]][:, None]
    ]
    ends = [
      value(text)
      for text in page.locator("#v-scale > div").nth(1).locator("span span").all_inner_texts()
    ]
    assert ends[-1] == pytest.approx(
      here.min(), rel=6e-4
    )  # the most charged token of a wrong completion
  assert wrong and all(a != b for a, b in itertools.pairwise(seen))


def test_every_group_and_step_is_there(runs, record, opened):
  page = opened(runs / "gtpo-0")
  view(page, 2, 0)
  assert page.locator("#v-group option").count() == 3
  for i in range(3):
    view(page, 2, i)
    assert page.locator(".t").count() == record.lengths[record.shown[i]].sum()
    assert record.prompts[i] in page.inner_text("#v-prompt") and record.answers[
      i
    ] in page.inner_text("#v-prompt")
    assert page.locator("#v-next").is_disabled() == (i == 2) and page.locator(
      "#v-prev"
    ).is_disabled() == (i == 0)
  text = [visible(record.pieces[p]) for p in record.piece[2][record.mask[record.shown[2]]]]
  assert sorted(page.locator(".t").all_text_contents()) == sorted(text)


def test_it_is_used_by_keyboard(runs, record, opened):
  page = opened(runs / "gtpo-0")
  view(page, 2, 0)
  page.focus("input[name=scheme]:checked")
  page.keyboard.press("Tab")
  focused = lambda: page.evaluate(
    "[document.activeElement.token, document.activeElement.getAttribute('aria-label')]"
  )
  assert (
    page.evaluate("document.activeElement.parentElement.className") == "flow"
  )  # straight to the first token
  first = page.locator(".t").first
  assert first.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
  start = focused()[0]
  group = record.shown[0]
  page.keyboard.press("ArrowRight")
  page.keyboard.press("ArrowRight")
  here, label = focused()
  completion = int(record.correct[group].argmax())
  assert here == start + 2
  said = f"position 3, completion {completion + 1}, correct, entropy {record.entropy[group, completion, 2]:.4g}"
  assert (
    said[:-1] in label and "shaped reward 1." in label and "advantage" in label
  )  # the last digit may be rounded otherwise
  page.keyboard.press("ArrowDown")
  facts, _ = shown_numbers(page)
  assert facts["position"].startswith("3 of ") and not facts["completion"].startswith(
    f"{completion + 1},"
  )
  page.keyboard.press("ArrowUp")
  page.keyboard.press("End")
  assert shown_numbers(page)[0]["position"] == "{0} of {0}".format(
    record.lengths[group, completion]
  )
  page.keyboard.press("ArrowRight")
  page.keyboard.press("Home")
  assert focused()[0] == start and page.locator("#v-tokens [tabindex='0']").count() == 1
  for name in ("button", "select", "input"):
    for control in page.locator(f"{name}:visible").all():
      assert control.evaluate(
        "each => each.labels?.length || each.ariaLabel || each.textContent"
      ), control


def test_one_run_of_one_step(runs, opened):
  page = opened(runs / "grpo")
  assert page.inner_text("h1") == "grpo on sums"
  titles = page.locator("figcaption b").all_inner_texts()
  for title in (
    "Held-out accuracy",
    "pass@k",
    "Mean reward of best of k",
    "Policy entropy",
    "Policy entropy in O+ and O−",
    "Response length",
    "Mean reward",
    "Clip rate",
    "SamplingParams–trainer mismatch",
    "Group composition",
    "Time of a step",
  ):
    assert title in titles
  entropy = page.locator(".chart").nth(titles.index("Policy entropy"))
  drawn = read_jsonl(runs / "grpo" / "metrics.jsonl")[1]["entropy/mean"]
  assert entropy.locator("tbody tr").count() == 1
  assert value(entropy.locator("tbody td").first.text_content()) == pytest.approx(drawn, rel=1e-3)
  assert entropy.locator("svg use").count() >= 1  # a point that can be seen
  labels = page.locator("#v-methods label").all_inner_texts()
  assert [label.strip() for label in labels] == [
    "grpo, as trained",
    "gtpo, method 1: position",
    "gtpo, method 2: completion",
    "gtpo, method 3: group",
  ]
  record = read_credit(credit_files(runs / "grpo")[1])
  token(page, record, 1, 2).hover()
  _, table = shown_numbers(page)
  shaped, advantages = slow_credit(record, "grpo")
  group = record.shown[0]
  assert table[0] == (
    pytest.approx(shaped[group, 1, 2]),
    pytest.approx(advantages[group, 1, 2], rel=6e-4),
  )
  assert table[1][1] == pytest.approx(slow_credit(record, "gtpo")[1][group, 1, 2], rel=6e-4)


def test_three_runs_side_by_side(runs, opened):
  page = opened(runs / "gtpo-0", runs / "grpo", runs / "gtpo-1")
  assert page.inner_text("h1") == "gtpo, steps=2 and grpo, steps=1 on sums"
  assert page.locator(".runs tbody tr").count() == 3
  assert page.locator("#v-run option").all_inner_texts() == [
    "gtpo, steps=2, seed 0",
    "gtpo, steps=2, seed 1",
    "grpo, steps=1",
  ]
  titles = page.locator("figcaption b").all_inner_texts()
  reward = page.locator(".chart").nth(titles.index("Mean reward"))
  rows = [read_jsonl(runs / name / "metrics.jsonl") for name in ("gtpo-0", "gtpo-1", "grpo")]
  cells = reward.locator("tbody tr").first.locator("td").all_text_contents()
  assert [value(cell) for cell in cells] == pytest.approx(
    [(rows[0][1]["reward/mean"] + rows[1][1]["reward/mean"]) / 2, rows[2][1]["reward/mean"]],
    rel=1e-3,
  )
  assert reward.locator(".raw.kind0").count() == 2  # a faint line for each seed
  assert reward.locator("svg .kind1").first.is_visible()
  page.uncheck("[data-kind='1']")
  assert (
    not reward.locator("svg .kind1").first.is_visible()
    and reward.locator("svg .kind0").first.is_visible()
  )
  page.check("input[value=raw]")
  assert not reward.locator(".smooth").first.is_visible()
  reward.locator(".plot").hover(position={"x": 60, "y": 60})
  assert (
    "step 1" in reward.locator(".tip").inner_text()
    and "grpo" not in reward.locator(".tip").inner_text()
  )
  view(page, 1, 0, run=2)
  record = read_credit(credit_files(runs / "grpo")[1])
  assert record.prompts[0] in page.inner_text("#v-prompt")


def test_light_dark_and_print(runs, opened):
  page = opened(runs / "gtpo-0", color_scheme="light")
  lightness = lambda: sum(
    map(
      int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
  )
  assert lightness() > 700
  page.emulate_media(color_scheme="dark")
  assert lightness() < 120
  assert page.locator("#v-step").is_visible()
  page.emulate_media(color_scheme="dark", media="print")
  assert lightness() == 765 and not page.locator("#v-step").is_visible()
  assert page.locator(".t").first.is_visible() and page.locator(".chart").first.is_visible()


HOSTILE = [
  "</script><script>window.taken = 1</script>",
  "<img src=x onerror='window.taken = 1'>",
  "\x00\x1b[31m",
  "\u202etxt\u2066",
  "",
  "🙂",
  "{{ 7 * 7 }}",
  "<!--<script>",
  "\ud800",
  "e\u0301",
  "]]>",
  "\u2028",
]


def test_hostile_text_is_shown_and_never_run(runs, record, opened, tmp_path):
  workdir = tmp_path / "<b onclick=alert(1)>&amp;\u202e"
  shutil.copytree(runs / "gtpo-0", workdir, ignore=shutil.ignore_patterns("checkpoints", "base"))
  config = json.loads((workdir / "config.json").read_text())
  config["data"]["system"] = HOSTILE[0]
  (workdir / "config.json").write_text(json.dumps(config))
  many = len(HOSTILE)
  hostile = type(record)(
    **vars(record)
    | {
      "pieces": HOSTILE,
      "piece": record.piece % many,
      "prompts": HOSTILE[:3],
      "answers": [HOSTILE[3]] * 3,
    }
  )
  save_credit(workdir, hostile)
  page = opened(workdir)
  view(page, 2, 0)
  assert page.evaluate("window.taken") is None
  assert page.locator("main img, main b[onclick], #v-tokens script").count() == 0
  texts = set(page.locator(".t").all_text_contents())
  used = {HOSTILE[p % many] for p in record.piece[0][record.mask[record.shown[0]]]}
  as_shown = {
    "\x00\x1b[31m": "␀␛[31m",
    "\u202etxt\u2066": "‹U+202E›txt‹U+2066›",
    "\ud800": "‹U+D800›",
    "\u2028": "‹U+2028›",
  }
  assert texts == {as_shown.get(text, text) for text in used} and len(texts) >= 5
  assert HOSTILE[0] in page.inner_text("#v-prompt") and "‹U+202E›txt" in page.inner_text(
    "#v-prompt"
  )
  assert "<b onclick=alert(1)>&amp;‹U+202E›" in page.inner_text(".path")
  assert not re.search("[\u0000\u001b\u202e\u2066\u2028]", page.content())


def test_the_file_loads_nothing(runs):
  page = make_report([runs / "gtpo-0", runs / "grpo"])
  assert "default-src 'none'" in page and len(page) < 600_000
  markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
  attributes = re.findall(r'\b(?:src|href|action|data|xlink:href)="([^"]*)"', markup)
  assert attributes and all(target.startswith("#") for target in attributes)
  assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|WebSocket", page)
  ids = re.findall(r'\bid="([^"]+)"', page)
  shared = {name for name in ids if ids.count(name) > 1}
  assert not shared, shared


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--workdir={tmp}/none", "--out={tmp}/r.html"], "no folder at '{tmp}/none'"),
    (["--workdir={tmp}", "--out={tmp}/r.html"], "no run in '{tmp}'"),
    (["--workdir={tmp}/empty", "--out={tmp}/r.html"], "no metrics in '{tmp}/empty'"),
    (
      ["--workdir={tmp}/older", "--out={tmp}/r.html"],
      "has no 'entropy/mean' at step 2: another version of gtpo_jax wrote it",
    ),
    (
      ["--workdir={tmp}/newer", "--out={tmp}/r.html"],
      "is of another version of gtpo_jax, with 'batch.fancy'; make the report",
    ),
    (
      ["--workdir={runs}/grpo", "--workdir={tmp}/other", "--out={tmp}/r.html"],
      "1.npz' is of format 9, this version of gtpo_jax reads 1",
    ),
    (
      ["--workdir={runs}/grpo", "--workdir={runs}/../{name}/grpo", "--out={tmp}/r.html"],
      "is named twice",
    ),
    (["--workdir={runs}/grpo", "--out={tmp}/none/r.html"], "cannot write '{tmp}/none/r.html'"),
    (["--workdir={runs}/grpo"], "required: --out"),
    (
      ["--wrkdir={runs}/grpo", "--out={tmp}/r.html"],
      "unknown option '--wrkdir', did you mean '--workdir'?",
    ),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_gets_one_line(args, message, runs, tmp_path, capsys):
  for name in ("empty", "older", "newer", "other"):
    shutil.copytree(
      runs / "grpo", tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "base")
    )
  (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 0}\n')
  (tmp_path / "older" / "metrics.jsonl").write_text(
    '{"step": 2, "reward/mean": 0.5, "time/step": 1.0}\n'
  )
  config = json.loads((tmp_path / "newer" / "config.json").read_text())
  config["batch"]["fancy"] = 1
  (tmp_path / "newer" / "config.json").write_text(json.dumps(config))
  file = tmp_path / "other" / "credit" / "1.npz"
  with np.load(file) as stored:
    np.savez_compressed(file, **{**stored, "format": 9})
  places = {"tmp": tmp_path, "runs": runs, "name": runs.name}
  status = cli.main(["report", *(arg.format(**places) for arg in args)])
  out, err = capsys.readouterr()
  assert (
    (status, out) == (2, "")
    and len(err.strip().splitlines()) == 1
    and message.format(**places) in err
  ), err
  assert not (tmp_path / "r.html").exists()
