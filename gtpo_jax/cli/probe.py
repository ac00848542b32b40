"""`gtpo probe`: which recipe has the better gradient on this model and task."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Any

from gtpo_jax.cli.processes import (
  check_writable,
  in_all_processes,
  program_name,
  stderr_display,
  write,
)
from gtpo_jax.runtime.signals import SIGNAL_EXIT, Stopped, StopSignals
from gtpo_jax.runtime.startup import place_compile_cache


@in_all_processes
def probe(args: argparse.Namespace, overrides: list[str]) -> int:
  """`gtpo probe`."""
  from gtpo_jax import config as configs
  from gtpo_jax.cli.probing import probe as measure

  check_writable(args.json)
  config = configs.load(args.config, overrides)
  place_compile_cache(args.workdir)
  display = stderr_display()
  stop = StopSignals(display.notice)
  with stop:
    try:
      result = measure(
        config,
        args.arms,
        args.batches,
        args.reference,
        args.workdir,
        display,
        stop.requested,
        controls=args.controls,
      )
    except Stopped:
      again = shlex.join(sys.argv[1:])
      print(f"stopped; complete batches are kept. To resume: {program_name()} {again}")
      return SIGNAL_EXIT + (stop.signal or signal.SIGINT)
    finally:
      display.end()
  print("\n".join(table(result["arms"])))
  print(result["verdict"])
  if args.json:
    write(args.json, json.dumps(result, indent=2) + "\n")
  return 0


def table(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Returns a line for each arm, with the estimates and their 95 % intervals."""
  from gtpo_jax.cli.probing.statistics import probe_rows

  rows = probe_rows(arms)
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
