"""Names and layouts of Hugging Face Qwen2 weights: one table, read in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.lora import merge_lora
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.files import printable
from gtpo_jax.runtime.mesh import named_sharding

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


def params_from_hf(model: Qwen2, tensors: Mapping[str, Any]) -> Params:
  """Our parameters, on the model's mesh, from the tensors of a Hugging Face Qwen2ForCausalLM.

  Args:
    model: the architecture on its mesh.
    tensors: by name, NumPy arrays or what is sliced like them. A process reads only what its devices hold.

  Raises:
    UserError: a tensor is missing, left over, or of another shape; all names are listed.
  """
  shapes = {name: tuple(x.shape) for name, x in tensors.items()}
  if model.config.layers > len(shapes):  # before the names of a billion layers are listed
    raise UserError(
      f"num_hidden_layers = {model.config.layers}, but there are {len(shapes)} tensors in all; some are missing"
    )
  entries = list(_entries(model))
  expected = {name: shape for name, shape, *_ in entries}
  tied_head = (
    {"lm_head.weight"} if model.config.tied else set()
  )  # some files carry the tied head a second time
  missing = sorted(expected.keys() - shapes.keys())
  extra = sorted(shapes.keys() - expected.keys() - tied_head)
  wrong = [
    f"{name} {shapes[name]} instead of {shape}"
    for name, shape in expected.items()
    if name in shapes and shapes[name] != shape
  ]
  for what, names in (
    ("missing", missing),
    ("not of this architecture", extra),
    ("of the wrong shape", wrong),
  ):
    if names:
      raise UserError(
        f"{len(names)} tensor(s) {what}: {', '.join(map(printable, names[:8]))}{' ...' if len(names) > 8 else ''}"
      )

  sources: dict[tuple[str, ...], list[str]] = {}
  for name, _, path, _, _ in entries:
    sources.setdefault(path, []).append(name)  # of a stacked parameter, one a layer, in order

  def place(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
    keys = tuple(key.key for key in path)
    names = sources[keys]
    stacked = keys[0] == "layers"
    inputs = {"kernel": 2 if keys[-2:] == ("o", "kernel") else 1}.get(keys[-1])

    def read(index: tuple[slice, ...]) -> np.ndarray:
      part = np.empty(
        [len(range(*cut.indices(size))) for cut, size in zip(index, like.shape, strict=True)],
        like.dtype,
      )
      if stacked:
        for i, name in enumerate(names[index[0]]):
          part[i] = _read(tensors[name], index[1:], like.shape[1:], inputs)
      else:
        part[...] = _read(tensors[names[0]], index, like.shape, inputs)
      return part

    return _place(like, read)

  return jax.tree.map_with_path(place, abstract_params(model))


def _place(
  like: jax.ShapeDtypeStruct, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
  """An array from its parts; each is read once, and let go of on the host before the next is read."""
  devices: dict[tuple, list[jax.Device]] = {}
  for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
    devices.setdefault(
      tuple(cut.indices(size) for cut, size in zip(index, like.shape, strict=True)), []
    ).append(device)
  placed = {}
  for key, where in devices.items():
    part = read(tuple(slice(start, stop) for start, stop, _ in key))
    placed |= {device: jax.block_until_ready(jax.device_put(part, device)) for device in where}
  return jax.make_array_from_single_device_arrays(like.shape, like.sharding, list(placed.values()))


def _read(
  tensor: Any, index: tuple[slice, ...], shape: tuple[int, ...], inputs: int | None
) -> np.ndarray:
  """The part `index` of our parameter of `shape`, out of its Hugging Face tensor.

  A kernel lies there as a matrix [outputs, inputs], `inputs` being how many leading axes of ours are inputs; a bias (None) as
  a vector. Only the first axis of several that were flattened together may be cut.
  """

  def flat(axes: slice) -> slice:
    (first, *rest) = index[axes]
    (size, *inner) = shape[axes]
    start, stop, _ = first.indices(size)
    if any(cut.indices(whole) != (0, whole, 1) for cut, whole in zip(rest, inner, strict=True)):
      raise UserError(
        f"a parameter of shape {shape} is split over its inner axes; choose a mesh that splits heads whole"
      )
    return slice(start * math.prod(inner), stop * math.prod(inner))

  part = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True))
  if inputs:
    return tensor[flat(slice(inputs, None)), flat(slice(inputs))].T.reshape(part)
  if len(tensor.shape) == 1:
    return tensor[flat(slice(None))].reshape(part)
  return tensor[index]


def hf_shapes(model: Qwen2) -> dict[str, tuple[int, ...]]:
  """The Hugging Face names and shapes of all tensors, in order."""
  return {name: shape for name, shape, *_ in _entries(model)}


def hf_from_params(model: Qwen2, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  """The inverse of `params_from_hf`, adapters merged: Hugging Face names and layouts in the order of `hf_shapes`.

  They come as host arrays one after another, beside one whole layer on each device. Every process must take them all.
  """
  cut = jax.jit(
    lambda layers, i: merge_lora(
      model, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), layers)
    ),
    out_shardings=named_sharding(model.mesh),
  )
  at = -1
  weights = {}
  for name, shape, path, layer, linear in _entries(model):
    if layer is not None and layer != at:
      at = layer
      weights = {"layers": cut(params["layers"], layer)}
    value = (
      fetch(_at(params, path))
      if layer is None
      else np.asarray(_at(weights, path).addressable_data(0))
    )
    yield (
      name,
      np.ascontiguousarray(value.reshape(shape[::-1]).T if linear else value.reshape(shape)),
    )


def hf_from_adapters(model: Qwen2, params: Params) -> dict[str, np.ndarray]:
  """The adapters as PEFT names and lays them out: `lora_A` [rank, inputs] and `lora_B` [outputs, rank]."""
  out = {}
  rank = model.config.lora.rank
  for layer in range(model.config.layers):
    for (module, leaf), name, _ in LAYER_NAMES:
      if leaf == "kernel" and module in model.config.lora.targets:
        weights = params["layers"][module]
        stem = f"base_model.model.model.layers.{layer}.{name.removesuffix('.weight')}"
        a, b = (fetch(weights[which][layer]) for which in ("lora_a", "lora_b"))
        out[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
        out[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
  return out


def _entries(
  model: Qwen2,
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], int | None, bool]]:
  """(Hugging Face name, its shape, our path, layer, is a linear weight) of every tensor."""
  c = model.config
  features = {
    "q": c.heads * c.head_dim,
    "k": c.kv_heads * c.head_dim,
    "v": c.kv_heads * c.head_dim,
    "o": c.width,
    "gate": c.mlp,
    "up": c.mlp,
    "down": c.width,
  }
  inputs = {"o": c.heads * c.head_dim, "down": c.mlp}
  for path, name in OUTER_NAMES:
    if path != ("head",) or not c.tied:
      yield name, (c.width,) if path[0] == "norm" else (c.vocab_size, c.width), path, None, False
  for layer in range(c.layers):
    for (module, leaf), name, linear in LAYER_NAMES:
      shape = (
        (features.get(module, c.width), inputs.get(module, c.width))
        if linear
        else (features.get(module, c.width),)
      )
      yield f"model.layers.{layer}.{name}", shape, ("layers", module, leaf), layer, linear


def _at(params: Params, path: tuple[str, ...]) -> jax.Array:
  for key in path:
    params = params[key]
  return params
