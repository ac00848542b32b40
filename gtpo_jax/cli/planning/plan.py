"""`gtpo plan`: compiles a run for hardware that is not attached; reports memory and time bounds."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from gtpo_jax.cli.planning.collectives import collectives, send_seconds
from gtpo_jax.cli.planning.run_programs import CompiledProgram, RunPrograms, build_model
from gtpo_jax.cli.planning.search import Candidate, Search, changed, with_overrides
from gtpo_jax.cli.planning.topology import topology_devices, without_compile_cache
from gtpo_jax.config import Config, resolve_model, with_compute_dtype
from gtpo_jax.config.mesh_choice import proposing_mesh
from gtpo_jax.config.roofline import expected_seconds, sample_seconds, update_flops, update_seconds
from gtpo_jax.config.updates import RESERVE
from gtpo_jax.config.workloads import SAMPLING
from gtpo_jax.logs.summary import describe_expected
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.forecast import advice, lengths_from, planned
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device, island_of
from gtpo_jax.training.head_logits import default_chunk

# (text) -> a context within which the text is shown as the work in progress.
Waiting = Callable[[str], AbstractContextManager[None]]

TOLERANCE = 1.25  # of estimates, if nothing is estimated to fit
SAID_CUT = 0.05  # the share of completions of full length above which the forecast says it
MAX_TRIES = 4  # candidates that are compiled before the one that needs least memory


def silent(text: str) -> AbstractContextManager[None]:
  """A `Waiting` that shows nothing."""
  return contextlib.nullcontext()


@without_compile_cache()  # programs for absent devices cannot be read from it
def plan(
  config: Config, topology: str, waiting: Waiting = silent, lengths: str = ""
) -> dict[str, Any]:
  """Compiles a run's programs ahead of time; if they do not fit, searches for overrides.

  Args:
    config: the config of the run.
    topology: for example "v5p:4x4x4" (through libtpu), "h100:8" (through JAX's CUDA plugin), or
      "cpu:8" for virtual devices of this machine.
    waiting: shows which program is being compiled, such as `Display.waiting`.
    lengths: of completions, to say what `sampling.staleness` would change; see `lengths_from`.

  Returns:
    The result of `measure`, and: `topology`; `compute_dtype.reason`, why the run computes in this
    format; `refused`, why the config's own mesh cannot be used, or ""; `override`, flags with which
    the run fits, checked by compiling: "" if it fits without flags, None if no candidate fits; and
    `tried`, the changes that were compiled, each with its flags, its largest program or the first
    that does not fit, and the peak of that. If the mesh is refused, the numbers are those with the
    flags.

  Raises:
    UserError: the topology does not exist, or neither the config's mesh nor any other one works.
  """
  paths = lengths and lengths_from(lengths, config.sampling.max_tokens, config.policy_completions)
  devices, chip = topology_devices(topology)
  resolved = resolve_model(config, devices[0])
  config = with_compute_dtype(config, resolved.config.compute_dtype)
  result: dict[str, Any] = {"topology": topology, "refused": "", "override": "", "tried": []}
  result["compute_dtype.reason"] = resolved.compute_dtype_reason
  try:
    with proposing_mesh(config, devices):
      model = build_model(config, devices)
  except UserError as error:
    trials = _search(config, devices, chip, waiting)
    if not trials or not trials[-1].fits:
      raise
    found = trials[-1]
    config = with_overrides(config, found.override)
    result |= {"refused": str(error), "override": _flags(found.override)}
    result["tried"] = _described(trials)
    return result | measure(config, found.programs, chip, waiting)
  programs = RunPrograms(config, model)
  result |= measure(config, programs, chip, waiting)
  if paths:
    most = config.sampling.max_tokens
    full = np.mean([turns[0][0] == most for group in paths for turns in group])
    cut = f", of which {full:.0%} reach sampling.max_tokens = {most}" if full > SAID_CUT else ""
    simulation = planned(programs.config, programs.engine, paths, result)
    result["staleness"] = advice(simulation, f"lengths of {lengths}{cut}")
  if not result["fits"]:
    trials = _search(config, devices, chip, waiting)
    fits = bool(trials) and trials[-1].fits
    result |= {"override": _flags(trials[-1].override) if fits else None}
    result["tried"] = _described(trials)
  return result


def _flags(override: dict[str, Any]) -> str:
  return " ".join(f"--config.{name}={value}" for name, value in override.items())


class Trial(NamedTuple):
  """A change that was compiled."""

  override: dict[str, Any]  # config values by dotted name
  program: str  # the first program that does not fit, or the largest one if all do
  peak: int  # its bytes on one device
  fits: bool  # whether all fit
  programs: RunPrograms  # the programs of the run with the change, of which those are compiled


def _search(
  config: Config, devices: Sequence[jax.Device], chip: Chip, waiting: Waiting
) -> list[Trial]:
  """Compiles changes until one fits, and returns the compiled ones.

  The fastest ones that are estimated to fit come first. If none of them does, the combination of
  all levers that needs least memory is compiled too, so that a run is said not to fit only if that
  does not.
  """
  if chip.flops is None:  # nothing is known of a CPU but its memory
    return []
  limit = chip.usable_memory
  search = Search(config, len(devices), chip, [island_of(device) for device in devices])
  # The largest measured peaks of candidates that did not fit, over their estimates.
  update_correction = 1.0
  sampling_correction = 1.0
  trials: list[Trial] = []
  while len(trials) <= MAX_TRIES:
    found = search.candidates(
      update_memory=limit / update_correction,
      sampling_memory=limit * (1 - RESERVE) / sampling_correction,
    )
    if not found and not trials:  # the estimates may be too high
      least = search.by_memory()[:1]
      found = search.candidates(
        update_memory=max([limit, *(TOLERANCE * x.update for x in least)]),
        sampling_memory=max([limit, *(TOLERANCE * x.sampling for x in least)]),
      )
    compiled = [trial.override for trial in trials]
    found = [x for x in found if changed(config, x.override) not in compiled]
    chosen = _first_valid(config, devices, found) if len(trials) < MAX_TRIES else None
    chosen = chosen or _first_valid(config, devices, search.by_memory())
    if chosen is None or chosen[1] in compiled:
      return trials
    candidate, override, changed_config, model = chosen
    number = f"change {len(trials) + 1} of at most {MAX_TRIES + 1}"
    with waiting(f"trying {number}: {_flags(override)}"):
      trial = _try(override, RunPrograms(changed_config, model), limit)
    trials.append(trial)
    if trial.fits:
      return trials
    if trial.program == "update":
      update_correction = max(update_correction, trial.peak / candidate.update)
    else:
      sampling_correction = max(sampling_correction, trial.peak / candidate.sampling)
  return trials


def _first_valid(
  config: Config, devices: Sequence[jax.Device], found: Sequence[Candidate]
) -> tuple[Candidate, dict[str, Any], Config, Transformer] | None:
  """Returns the first candidate that the run accepts, as an override, a config and a model."""
  for candidate in found:
    override = changed(config, candidate.override)
    with contextlib.suppress(UserError):  # the search does not know every rule
      changed_config = with_overrides(config, override)
      return candidate, override, changed_config, build_model(changed_config, devices)
  return None


def _try(override: dict[str, Any], programs: RunPrograms, limit: int) -> Trial:
  """Compiles the programs of a change, usually the largest first, until one does not fit."""
  largest = None
  for program in itertools.chain(programs.compile_largest(), programs.compile()):
    if program.peak > limit:
      return Trial(override, program.name, program.peak, False, programs)
    if largest is None or program.peak > largest.peak:
      largest = program
  return Trial(override, largest.name, largest.peak, True, programs)


def _described(trials: Sequence[Trial]) -> list[dict[str, Any]]:
  """Returns the trials, for the result of `plan`."""
  return [
    {"override": _flags(x.override), "program": x.program, "peak_bytes": x.peak, "fits": x.fits}
    for x in trials
  ]


def measure(
  config: Config, run: RunPrograms, chip: Chip, waiting: Waiting = silent
) -> dict[str, Any]:
  """Compiles a run on its mesh and returns its memory, communication and lower bounds on its time.

  Args:
    config: the config of the run.
    run: its programs; none is compiled twice.
    chip: the kind of device.
    waiting: as in `plan`.

  Returns:
    For the run: `fits`, `devices`, `mesh`, `hbm_bytes` (memory of one device), `usable_bytes` (the
    part of it that programs can use), `compute_dtype`, `attention` (the kernel used for full
    sequences), `sample.attention` (the kernel of decoding), `remat`, `micro_batches` and `slots`
    (over all devices; if "auto", what they stand for), `head_chunk`, `params` (number of
    parameters), `programs` (of each kind of program the name, `peak_bytes` of the largest, how many
    a run may compile, and `seconds_compile` of the largest), `seconds_compile` (of all of these),
    `compile_minutes` (an estimate for everything that a run may compile, at this machine's speed).
    Per device: `params.bytes`, `optimizer.bytes` (in device memory), `cache.bytes` (the KV cache of
    the completions that are sampled concurrently), `update.peak_bytes`, `update.activation_bytes`
    (`update.peak_bytes` without state, batch and frozen models), `sample.peak_bytes` (including the
    state), `peak_bytes` (of all programs), `update.sent_bytes` (to other devices; None if the
    compiler ran out of memory). `update.flops` is the model FLOP of all devices together, without
    recomputation. `update.seconds` and `sample.seconds` are lower bounds (roofline), None if the
    speed of the chip is unknown. `step.expected_seconds`, `run.expected_seconds` (with evaluations
    and warm start) and a line about them, `expected`, follow the shares of the bounds that were
    measured.
  """
  config = run.config
  model = run.model
  state = run.state
  engine = run.engine
  programs = _compile_all(run, waiting)
  update, *others = programs
  devices = model.mesh.size
  sent = None if update.executable is None else collectives(update.executable.as_text())
  one_batch = dataclasses.replace(run.workloads[SAMPLING], prompts=config.batch.prompts)
  cache = engine.programs.abstract_state(one_batch)
  resident = run.frozen + bytes_per_device((state, run.batch))
  slots = engine.programs.sizes.longest_at_once
  mesh = engine.model.mesh.shape
  seconds: dict[str, float | None] = {"update.seconds": None, "sample.seconds": None}
  send_s = 0.0
  if chip.flops is not None:
    nodes = [island_of(device) for device in model.mesh.devices.flat]
    send_s = send_seconds(sent or [], chip, nodes)
    seconds["update.seconds"] = update_seconds(config, model.config, chip, devices, send_s)
    seconds["sample.seconds"] = sample_seconds(config, model.config, chip, mesh, slots)
  expected = expected_seconds(config, model.config, chip, dict(mesh), slots, send_s)
  peak = max(program.peak for program in programs)
  usable = chip.usable_memory
  sampling = [program.peak for program in others if program.name.startswith("sampling")]
  return {
    "devices": devices,
    "mesh": dict(model.mesh.shape),
    "hbm_bytes": chip.memory,
    "usable_bytes": usable,
    "compute_dtype": model.config.compute_dtype,
    "attention": attention_kind(model.config, model.mesh),
    "sample.attention": engine.programs.config.attention,
    "remat": config.model.remat,
    "micro_batches": config.batch.micro_batches,
    "slots": engine.programs.config.slots,
    "head_chunk": config.batch.head_chunk or default_chunk(model.mesh, model.config.vocab_size),
    "params": sum(x.size for x in jax.tree.leaves(state.params)),
    "params.bytes": bytes_per_device(state.params),
    "optimizer.bytes": bytes_per_device(state.opt_state),
    "cache.bytes": bytes_per_device(cache.kv),
    "update.peak_bytes": update.peak,
    "sample.peak_bytes": max(sampling, default=0),
    "peak_bytes": peak,
    "update.sent_bytes": None if sent is None else round(sum(x.sent for x in sent)),
    "update.activation_bytes": update.peak - resident,
    "update.flops": update_flops(config, model.config),
    **seconds,
    "step.expected_seconds": expected.step,
    "update.expected_seconds": expected.update,
    "run.expected_seconds": expected.rest(config, 0),
    "expected": describe_expected(expected, config),
    "fits": peak <= usable,
    "programs": [
      {
        "name": program.name,
        "peak_bytes": program.peak,
        "count": program.count,
        "seconds_compile": program.seconds,
      }
      for program in programs
    ],
    "seconds_compile": sum(program.seconds for program in programs),
    "compile_minutes": sum(program.count * program.seconds for program in programs) / 60,
  }


def _compile_all(programs: RunPrograms, waiting: Waiting) -> list[CompiledProgram]:
  """Compiles the programs and shows the progress."""
  compiled: list[CompiledProgram] = []
  remaining = programs.compile()
  while True:
    after = f", after {compiled[-1].name}" if compiled else ": the update"
    with waiting(f"compiling program {len(compiled) + 1}{after}"):
      program = next(remaining, None)
    if program is None:
      return compiled
    compiled.append(program)


GIB = 2**30
MIB = 2**20


def format_table(result: dict[str, Any]) -> str:
  """Returns the result of `plan` as a table of names and values."""

  def seconds(key: str) -> str:
    value = result[key]
    return "unknown" if value is None else f"at least {value:.3g} s (roofline)"

  mesh = " x ".join(f"{name} {count}" for name, count in result["mesh"].items())
  memory = f"{result['hbm_bytes'] / GIB:.2f} GiB"
  if result["usable_bytes"] < result["hbm_bytes"]:
    memory += f" ({result['usable_bytes'] / GIB:.2f} GiB usable)"
  topology = f"{result['topology']}: {result['devices']} device(s) of {memory}, mesh {mesh}"
  rows = [
    ("topology", topology),
    ("computing in", f"{result['compute_dtype']}, because {result['compute_dtype.reason']}"),
    ("attention", f"{result['attention']}; when sampling: {result['sample.attention']}"),
    ("update in", f"{result['micro_batches']} micro-batch(es), remat {result['remat']}"),
    ("slots", f"{result['slots']:9d} over all devices (sampling.slots)"),
    ("parameters", f"{result['params'] / 1e9:9.3f} billion"),
    ("logits in memory", f"{result['head_chunk']:9d} tokens per device (batch.head_chunk)"),
    ("per device: parameters", _size(result["params.bytes"])),
    ("per device: optimizer", _size(result["optimizer.bytes"])),
    ("per device: KV cache", _size(result["cache.bytes"])),
    ("per device: activations", _size(result["update.activation_bytes"])),
  ]
  for program in result["programs"]:
    size = _size(program["peak_bytes"])
    rows.append((f"peak, {program['name']}", f"{size}   {_programs(program['count'])}"))
  sent = result["update.sent_bytes"]
  count = sum(program["count"] for program in result["programs"])
  rows += [
    ("update sends, per device", "-" if sent is None else _size(sent)),
    ("update", f"{result['update.flops']:.3e} model FLOP, {seconds('update.seconds')}"),
    ("sampling, full length", seconds("sample.seconds")),
    ("time", result["expected"]),
    *([("staleness", result["staleness"])] if "staleness" in result else []),
    ("compile time", f"{result['seconds_compile']:.1f} s for the programs above"),
    (
      "compile time of a run",
      f"about {result['compile_minutes']:.0f} min at this machine's speed, if all {count} programs "
      "are needed; restarts read them from the compile cache",
    ),
  ]
  if result["refused"]:
    rows.append(("the config's mesh", f"refused: {result['refused']}"))
    rows.append(("planned with", result["override"]))
  for trial in result["tried"]:
    verdict = "fits" if trial["fits"] else "does not fit"
    peak = f"{trial['program']} needs {trial['peak_bytes'] / GIB:.2f} GiB"
    rows.append(("tried", f"{trial['override']}: {verdict}, {peak}"))
  rows.append(("fits", "yes" if result["fits"] else _advice(result)))
  return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _size(size: int) -> str:
  unit, divisor = ("GiB", GIB) if size >= GIB // 2 else ("MiB", MIB)
  return f"{size / divisor:9.2f} {unit}"


def _programs(count: int) -> str:
  return "1 program" if count == 1 else f"up to {count} programs"


def _advice(result: dict[str, Any]) -> str:
  """Returns the text of the line `fits` for a run that does not fit: what to change."""
  if result["override"]:
    return f"no, but it fits with {result['override']} (checked by compiling)"
  if not result["tried"]:
    return "no; use more devices, a smaller sampling.max_tokens or a smaller batch"
  return (
    "no; nor does any other combination of meshes, micro-batches, numbers of slots, places of the "
    "optimizer's moments and, under adapters, formats of the base: the one that needs least memory "
    "is among those tried; use more devices, a smaller sampling.max_tokens or model.lora_rank"
  )
