"""A report of many long completions: its size, the time to make and open it, and to switch what is on view.

    python benchmarks/report.py --completions=1000 --tokens=500

Random entropies and words, groups of 16; opened in this machine's own headless Chromium (needs playwright). One JSON object.
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
from gtpo_jax.reporting.credit import EntropyBonus, save_credit
from gtpo_jax.reporting.report import make_report

GROUP, WORDS = 16, 2000
SWITCH = """async (what) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  await painted();
  const began = performance.now(), old = document.querySelector('.t');
  document.querySelector(what).click();
  while (what === '#v-next' && document.querySelector('.t') === old) await new Promise((done) => setTimeout(done, 1));
  await painted();
  return performance.now() - began;
}"""
POINT = """() => {
  const all = [...document.querySelectorAll('.t')].slice(0, 100), began = performance.now();
  for (const each of all) each.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
  return (performance.now() - began) / all.length;
}"""


def make_run(workdir: Path, groups: int, tokens: int) -> None:
  rng = np.random.default_rng(0)
  g = (groups, GROUP)
  (workdir / "config.json").write_text(json.dumps(to_dict(Config())))
  (workdir / "metrics.jsonl").write_text(
    json.dumps({"step": 1, "reward/mean": 0.4, "entropy/mean": 0.15, "time/step": 1.0}) + "\n"
  )
  correct = rng.random(g) < 0.4
  none = np.zeros(g, bool)
  entropy = rng.exponential(0.3, (*g, tokens)) * (rng.random((*g, tokens)) < 0.5)
  piece = rng.integers(0, WORDS, (*g, tokens)).astype(np.int32)
  save_credit(
    workdir,
    EntropyBonus(
      1,
      np.full(g, tokens, np.int32),
      entropy.astype(np.float32),
      correct,
      correct.astype(np.float32),
      np.zeros(g, np.float32),
      ~none,
      ~none,
      none,
      np.arange(groups, dtype=np.int32),
      piece,
      -rng.exponential(0.4, (*g, tokens)).astype(np.float32),
      piece,
      [f" word{i}" for i in range(WORDS)],
      ["prompt"] * groups,
      ["answer"] * groups,
    ),
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--completions", type=int, default=1000)
  parser.add_argument("--tokens", type=int, default=500)
  args = parser.parse_args()
  from playwright.sync_api import sync_playwright

  with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
    workdir = Path(folder)
    file = Path(folder) / "report.html"
    make_run(workdir, -(-args.completions // GROUP), args.tokens)
    began = time.perf_counter()
    file.write_text(make_report([workdir]), encoding="utf-8")
    made = time.perf_counter() - began
    browser = driver.chromium.launch(
      executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
      args=["--no-sandbox"],
    )
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    began = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector(".t")
    opened = time.perf_counter() - began
    page.evaluate("document.getElementById('credit').scrollIntoView()")
    switches = {
      "group": ["#v-next"] * 3,
      "colour": ["input[value=entropy]", "input[value=advantage]", "input[value=shaped]"],
      "method": [
        "input[name=scheme][value='1']",
        "input[name=scheme][value='2']",
        "input[name=scheme][value='0']",
      ],
    }
    print(
      json.dumps(
        {
          "completions": -(-args.completions // GROUP) * GROUP,
          "tokens": args.tokens,
          "chromium": browser.version,
          "file_mb": file.stat().st_size / 1e6,
          "record_mb": (workdir / "credit" / "1.npz").stat().st_size / 1e6,
          "make_s": made,
          "open_s": opened,
          **{
            f"{name}_ms": [round(page.evaluate(SWITCH, what)) for what in clicks]
            for name, clicks in switches.items()
          },
          "point_ms": page.evaluate(POINT),
        }
      )
    )
    browser.close()


if __name__ == "__main__":
  main()
