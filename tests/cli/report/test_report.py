"""The report as a reader sees it: real runs of one and two steps, opened in a real browser."""

import dataclasses
import itertools
import json
import re
import shutil

import numpy as np
import pytest
from pages import METHODS, select, shown_numbers, slow_credit, token, value

from gtpo_jax import cli
from gtpo_jax.algorithms import make
from gtpo_jax.cli.report.report import make_report
from gtpo_jax.cli.report.viewer import schemes
from gtpo_jax.logs.credit import credit_files, read_credit, save_credit
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.text import visible


def test_a_record_agrees_with_the_metrics(runs, record):
  """Entropy, accuracy and the recomputed advantages of a batch match the step's metrics."""
  row = read_jsonl(runs / "gtpo-0" / "metrics.jsonl")[2]
  assert list(credit_files(runs / "gtpo-0")) == [1, 2]
  assert len(record.shown) == 3
  assert record.entropy[record.mask].mean() == pytest.approx(row["entropy/mean"], rel=1e-5)
  assert record.correct.mean() == row["reward/accuracy"]
  assert 0 < row["reward/accuracy"] < 1
  _, advantages = slow_credit(record, "gtpo")
  mixed = record.correct.any(1) & ~record.correct.all(1)
  trained = record.mask & mixed[:, None, None]
  correct = record.correct[..., None]
  for name, side in (("advantage/correct", correct), ("advantage/incorrect", ~correct)):
    mean = np.asarray(advantages)[trained & side].mean()
    assert mean == pytest.approx(row[name], abs=1e-4), name
  smaller_side = np.minimum(record.correct.sum(1), (~record.correct).sum(1))
  assert smaller_side[record.shown].tolist() == sorted(smaller_side, reverse=True)[:3]


def test_every_scheme_follows_the_papers_equations(record):
  for scheme in schemes(make("gtpo", alpha2=0.3)):
    shaped, advantages = scheme.credit(record)
    slow_shaped, slow_advantages = slow_credit(
      record, "gtpo", alpha2=0.3, compare=scheme.algorithm.settings.compare
    )
    np.testing.assert_allclose(shaped, slow_shaped[record.shown], atol=1e-5)
    np.testing.assert_allclose(advantages, slow_advantages[record.shown], atol=1e-4)
  trained = [scheme.trained for scheme in schemes(make("gtpo", compare="matrix"))]
  assert trained == [False, False, True]
  assert schemes(make("grpo_s"))[0].label == "grpo_s, as trained"


@pytest.mark.parametrize("completion", [0, 1, 2, 3])
@pytest.mark.some(0, slow=1)
def test_pointing_at_a_token_shows_its_numbers(completion, runs, record, opened):
  page = opened(runs / "gtpo-0")
  select(page, 2, 0)
  group = record.shown[0]
  position = min(completion + 1, record.lengths[group, completion] - 1)
  at = (group, completion, position)
  token(page, record, completion, position).hover()
  facts, table = shown_numbers(page)
  log_prob = record.log_probs[0, completion, position]
  assert value(facts["entropy"]) == pytest.approx(record.entropy[at], rel=6e-4)
  assert value(facts["log-prob"]) == pytest.approx(log_prob, rel=6e-4)
  assert value(facts["probability"]) == pytest.approx(np.exp(log_prob), rel=6e-4)
  assert facts["token id"] == str(record.ids[0, completion, position])
  assert facts["position"] == f"{position + 1} of {record.lengths[group, completion]}"
  side = "correct (O+)" if record.correct[group, completion] else "wrong (O−)"
  assert facts["completion"] == f"{completion + 1}, {side}"
  text = visible(record.pieces[record.piece[0, completion, position]])
  assert page.text_content("#v-token h4") == (text or "(part of the next character)")
  for method, (shaped, advantage) in zip(METHODS, table, strict=True):
    slow_shaped, slow_advantage = slow_credit(record, "gtpo", compare=method)
    assert shaped == pytest.approx(slow_shaped[at], rel=6e-4), method
    assert advantage == pytest.approx(slow_advantage[at], rel=6e-4, abs=1e-4), method


@pytest.mark.slow
def test_one_number_by_hand(runs, opened):
  """Method 1 by hand: 1 + 0.1 H / (mean H of the correct completions at the same position)."""
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
  select(page, 1, 0)
  page.locator(".side.right .row").nth(len(right) - 1).locator(".t").nth(position).hover()
  _, table = shown_numbers(page)
  expected = 1 + 0.1 * column[-1] / (sum(column) / len(column))
  assert table[0][0] == float(f"{expected:.4g}")
  assert page.locator(".t.peer").count() == len(right)
  assert f"position 3 of the {len(right)} correct completions" in page.inner_text("#v-token")


@pytest.mark.slow
def test_switching_colour_and_method(runs, record, opened):
  page = opened(runs / "gtpo-0")
  select(page, 2, 0)
  classes = lambda: page.eval_on_selector_all(".t", "all => all.map(each => each.className)")
  hues = lambda names: {name.split()[1] for name in names}
  group = record.shown[0]
  incorrect = record.mask[group] & ~record.correct[group][:, None]
  assert incorrect.any()
  colours = [classes()]  # of the shaped reward
  assert hues(colours[0]) == {"plus", "minus"}
  page.check("input[value=entropy]")
  colours.append(classes())
  assert hues(colours[-1]) == {"ent"}
  assert any("q8" in name for name in colours[-1])
  assert "Entropy, nats" in page.inner_text("#v-scale")
  page.check("input[value=advantage]")
  token(page, record, 0, 0).hover()
  page.mouse.move(0, 0)
  for method, name in enumerate(METHODS):
    page.check(f"input[name=scheme][value='{method}']")
    colours.append(classes())
    assert page.locator("#v-token tr[aria-current]").count() == 1
    assert page.locator("#v-token tbody tr").nth(method).get_attribute("aria-current") == "true"
    _, advantages = slow_credit(record, "gtpo", compare=name)
    ends = page.locator("#v-scale > div").nth(1).locator("span span").all_inner_texts()
    lowest = advantages[group][incorrect].min()
    assert value(ends[-1]) == pytest.approx(lowest, rel=6e-4)
  assert all(a != b for a, b in itertools.pairwise(colours))


@pytest.mark.slow
def test_every_group_can_be_shown(runs, record, opened):
  page = opened(runs / "gtpo-0")
  select(page, 2, 0)
  assert page.locator("#v-group option").count() == 3
  for i in range(3):
    select(page, 2, i)
    assert page.locator(".t").count() == record.lengths[record.shown[i]].sum()
    prompt = page.inner_text("#v-prompt")
    assert record.prompts[i] in prompt
    assert record.answers[i] in prompt
    assert page.locator("#v-next").is_disabled() == (i == 2)
    assert page.locator("#v-prev").is_disabled() == (i == 0)
  text = [visible(record.pieces[p]) for p in record.piece[2][record.mask[record.shown[2]]]]
  assert sorted(page.locator(".t").all_text_contents()) == sorted(text)


@pytest.mark.slow
def test_keyboard_navigation(runs, record, opened):
  page = opened(runs / "gtpo-0")
  select(page, 2, 0)
  page.focus("input[name=scheme]:checked")
  page.keyboard.press("Tab")  # to the first token
  focused = lambda: page.evaluate(
    "[document.activeElement.token, document.activeElement.getAttribute('aria-label')]"
  )
  assert page.evaluate("document.activeElement.parentElement.className") == "flow"
  first = page.locator(".t").first
  assert first.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
  start = focused()[0]
  group = record.shown[0]
  page.keyboard.press("ArrowRight")
  page.keyboard.press("ArrowRight")
  here, label = focused()
  completion = int(record.correct[group].argmax())
  entropy = f"{record.entropy[group, completion, 2]:.4g}"[:-1]  # the last digit may round otherwise
  assert here == start + 2
  assert f"position 3, completion {completion + 1}, correct, entropy {entropy}" in label
  assert "shaped reward 1." in label
  assert "advantage" in label
  page.keyboard.press("ArrowDown")
  facts, _ = shown_numbers(page)
  assert facts["position"].startswith("3 of ")
  assert not facts["completion"].startswith(f"{completion + 1},")
  page.keyboard.press("ArrowUp")
  page.keyboard.press("End")
  length = record.lengths[group, completion]
  assert shown_numbers(page)[0]["position"] == f"{length} of {length}"
  page.keyboard.press("ArrowRight")
  page.keyboard.press("Home")
  assert focused()[0] == start
  assert page.locator("#v-tokens [tabindex='0']").count() == 1
  for name in ("button", "select", "input"):
    for control in page.locator(f"{name}:visible").all():
      label = control.evaluate("each => each.labels?.length || each.ariaLabel || each.textContent")
      assert label, control


@pytest.mark.slow
def test_one_run_of_one_step(grpo, opened):
  page = opened(grpo)
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
    "Sampler–trainer mismatch",
    "Group composition",
    "Step time",
  ):
    assert title in titles
  entropy = page.locator(".chart").nth(titles.index("Policy entropy"))
  drawn = read_jsonl(grpo / "metrics.jsonl")[1]["entropy/mean"]
  assert entropy.locator("tbody tr").count() == 1
  assert value(entropy.locator("tbody td").first.text_content()) == pytest.approx(drawn, rel=1e-3)
  assert entropy.locator("svg use").count() >= 1  # the only point has a marker
  labels = page.locator("#v-methods label").all_inner_texts()
  assert [label.strip() for label in labels] == [
    "grpo, as trained",
    "gtpo, method 1: position",
    "gtpo, method 2: completion",
    "gtpo, method 3: group",
  ]
  record = read_credit(credit_files(grpo)[1])
  select(page, 1, 0)
  page.select_option("#v-group", index=0)
  token(page, record, 1, 2).hover()
  _, table = shown_numbers(page)
  shaped, advantages = slow_credit(record, "grpo")
  group = record.shown[0]
  assert table[0][0] == pytest.approx(shaped[group, 1, 2])
  assert table[0][1] == pytest.approx(advantages[group, 1, 2], rel=6e-4)
  assert table[1][1] == pytest.approx(slow_credit(record, "gtpo")[1][group, 1, 2], rel=6e-4)


@pytest.mark.slow
def test_three_runs_side_by_side(runs, grpo, second_seed, opened):
  page = opened(runs / "gtpo-0", grpo, second_seed)
  assert page.inner_text("h1") == "gtpo, steps=2 and grpo, steps=1 on sums"
  assert page.locator(".runs tbody tr").count() == 3
  assert page.locator("#v-run option").all_inner_texts() == [
    "gtpo, steps=2, seed 0",
    "gtpo, steps=2, seed 1",
    "grpo, steps=1",
  ]
  titles = page.locator("figcaption b").all_inner_texts()
  reward = page.locator(".chart").nth(titles.index("Mean reward"))
  rewards = {
    workdir.name: read_jsonl(workdir / "metrics.jsonl")[1]["reward/mean"]
    for workdir in (runs / "gtpo-0", second_seed, grpo)
  }
  expected = [(rewards["gtpo-0"] + rewards["gtpo-1"]) / 2, rewards["grpo"]]
  cells = reward.locator("tbody tr").first.locator("td").all_text_contents()
  assert [value(cell) for cell in cells] == pytest.approx(expected, rel=1e-3)
  assert reward.locator(".raw.color0").count() == 2  # a faint line for each seed
  shown = lambda color: reward.locator(f"svg .color{color}").first.is_visible()
  assert shown(1)
  page.uncheck("[data-color='1']")
  assert not shown(1)
  assert shown(0)
  page.check("input[value=raw]")
  assert not reward.locator(".smooth").first.is_visible()
  reward.locator(".plot").hover(position={"x": 60, "y": 60})
  tip = reward.locator(".tip").inner_text()
  assert "step 1" in tip
  assert "grpo" not in tip
  select(page, 1, 0, run=2)
  record = read_credit(credit_files(grpo)[1])
  assert record.prompts[0] in page.inner_text("#v-prompt")


@pytest.mark.slow
def test_light_dark_and_print(runs, opened):
  page = opened(runs / "gtpo-0", color_scheme="light")

  def lightness():
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", color)[:3]))

  assert lightness() > 700
  page.emulate_media(color_scheme="dark")
  assert lightness() < 120
  assert page.locator("#v-step").is_visible()
  page.emulate_media(color_scheme="dark", media="print")
  assert lightness() == 765
  assert not page.locator("#v-step").is_visible()
  assert page.locator(".t").first.is_visible()
  assert page.locator(".chart").first.is_visible()


@pytest.mark.slow
def test_the_top_of_a_report(runs, opened):
  """The verdict, how the run was executed, and samples, on a wide and on a narrow screen."""
  page = opened(runs / "gtpo-0")
  rows = read_jsonl(runs / "gtpo-0" / "metrics.jsonl")
  before, after = (f"{rows[step]['eval/sums/mean@2']:.1%}" for step in (0, 2))
  verdict = page.inner_text(".verdict")
  assert verdict.startswith("Held-out accuracy ") and verdict.endswith("overlap.")
  assert before in verdict and after in verdict and " in 2 steps" in verdict
  facts = page.inner_text(".execution")
  for text in ("UTC", "1 x cpu in 1 process(es)", "jax ", "python ", "a Python program"):
    assert text in facts
  titles = page.locator(".samples h4").all_inner_texts()
  assert titles == ["Before training (sampled in step 1)", "Step 2"]
  samples = read_jsonl(runs / "gtpo-0" / "samples.jsonl")
  assert visible(samples[0]["completion"]).strip() in page.inner_text(".sample >> nth=0")
  page.set_viewport_size({"width": 400, "height": 900})
  assert page.evaluate("document.documentElement.scrollWidth") == 400
  assert page.locator(".runs .n").first.is_visible()
  edges = page.locator(".runs td").evaluate_all(
    "all => all.map(each => each.getBoundingClientRect().right)"
  )
  assert max(edges) <= 400


@pytest.mark.slow
def test_tokens_are_not_broken_between_lines(runs, record, opened):
  """At any width each token is on one line, unless it is wider than the line."""
  page = opened(runs / "gtpo-0")
  for width in (1300, 400, 330):
    page.set_viewport_size({"width": width, "height": 900})
    lines = page.locator(".t").evaluate_all("all => all.map(each => each.getClientRects().length)")
    assert set(lines) == {1}


def with_credit(runs, record, tmp_path, **changes):
  """Returns a copy of a run whose only credit record has these changes."""
  workdir = tmp_path / "run"
  shutil.copytree(runs / "gtpo-0", workdir, ignore=shutil.ignore_patterns("checkpoints", "base"))
  for file in credit_files(workdir).values():
    file.unlink()
  save_credit(workdir, dataclasses.replace(record, **changes))
  return workdir


@pytest.mark.slow
def test_the_viewer_says_why_credit_is_even_and_opens_where_it_is_not(
  runs, record, opened, tmp_path
):
  """In the first group shown, all completions of a side get the same text and entropies."""
  same, uneven = record.shown[:2]
  lengths = record.lengths.copy()
  entropy = record.entropy.copy()
  ids = record.ids.copy()
  correct = record.correct.copy()
  lengths[same] = 4
  entropy[same] = 0
  entropy[same, :, :4] = [0.5, 0.1, 0.2, 0.9]
  ids[0, :, :4] = [1, 2, 3, 4]
  entropy[uneven] *= np.float32([1, 2, 1, 3])[:, None]
  correct[same] = correct[uneven] = [True, True, False, False]
  changes = {"lengths": lengths, "entropy": entropy, "ids": ids, "correct": correct}
  page = opened(with_credit(runs, record, tmp_path, **changes))
  assert page.eval_on_selector("#v-group", "each => each.selectedIndex") == 1
  assert "The reward is" not in page.inner_text("#v-note")
  select(page, 2, 0)
  page.select_option("#v-group", index=0)
  page.wait_for_function("document.querySelectorAll('.t').length === 16")
  note = page.inner_text("#v-note")
  assert (
    "The reward is 1.100 for every correct token: the 2 correct completions are the same" in note
  )
  assert "The reward is −1.100 for every wrong token: the 2 wrong completions are the same" in note
  assert "1.100 throughout" in page.inner_text("#v-scale")
  page.check("input[name=scheme][value='1']")  # method 2 compares tokens of one completion
  assert "The reward is" not in page.inner_text("#v-note")


@pytest.mark.slow
def test_the_viewer_says_that_grpo_does_not_shape_rewards(grpo, opened):
  page = opened(grpo)
  note = page.inner_text("#v-note")
  assert "The reward is 1.000 for every correct token: this algorithm does not shape" in note


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
  config["data"] |= {"train": HOSTILE[0], "eval": "sums"}
  config["warm_start"]["steps"] = 0  # it would need demonstrations of that data
  config["model"]["path"] = f"/{HOSTILE[1]}"
  (workdir / "config.json").write_text(json.dumps(config))
  tag = f"eval/{HOSTILE[0]}/mean@2"  # evaluations are named after their file
  for log in ("metrics.jsonl", "evaluations.jsonl"):
    rows = [{**row, tag: 0.5} for row in read_jsonl(workdir / log)]
    (workdir / log).write_text("".join(json.dumps(row) + "\n" for row in rows))
  with (workdir / "samples.jsonl").open("a") as samples:
    for text in HOSTILE:
      row = {"step": 1, "prompt": text, "completion": text, "correct": True}
      samples.write(json.dumps(row) + "\n")
  changes = {
    "pieces": HOSTILE,
    "piece": record.piece % len(HOSTILE),
    "prompts": HOSTILE[:3],
    "answers": [HOSTILE[3]] * 3,
  }
  save_credit(workdir, dataclasses.replace(record, **changes))
  page = opened(workdir)
  select(page, 2, 0)
  assert page.evaluate("window.taken") is None
  assert page.locator("main img, main b[onclick], #v-tokens script").count() == 0
  texts = set(page.locator(".t").all_text_contents())
  pieces = record.piece[0][record.mask[record.shown[0]]]
  used = {HOSTILE[piece % len(HOSTILE)] for piece in pieces}
  symbols = {
    "\x00\x1b[31m": "␀␛[31m",
    "\u202etxt\u2066": "‹U+202E›txt‹U+2066›",
    "\ud800": "‹U+D800›",
    "\u2028": "‹U+2028›",
  }
  assert texts == {symbols.get(text, text) for text in used}
  assert len(texts) >= 5
  prompt = page.inner_text("#v-prompt")
  assert HOSTILE[0] in prompt
  assert "‹U+202E›txt" in prompt
  assert "<b onclick=alert(1)>&amp;‹U+202E›" in page.inner_text(".path")
  assert not re.search("[\u0000\u001b\u202e\u2066\u2028]", page.content())


def test_the_file_loads_nothing(runs, tmp_path):
  other = shutil.copytree(runs / "gtpo-0", tmp_path / "other")
  page = make_report([runs / "gtpo-0", other])
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
      "config.json' is of another version of gtpo_jax (unknown config key 'batch.fancy'",
    ),
    (
      ["--workdir={runs}/gtpo-0", "--workdir={tmp}/other", "--out={tmp}/r.html"],
      "1.npz' has format 9, but this version of gtpo_jax reads 1",
    ),
    (
      ["--workdir={runs}/gtpo-0", "--workdir={runs}/../{name}/gtpo-0", "--out={tmp}/r.html"],
      "is listed twice",
    ),
    (["--workdir={runs}/gtpo-0", "--out={tmp}/none/r.html"], "cannot write '{tmp}/none/r.html'"),
    (["--workdir={runs}/gtpo-0"], "required: --out"),
    (
      ["--wrkdir={runs}/gtpo-0", "--out={tmp}/r.html"],
      "unknown option '--wrkdir', did you mean '--workdir'?",
    ),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_prints_one_line(args, message, runs, tmp_path, capsys):
  for name in ("empty", "older", "newer", "other"):
    shutil.copytree(
      runs / "gtpo-0", tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "base")
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
  paths = {"tmp": tmp_path, "runs": runs, "name": runs.name}
  status = cli.main(["report", *(arg.format(**paths) for arg in args)])
  out, err = capsys.readouterr()
  assert (status, out) == (2, "")
  assert len(err.strip().splitlines()) == 1
  assert message.format(**paths) in err
  assert not (tmp_path / "r.html").exists()
