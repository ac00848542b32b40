"""The overrides that `gtpo plan` tries."""

from plan_cases import small_config

from gtpo_jax.planning.overrides import candidate_overrides, with_overrides


def test_candidates_by_hand():
  config = small_config(**{"batch.prompts": 32, "mesh.data": 1, "mesh.fsdp": 4})
  mesh = {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
  micro_batches = {"batch.micro_batches": 8}
  offload = micro_batches | {"optimizer.offload": True}
  half_fsdp = offload | {"mesh.data": 1, "mesh.fsdp": 2, "batch.micro_batches": 16}
  wide_context = half_fsdp | {"mesh.context": 2}
  wide_tensor = half_fsdp | {"mesh.tensor": 4}
  candidates = candidate_overrides(config, mesh)
  assert candidates == [micro_batches, offload, wide_context, wide_tensor]
  assert with_overrides(config, offload).batch.micro_batches == 8


def test_axes_are_widened_only_if_they_divide_the_model():
  changes = {"batch.prompts": 32, "batch.micro_batches": 16, "optimizer.offload": True}
  mesh = {"data": 1, "fsdp": 2, "context": 1, "tensor": 4}
  config = small_config(**changes, **{f"mesh.{name}": size for name, size in mesh.items()})
  # Four heads do not divide over tensor 8.
  wide_context = {"mesh.data": 1, "mesh.fsdp": 1, "batch.micro_batches": 32, "mesh.context": 2}
  assert candidate_overrides(config, mesh) == [wide_context]
  odd = with_overrides(config, {"sampling.max_tokens": 41})
  assert candidate_overrides(odd, mesh) == []
