"""What the search and the pool of pages take programs to need, against compiled programs."""

import json

import pytest
from plan_cases import needs_libtpu, small_config

from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model, compile_with_peak
from gtpo_jax.cli.planning.search import Base, Search
from gtpo_jax.cli.planning.topology import topology_devices, without_compile_cache
from gtpo_jax.config.workloads import SAMPLING
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.paged.memory import temporary_bytes

pytestmark = [pytest.mark.manual, needs_libtpu]

ARCHITECTURE = {
  "model_type": "llama",
  "vocab_size": 32768,
  "hidden_size": 1024,
  "num_hidden_layers": 4,
  "num_attention_heads": 16,
  "num_key_value_heads": 4,
  "head_dim": 64,
  "intermediate_size": 4096,
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1e4,
  "max_position_embeddings": 32768,
}
RUN = {
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
  "model.compute_dtype": "bfloat16",
  "batch.prompts": 8,
  "batch.group": 4,
  "data.max_prompt_tokens": 512,
  "sampling.max_tokens": 2048,
  "sampling.slots": 16,  # as many prompts may be read at once, 8,192 tokens
  "sampling.cache_fraction": 0.001,  # as few pages as one prompt and one completion need
}


@pytest.fixture
def one_chip(tmp_path):
  """Returns the programs of a run on one chip, the search for it, and the run's levers."""
  (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
  config = small_config(**RUN, **{"model.path": str(tmp_path)})
  devices, chip = topology_devices("v5e:1x1")
  run = RunPrograms(config, build_model(config, devices))
  levers = Base(dict(run.model.mesh.shape), config.optimizer.offload, "")
  return run, Search(run.config, 1, chip, [0]), levers


@without_compile_cache()
def test_temporaries_of_sampling_are_bounded(one_chip):
  """The pool leaves room for what a program has beside its arguments; at most 4 times too much."""
  run, search, base = one_chip
  programs = run.engine.programs
  params = run._decode_params
  state = bytes_per_device((run.state.params, run.state.opt_state))
  temporaries, peaks = {}, {}
  for program in programs.inventory(run.workloads[SAMPLING]):
    if program.kind in ("prefill", "decode") and program.kind not in peaks:
      arguments = program.in_memory(params)
      peak, executable = compile_with_peak(program.lower(params), arguments)
      assert executable is not None
      temporaries[program.kind] = peak - bytes_per_device(arguments)
      peaks[program.kind] = peak + state
  most = max(temporaries.values())
  planned = temporary_bytes(programs.model, programs.sizes.slots, programs.sizes.pool)
  estimate = search.memory.sampling_bytes(base, programs.sizes.slots * programs.shards)
  print(f"{temporaries} of {planned}; peaks {peaks}, estimated {estimate:.0f}")
  assert most <= planned <= 4 * most
  assert estimate == pytest.approx(max(peaks.values()), rel=0.3)


@without_compile_cache()
def test_the_update_needs_about_what_the_search_takes_it_to(one_chip):
  run, search, base = one_chip
  micro_batches = search.config.batch.micro_batches
  estimate = search.memory.update_bytes(base, micro_batches)
  program = run.compile_update()
  assert program.executable is not None
  print(f"{program.peak} estimated {estimate:.0f}: {estimate / program.peak:.2f}")
  assert estimate == pytest.approx(program.peak, rel=0.4)
