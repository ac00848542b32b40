"""Config overrides that may make a run fit into memory."""

from __future__ import annotations

from typing import Any

from gtpo_jax.config import Config, flatten, freeze, to_dict


def candidate_overrides(config: Config, mesh: dict[str, int]) -> list[dict[str, Any]]:
  """Returns overrides that may make a run fit, the cheapest first.

  Each includes the ones before it, except the last two, which are alternatives: a wider context and
  a wider tensor axis. Smaller micro-batches only cost time. Host offload costs transfers. A wider
  context axis gathers keys and values, a wider tensor axis everything that enters a layer.

  Args:
    config: the run.
    mesh: the sizes of its mesh axes.
  """
  shards = mesh["data"] * mesh["fsdp"]
  max_micro_batches = config.batch.prompts // (config.batch.minibatches * shards)
  candidates = []
  override: dict[str, Any] = {}
  if max_micro_batches > config.batch.micro_batches:
    override = override | {"batch.micro_batches": max_micro_batches}
    candidates.append(override)
  if not config.optimizer.offload:
    override = override | {"optimizer.offload": True}
    candidates.append(override)
  if mesh["fsdp"] % 2 == 0:
    override = override | {
      "mesh.data": mesh["data"],
      "mesh.fsdp": mesh["fsdp"] // 2,
      "batch.micro_batches": 2 * max_micro_batches,
    }
    for axis in ("context", "tensor"):
      if _can_double(axis, config, mesh):
        candidates.append(override | {f"mesh.{axis}": 2 * mesh[axis]})
  return candidates


def _can_double(axis: str, config: Config, mesh: dict[str, int]) -> bool:
  """Whether model and positions divide if the context or tensor axis is twice as wide."""
  model = config.model_config
  over_tensor = [model.heads, model.mlp] if axis == "tensor" else []
  over_both = [model.vocab_size]
  if axis == "context" or mesh["context"] > 1:
    over_both.append(config.sampling.max_tokens)
  tensor = 2 * mesh["tensor"]
  both = 2 * mesh["context"] * mesh["tensor"]
  return not any(size % tensor for size in over_tensor) and not any(
    size % both for size in over_both
  )


def with_overrides(config: Config, override: dict[str, Any]) -> Config:
  """Returns the config with these values, given by dotted name."""
  values: dict[str, Any] = {}
  for name, value in (flatten(to_dict(config)) | override).items():
    *sections, key = name.split(".")
    section = values
    for section_name in sections:
      section = section.setdefault(section_name, {})
    section[key] = value
  return freeze(values)
