"""Builds runs from rows of metrics, without training."""

from gtpo_jax.cli.report.runs import RunLogs
from gtpo_jax.config import Config, flatten, to_dict


def make_run(workdir, rows, evaluations=None, **changes):
  """Returns a run of the default config. `changes` are fields, with `__` instead of dots."""
  fields = {key.replace("__", "."): value for key, value in changes.items()}
  config = flatten(to_dict(Config())) | fields
  return RunLogs(workdir, config, {i + 1: row for i, row in enumerate(rows)}, evaluations or {})


def rewards(*values):
  return [{"reward/mean": value} for value in values]
