"""Config overrides that may make a run fit into memory."""

from __future__ import annotations

from typing import Any

from gtpo_jax.config import Config, flatten, freeze, resolve_model, to_dict


def candidate_overrides(config: Config, mesh: dict[str, int]) -> list[dict[str, Any]]:
  """Returns overrides that may make a run fit, the cheapest first.

  The candidates are smaller micro-batches, then also optimizer moments in host memory, then also
  half the fsdp axis with either a context or a tensor axis of twice the size. Each includes the
  ones before it; only the last two are alternatives. Smaller micro-batches cost only time. Moments
  in host memory cost transfers. A larger context axis gathers keys and values; a larger tensor axis
  gathers the inputs of every layer. Candidates that the config already has or that do not fit the
  sizes are left out.

  Args:
    config: the config of the run.
    mesh: the sizes of the run's mesh axes.
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
  """Returns whether model and positions can be sharded if `axis` has twice its size."""
  model = resolve_model(config).config
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
  """Returns the config with the values of `override`, which are given by dotted name."""
  values: dict[str, Any] = {}
  for name, value in (flatten(to_dict(config)) | override).items():
    *sections, key = name.split(".")
    section = values
    for section_name in sections:
      section = section.setdefault(section_name, {})
    section[key] = value
  return freeze(values)
