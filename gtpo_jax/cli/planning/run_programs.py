"""The programs of a run: all kinds that it can reach, and the memory that others need meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts
from gtpo_jax.checkpoint.opening import teacher_model
from gtpo_jax.cli.planning.topology import compile_deviceless
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.config.mesh_choice import check_divisible
from gtpo_jax.config.updates import fit_update, frozen_bytes, run_demand, run_optimizer, run_update
from gtpo_jax.config.workloads import SAMPLING, run_workloads
from gtpo_jax.loop.warm_start import UPDATES_PER_CALL
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.models.decode import DecodeParams, params_bytes
from gtpo_jax.models.params import abstract_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.batch import abstract_batches
from gtpo_jax.rollout.groups import without_scores
from gtpo_jax.runtime.chips import Chip, chip_of, host_memory
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import (
  axis_size,
  batch_shards,
  bytes_per_device,
  make_mesh,
  named_sharding,
)
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.inventory import Signature, Workload, count_kinds, reachable
from gtpo_jax.sampling.programs import Programs, ProgramSettings
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.log_probs import make_scorer
from gtpo_jax.training.state import abstract_state, make_optimizer


class CompiledProgram(NamedTuple):
  """The largest program of one kind, compiled."""

  name: str  # for example "update" or "evaluation: decode"
  peak: int  # bytes on one device while it runs, including everything else that is in memory then
  count: int  # the number of programs of this kind, for other shapes, that a run may compile
  seconds: float  # the time it took to compile
  # the program; None if the compiler ran out of device memory
  executable: jax.stages.Compiled | None


def build_model(config: Config, devices: list[Any]) -> Transformer:
  """Returns the run's model on a mesh of these devices."""
  config = with_choices(config, devices)
  if config.optimizer.offload and not devices[0].addressable_memories():
    raise UserError(
      "optimizer.offload cannot be planned for GPUs that are not attached, because JAX describes "
      "them without host memory; plan with --config.optimizer.offload=False, which needs more"
    )
  mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
  model = Transformer(resolve_model(config, devices[0]).config, mesh)
  check_divisible(config, model)
  abstract_params(model)  # raises an error if the mesh does not fit the model
  attention_kind(model.config, mesh)  # or if the device does not support the model
  teacher_model(config, model)  # or if either does not fit the teacher
  return model


def with_choices(config: Config, devices: list[Any]) -> Config:
  """Returns the config with the settings of the update that follow the memory of these devices."""
  chip = chip_of(devices[0])
  return fit_update(config, devices, chip, chip and chip.usable_memory)


def build_engine(config: Config, model: Transformer, teacher: Transformer | None = None) -> Engine:
  """Returns the run's engine. Its stop tokens are arbitrary: they do not change the programs.

  Its keys and values take the memory of the chips; on a CPU, of this machine.
  """
  device = model.mesh.devices.flat[0]
  chip = Chip(host_memory() // model.mesh.size) if device.platform == "cpu" else chip_of(device)
  settings = ProgramSettings(
    model,
    stop=[0],
    pad=0,
    max_prompt_tokens=config.data.max_prompt_tokens,
    max_tokens=config.sampling.max_tokens,
    config=config.engine_config,
    demand=run_demand(config, model, chip and chip.usable_memory, teacher=teacher),
  )
  return Engine(settings)


class RunPrograms:
  """Compiles the programs of a run ahead of time, the largest of each kind.

  A program is compiled once, however often it is asked for.

  Attributes:
    config: of the run; "auto" is replaced by the values for these devices.
    model: the run's model, on its mesh.
    optimizer: the run's optimizer.
    state: the shapes of its state.
    batch: the shapes of its rollouts and rewards.
    engine: its engine.
    workloads: everything that samples, by name; the policy comes first.
    teacher: the teacher, on the same mesh; None without one.
    frozen: bytes on one device of the frozen policies.
  """

  def __init__(self, config: Config, model: Transformer):
    """Args:
    config: the config of the run.
    model: from `build_model`.
    """
    config = with_choices(config, list(model.mesh.devices.flat))
    self.config = config
    self.model = model
    self.optimizer = run_optimizer(config, model)
    self.state = abstract_state(model, self.optimizer)
    batches = abstract_batches(config, model.mesh)
    self.batch = batches[-1]
    self._batches = len(batches)
    self.teacher = teacher_model(config, model)
    self.engine = build_engine(config, model, self.teacher)
    self.frozen = frozen_bytes(config, model, self.teacher)
    self.workloads = run_workloads(config)
    self._counted: set[Signature] = set()
    self._compiled: dict[str, CompiledProgram] = {}

  def compile(self) -> Iterator[CompiledProgram]:
    """Compiles the update, sampling and the rest, each when the iterator reaches it.

    The sampling of evaluations and of the guide is left out if the policy's takes at least as much
    memory; it is then counted with the policy's.
    """
    self._counted.clear()
    yield self.compile_update()
    yield self._layout
    if self._layout.executable is not None:
      names = list(self.workloads)
      while names:
        name, *rest = names
        ours = self.workloads[name]
        programs = self.engine.programs
        covered = [x for x in rest if _covers(programs, ours, self.workloads[x])]
        yield from self._compile_workload(name, covered)
        names = [other for other in rest if other not in covered]
      yield from self._compile_scoring()
    if self.config.warm_start.steps:
      imitate, arguments, count = _imitation(self.config, self.model)
      # It runs before anything frozen is loaded.
      yield self._compile("warm start", lambda: imitate.lower(*arguments), arguments, 0, count)

  def compile_largest(self) -> Iterator[CompiledProgram]:
    """Compiles the update and the policy's decoding, which usually need the most memory."""
    self._counted.clear()
    yield self.compile_update()
    yield self._layout
    if self._layout.executable is not None:
      yield from self._compile_workload(SAMPLING, skip=("prefill",))

  def compile_decode(self) -> CompiledProgram:
    """Compiles the program that decodes a chunk of the policy's completions in all slots."""
    programs = self._compile_workload(SAMPLING, skip=("prefill",))
    return next(program for program in programs if program.name == f"{SAMPLING}: decode")

  def compile_update(self) -> CompiledProgram:
    """Compiles the update of a batch whose completions have the maximum length."""
    config = self.config
    update = run_update(config, self.model, self.optimizer, self.teacher)
    arguments = (self.state, *self.batch)
    resident = self.frozen + _attention_workspace(config, self.model)
    if config.resolved_algorithm.recipe.matches_distributions and config.teacher.is_frozen:
      arguments += (abstract_params(self.teacher),)
      resident -= bytes_per_device(arguments[-1])
    lower = lambda: update.lower(*arguments)
    return self._compile("update", lower, arguments, resident, self._batches)

  @property
  def _layout(self) -> CompiledProgram:
    """The program that converts the parameters to the layout of sampling."""
    params = self.state.params
    # The program leaves out what is only passed on.
    resident = self.frozen + bytes_per_device(self.state.opt_state) + self._shared
    lower = lambda: self.engine.programs.layout.lower(params)
    return self._compile("layout", lower, params, resident, 1)

  @functools.cached_property
  def _decode_params(self) -> DecodeParams:
    """The shapes of the parameters in the layout of sampling."""
    layout = self.engine.programs.layout
    return layout.abstract(self.state.params, self._layout.executable)

  @functools.cached_property
  def _shared(self) -> int:
    """Bytes on one device of arrays that update and sampler both read."""
    return params_bytes(self.engine.model, self.model).shared

  def _compile_workload(
    self, name: str, covered: Sequence[str] = (), skip: Sequence[str] = ()
  ) -> Iterator[CompiledProgram]:
    """Compiles the largest program of each kind of one workload, but none of the kinds `skip`.

    The programs of the workloads `covered` are counted with them, and each program only once.
    """
    params = self._decode_params
    resident = self.frozen + bytes_per_device((self.state.params, self.state.opt_state))
    resident -= self._shared  # it is among `params`
    workloads = [self.workloads[x] for x in (name, *covered)]
    found = reachable(self.engine.programs, workloads)
    counts = count_kinds(found.keys() - self._counted)
    self._counted |= found.keys()
    done = set(skip)
    for program in self.engine.programs.inventory(self.workloads[name]):
      kind = program.kind
      if kind not in done and counts[kind] and program.beside:
        done.add(kind)
        beside = program.beside() if program.reads_params else (params, program.beside())
        yield self._compile(
          f"{name}: {kind}",
          functools.partial(program.lower, params),
          program.in_memory(params),
          resident + bytes_per_device(beside),
          counts[kind],
        )

  def _compile_scoring(self) -> Iterator[CompiledProgram]:
    """Compiles the programs that compute log-probs of a batch, by policy, reference and teacher."""
    config = self.config
    settings = config.resolved_algorithm.settings
    rollouts = without_scores(self.batch[0])
    params = self.state.params
    corrections = config.resolved_algorithm.recipe.corrections
    scorers = []
    if corrections.needs_rescoring:
      scorers.append(("rescoring", self.model, params))
    if "score_norms" in config.resolved_algorithm.recipe.needs:
      scorers.append(("score_norms", self.model, params))
    if settings.kl_weight:
      scorers.append(("reference", self.model, params))
    if self.teacher and not config.resolved_algorithm.recipe.matches_distributions:
      read = abstract_params(self.teacher) if config.teacher.is_frozen else params
      scorers.append(("teacher", self.teacher, read))
    batch = config.batch
    for name, model, read in scorers:
      options = config.sampling.temperature, batch.parts, batch.head_chunk
      scorer = make_scorer(model, *options, norms=name == "score_norms")
      resident = self.frozen + bytes_per_device((self.state.opt_state, self._decode_params))
      resident -= self._shared
      # The policy's parameters are in memory too; the program counts what it reads.
      resident += bytes_per_device(params) - bytes_per_device(read)
      arguments = (read, rollouts.for_teacher if name == "teacher" else rollouts)
      lower = functools.partial(scorer.lower, *arguments)
      yield self._compile(name, lower, arguments, resident, self._batches)

  def _compile(
    self,
    name: str,
    lower: Callable[[], jax.stages.Lowered],
    arguments: Any,
    resident: int,
    count: int,
  ) -> CompiledProgram:
    if name not in self._compiled:
      lowered = lower()
      began = time.perf_counter()
      peak, executable = compile_with_peak(lowered, arguments)
      seconds = time.perf_counter() - began
      self._compiled[name] = CompiledProgram(name, peak + resident, count, seconds, executable)
    return self._compiled[name]._replace(count=count)


def _covers(programs: Programs, ours: Workload, theirs: Workload) -> bool:
  """Returns whether the programs of a workload take at least the memory of another one's."""
  memory = lambda workload: bytes_per_device(programs.abstract_state(workload))
  filtered = theirs.sampling_params.is_filtered and theirs.sampling_params.temperature > 0
  same = ours.sampling_params.filters == theirs.sampling_params.filters
  return memory(ours) >= memory(theirs) and (same or not filtered)


def _imitation(config: Config, model: Transformer) -> tuple[Any, tuple[Any, ...], int]:
  """Returns the updates of the warm start, the shapes of their arguments, and their number."""
  section = config.warm_start
  optimizer = make_optimizer(section.optimizer, section.steps, model=model)
  imitate = make_imitation(model, optimizer, config.batch.head_chunk)
  sharding = named_sharding(model.mesh, None, "batch")
  k = min(UPDATES_PER_CALL, section.steps)
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(
    (k, section.batch, *shape), dtype, sharding=sharding
  )
  t = config.sampling.max_tokens
  prompts = Prompts(array(jnp.int32, config.data.max_prompt_tokens), array(jnp.int32))
  demonstrations = Demonstrations(prompts, array(jnp.int32, t), array(jnp.bool, t))
  arguments = (abstract_state(model, optimizer), demonstrations)
  return imitate, arguments, 1 + bool(section.steps > k and section.steps % k)


def _attention_workspace(config: Config, model: Transformer) -> int:
  """Returns the bytes that cuDNN's backward pass allocates, which XLA does not know of here.

  It adds up the gradient of the queries in float32.
  """
  c = model.config
  mesh = model.mesh
  if attention_kind(c, mesh) != "cudnn":
    return 0
  parts = config.batch.minibatches * config.batch.micro_batches * batch_shards(mesh)
  rows = config.batch.prompts * config.batch.group // parts
  positions = config.data.max_prompt_tokens + config.sampling.max_tokens
  return 4 * rows * positions * c.heads // axis_size(mesh, "heads") * c.head_dim


def compile_with_peak(
  lowered: jax.stages.Lowered, arguments: Any
) -> tuple[int, jax.stages.Compiled | None]:
  """Compiles a program for devices that need not be present.

  Returns the peak bytes on one device, including the arguments in device memory, and the program.
  If compilation fails for lack of memory, the program is None, and the bytes are those that the
  compiler reports.
  """
  devices = list(jax.tree.leaves(arguments)[0].sharding.device_set)
  try:
    compiled = compile_deviceless(lowered, devices)
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not needed:
      raise
    temporaries, temporaries_unit, total, total_unit = needed.groups()
    if temporaries:
      return _to_bytes(temporaries, temporaries_unit) + bytes_per_device(arguments), None
    return _to_bytes(total, total_unit), None
  analysis = compiled.memory_analysis()
  # The peak that XLA reports for a CPU program does not include its temporaries.
  omitted = analysis.temp_size_in_bytes if devices[0].platform == "cpu" else 0
  return analysis.peak_memory_in_bytes + omitted, compiled


def _to_bytes(number: str, unit: str) -> int:
  return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))
