"""Small models and small runs that the tests of several folders use."""

import jax

from gtpo_jax.config import default_config, freeze
from gtpo_jax.logs.display import Display
from gtpo_jax.models import ModelConfig, Transformer, abstract_params, init_params
from gtpo_jax.models.config import EXPERTS
from gtpo_jax.models.hf.save import save
from gtpo_jax.models.kinds import LayerKind, Mixture
from gtpo_jax.runtime.mesh import single_device_mesh

TOY = ModelConfig(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64)
# Two of three layers have experts, of which there is an odd number.
TOY_EXPERTS = ModelConfig(
  vocab_size=48,
  width=32,
  layers=3,
  heads=2,
  kv_heads=1,
  head_dim=16,
  mlp=64,
  model_type="qwen2_moe",
  kinds=(LayerKind(mlp=EXPERTS), LayerKind()),
  mixture=Mixture(5, 2, 24, normalised=True, shared=16),
)
# Another family than that of a run's policy, and another size, for our tokenizer.
LLAMA = ModelConfig(
  vocab_size=390,
  width=64,
  layers=2,
  heads=2,
  kv_heads=2,
  head_dim=32,
  mlp=96,
  tied=False,
  biases=(),
  model_type="llama",
  context=64,
)
SMALL_RUN = {  # by dotted name
  "data.terms": 2,
  "data.max_prompt_tokens": 20,
  "sampling.max_tokens": 14,
  "batch.prompts": 8,
  "batch.group": 4,
  "eval.every": 0,
  "eval.problems": 8,
  "eval.samples": 1,
  "eval.batch": 8,
  "optimizer.learning_rate": 1e-3,
  "log.tensorboard": False,
}


ADDITIONS = [
  {"prompt": f"{a}+{b}:", "answer": str(a + b)} for a in range(2, 8) for b in range(2, 8)
]
# Prefixes of metrics that depend on the time or on the process.
TIMING = ("time/", "tokens/s", "compiles")


def lasting(rows):
  """Returns rows of metrics without those of `TIMING`."""
  return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in rows]


def even(prompts, completions, answers, extras):
  """A verifier that a random model passes about half of the time."""
  return [len(text) % 2 == 0 for text in completions]


def nested(values):
  """Returns {"a.b": 1}, or {"a__b": 1}, as {"a": {"b": 1}}."""
  tree = {}
  for name, value in values.items():
    *sections, last = name.replace("__", ".").split(".")
    section = tree
    for part in sections:
      section = section.setdefault(part, {})
    section[last] = value
  return tree


def config_of(**changes):
  """Returns the default config with these values by dotted name."""
  config = default_config()
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return freeze(config)


def small_run(**changes):
  """Returns the config of a small run on sums, with these values by dotted name."""
  return config_of(**{**SMALL_RUN, **changes})


def strong(config, mesh=None, factor=4):
  """Returns a model and random parameters times `factor`, so that distributions are peaked.

  The parameters have the same values on every mesh.
  """
  alone = Transformer(config, single_device_mesh())
  model = Transformer(config, mesh) if mesh else alone
  params = init_params(alone, jax.random.key(0))
  place = lambda x, like: jax.device_put(factor * x, like.sharding)
  return model, jax.tree.map(place, params, abstract_params(model))


def save_llama(folder, tokenizer):
  """Saves a small Llama with random weights; returns its model and parameters."""
  model = Transformer(LLAMA, single_device_mesh())
  params = init_params(model, jax.random.key(5))
  save(model, params, tokenizer, folder)
  return model, params


class Listener(Display):
  """Keeps the messages of a run."""

  def __init__(self):
    super().__init__(enabled=False)
    self.said = []

  def say(self, text):
    self.said.append(text)
