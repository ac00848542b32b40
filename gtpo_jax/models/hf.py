"""Names and layouts of Hugging Face Qwen2 weights: one table, read in both directions."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from gtpo_jax.errors import UserError
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params

# Our path within a layer, its Hugging Face name, and whether that is a torch linear weight [out, in].
LAYER_NAMES: tuple[tuple[tuple[str, str], str, bool], ...] = (
    (("attention_norm", "scale"), "input_layernorm.weight", False),
    (("q", "kernel"), "self_attn.q_proj.weight", True),
    (("q", "bias"), "self_attn.q_proj.bias", False),
    (("k", "kernel"), "self_attn.k_proj.weight", True),
    (("k", "bias"), "self_attn.k_proj.bias", False),
    (("v", "kernel"), "self_attn.v_proj.weight", True),
    (("v", "bias"), "self_attn.v_proj.bias", False),
    (("o", "kernel"), "self_attn.o_proj.weight", True),
    (("mlp_norm", "scale"), "post_attention_layernorm.weight", False),
    (("gate", "kernel"), "mlp.gate_proj.weight", True),
    (("up", "kernel"), "mlp.up_proj.weight", True),
    (("down", "kernel"), "mlp.down_proj.weight", True),
)
OUTER_NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("embedding",), "model.embed_tokens.weight"),
    (("norm", "scale"), "model.norm.weight"),
    (("head",), "lm_head.weight"),
)


def params_from_hf(model: Qwen2, tensors: Mapping[str, np.ndarray]) -> Params:
  """Our parameters, on the model's mesh, from a Hugging Face state dict of a Qwen2ForCausalLM.

  Raises:
    UserError: a tensor is missing, left over, or of another shape; all names are listed.
  """
  expected = {name: shape for name, shape, *_ in _entries(model)}
  tied_head = {"lm_head.weight"} if model.config.tied else set()  # some files carry the tied head a second time
  missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys() - tied_head)
  wrong = [f"{name} {tensors[name].shape} instead of {shape}" for name, shape in expected.items()
           if name in tensors and tensors[name].shape != shape]
  for what, names in (("missing", missing), ("not of this architecture", extra), ("of the wrong shape", wrong)):
    if names:
      raise UserError(f"{len(names)} tensor(s) {what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")

  params = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract_params(model))
  for name, _, path, layer, linear in _entries(model):
    target = _at(params, path) if layer is None else _at(params, path)[layer]
    value = np.asarray(tensors[name])
    target[...] = (value.T if linear else value).reshape(target.shape)
  return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract_params(model))


def hf_from_params(model: Qwen2, params: Params) -> dict[str, np.ndarray]:
  """The inverse of `params_from_hf`: Hugging Face names and layouts, as NumPy arrays."""
  params, out = jax.device_get(params), {}
  for name, shape, path, layer, linear in _entries(model):
    value = _at(params, path) if layer is None else _at(params, path)[layer]
    out[name] = np.ascontiguousarray(value.reshape(shape[::-1]).T if linear else value.reshape(shape))
  return out


def _entries(model: Qwen2) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], int | None, bool]]:
  """(Hugging Face name, its shape, our path, layer, is a linear weight) of every tensor."""
  c = model.config
  features = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim, "o": c.width,
              "gate": c.mlp, "up": c.mlp, "down": c.width}
  inputs = {"o": c.heads * c.head_dim, "down": c.mlp}
  for path, name in OUTER_NAMES:
    if path != ("head",) or not c.tied:
      yield name, (c.width,) if path[0] == "norm" else (c.vocab_size, c.width), path, None, False
  for layer in range(c.layers):
    for (module, leaf), name, linear in LAYER_NAMES:
      shape = (features.get(module, c.width), inputs.get(module, c.width)) if linear else (features.get(module, c.width),)
      yield f"model.layers.{layer}.{name}", shape, ("layers", module, leaf), layer, linear


def _at(params: Params, path: tuple[str, ...]) -> np.ndarray:
  for key in path:
    params = params[key]
  return params
