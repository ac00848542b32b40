"""Helpers that operate the page of a report, and the papers' equations to compare it with."""

import numpy as np
import slow_reference

from gtpo_jax import cli
from gtpo_jax.algorithms import make

METHODS = ("position", "sequence", "matrix")


def open_report(browser, out, workdirs, options):
  """Opens a new report. `complaints` collects its requests, console lines and errors."""
  args = [f"--workdir={workdir}" for workdir in workdirs]
  assert cli.main(["report", *args, f"--out={out}"]) == 0
  page = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
  page.complaints = []

  def on_request(request):
    if request.url != out.as_uri():
      page.complaints.append(request.url)

  page.on("request", on_request)
  page.on("console", lambda message: page.complaints.append(message.text))
  page.on("pageerror", lambda error: page.complaints.append(str(error)))
  page.goto(out.as_uri())
  return page


def select(page, step, group, run=None):
  """Shows a group of a step. `group` is its index in the list."""
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
  """Returns the element of a token; the page lists correct completions first."""
  group = record.shown[0]
  order = sorted(range(len(record.lengths[group])), key=lambda j: (not record.correct[group, j], j))
  return page.locator(".row").nth(order.index(completion)).locator(".t").nth(position)


def value(text):
  """Returns the number at the start of a text of the page."""
  return float(text.replace("−", "-").split()[0])


def shown_numbers(page):
  """Returns the selected token's facts and, by scheme, its shaped reward and advantage."""
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
  """Computes a record's shaped rewards and advantages, f64[n, g, t], by slow loops."""
  settings = {**vars(make(name).settings), **settings}
  batch = {
    "entropy": record.entropy,
    "mask": record.mask & record.valid[..., None],
    "correct": record.correct,
    "reward": record.reward,
    "penalty": record.penalty,
  }
  shaped = np.zeros(record.entropy.shape)
  for side in slow_reference.shaped_rewards(name, batch, settings):
    for (i, j, k), reward in side.items():
      shaped[(i, j, k) if name in slow_reference.TOKEN_LEVEL else (i, j)] = reward
  return np.where(batch["mask"], shaped, 0), slow_reference.advantages(name, batch, settings)
