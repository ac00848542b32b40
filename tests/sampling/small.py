"""A model small enough to sample many times, and engines over it."""

import jax

from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.slots import EngineConfig

CONFIG = ModelConfig(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
ENGINE_CONFIG = EngineConfig(chunk=4)
STOP = (7, 11)
PAD = 3
LONGEST = 10


def build(
  mesh=None, config=CONFIG, longest=LONGEST, stop=STOP, prompt=6, engine_config=ENGINE_CONFIG
):
  """A model with the same random weights on any mesh, its engine, and the weights laid out for sampling."""
  model = Qwen2(config, mesh or single_device_mesh())
  params = init_params(Qwen2(config, single_device_mesh()), jax.random.key(0))
  params = jax.tree.map(
    lambda x, like: jax.device_put(x * 4, like.sharding), params, abstract_params(model)
  )
  engine = Engine(
    model, stop, PAD, max_prompt_tokens=prompt, max_tokens=longest, engine_config=engine_config
  )
  return params, engine, engine.layout(params)
