"""Measures a report of many long completions: file size, and the time to make, open and use it.

    python benchmarks/report.py --completions=1000 --tokens=500

The completions have random words and entropies. They are in groups of 16, and their number is
rounded up to fill the last group.
The report is opened with playwright (required) in headless Chromium or Chrome. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from gtpo_jax.config import Config, to_dict
from gtpo_jax.logs.credit import CreditRecord, save_credit
from gtpo_jax.report.report import make_report

GROUP = 16
WORDS = 2000  # size of the vocabulary
# Milliseconds from a click until the page is painted.
CLICK = """async (selector) => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const painted = async () => { await frame(); await frame(); };
  const pause = () => new Promise((done) => setTimeout(done, 1));
  await painted();
  const started = performance.now();
  const old = document.querySelector('.t');
  document.querySelector(selector).click();
  while (selector === '#v-next' && document.querySelector('.t') === old) await pause();
  await painted();
  return performance.now() - started;
}"""
# Mean milliseconds that the page takes to handle the event of the pointer entering a token.
POINT = """() => {
  const tokens = [...document.querySelectorAll('.t')].slice(0, 100);
  const started = performance.now();
  const enter = () => new PointerEvent('pointerover', { bubbles: true });
  for (const token of tokens) token.dispatchEvent(enter());
  return (performance.now() - started) / tokens.length;
}"""
CLICKS = {
  "group": ["#v-next"] * 3,
  "colour": ["input[value=entropy]", "input[value=advantage]", "input[value=shaped]"],
  "method": [
    "input[name=scheme][value='1']",
    "input[name=scheme][value='2']",
    "input[name=scheme][value='0']",
  ],
}


def make_run(workdir: Path, groups: int, tokens: int) -> None:
  """Writes the files of a run with a single step, including its credit record."""
  rng = np.random.default_rng(0)
  shape = (groups, GROUP)
  (workdir / "config.json").write_text(json.dumps(to_dict(Config())))
  metrics = {"step": 1, "reward/mean": 0.4, "entropy/mean": 0.15, "time/step": 1.0}
  (workdir / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
  correct = rng.random(shape) < 0.4
  entropy = rng.exponential(0.3, (*shape, tokens)) * (rng.random((*shape, tokens)) < 0.5)
  pieces = rng.integers(0, WORDS, (*shape, tokens)).astype(np.int32)
  log_probs = -rng.exponential(0.4, (*shape, tokens)).astype(np.float32)
  record = CreditRecord(
    step=1,
    lengths=np.full(shape, tokens, np.int32),
    mask=np.ones((*shape, tokens), bool),
    entropy=entropy.astype(np.float32),
    correct=correct,
    reward=correct.astype(np.float32),
    penalty=np.zeros(shape, np.float32),
    valid=np.ones(shape, bool),
    finished=np.ones(shape, bool),
    guided=np.zeros(shape, bool),
    divergence=np.zeros((*shape, tokens), np.float32),
    truth=np.zeros((*shape, tokens), np.uint8),
    shown=np.arange(groups, dtype=np.int32),
    ids=pieces,
    log_probs=log_probs,
    piece=pieces,
    pieces=[f" word{i}" for i in range(WORDS)],
    prompts=["prompt"] * groups,
    answers=["answer"] * groups,
    stops=[[""] * GROUP] * groups,
    timeline=np.zeros((0, 4), np.float32),
  )
  save_credit(workdir, record)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--completions", type=int, default=1000)
  parser.add_argument("--tokens", type=int, default=500)
  args = parser.parse_args()
  groups = -(-args.completions // GROUP)
  from playwright.sync_api import sync_playwright

  with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
    workdir = Path(folder)
    file = workdir / "report.html"
    make_run(workdir, groups, args.tokens)
    started = time.perf_counter()
    file.write_text(make_report([workdir]), encoding="utf-8")
    make_s = time.perf_counter() - started
    program = shutil.which("chromium") or shutil.which("google-chrome")
    browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    started = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector(".t")
    open_s = time.perf_counter() - started
    page.evaluate("document.getElementById('credit').scrollIntoView()")
    result = {
      "completions": groups * GROUP,
      "tokens": args.tokens,
      "chromium": browser.version,
      "file_mb": file.stat().st_size / 1e6,
      "record_mb": (workdir / "credit" / "1.npz").stat().st_size / 1e6,
      "make_s": make_s,
      "open_s": open_s,
    }
    for name, selectors in CLICKS.items():
      result[f"{name}_ms"] = [round(page.evaluate(CLICK, selector)) for selector in selectors]
    result["point_ms"] = page.evaluate(POINT)
    print(json.dumps(result))
    browser.close()


if __name__ == "__main__":
  main()
