"""Names and layouts of Hugging Face weights: one table, read in both directions.

Shapes come from the parameters' declarations. A matrix is stored as torch stores a linear weight,
[outputs, inputs], each flattened to one axis. A vector is flattened. A table is stored unchanged.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.declaration import KINDS, Declaration, Kind
from gtpo_jax.models.kinds import LayerPlace
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.params import Params, abstract_params, at_path, declared_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.files import printable
from gtpo_jax.runtime.mesh import named_sharding

# Our modules, outside and within the layers, with their Hugging Face names, in the order in which
# we write the tensors. {} is the number of an expert, which has tensors of its own.
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
OUTER_NAMES: dict[tuple[str, ...], str] = {
  ("embedding",): EMBEDDING,
  ("norm", "scale"): "model.norm.weight",
  ("head",): HEAD,
}
LAYER_MODULES: dict[str, str] = {
  "attention_norm": "input_layernorm",
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "q_norm": "self_attn.q_norm",
  "k_norm": "self_attn.k_norm",
  "attention_post_norm": "post_attention_layernorm",
  "in_qkv": "linear_attn.in_proj_qkv",
  "in_z": "linear_attn.in_proj_z",
  "in_b": "linear_attn.in_proj_b",
  "in_a": "linear_attn.in_proj_a",
  "filters": "linear_attn.conv1d",
  "decay": "linear_attn",
  "delta_norm": "linear_attn.norm",
  "out": "linear_attn.out_proj",
  "mlp_norm": "post_attention_layernorm",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
  "experts.router": "mlp.gate",
  "experts.gate": "mlp.experts.{}.gate_proj",
  "experts.up": "mlp.experts.{}.up_proj",
  "experts.down": "mlp.experts.{}.down_proj",
  "experts.shared_gate": "mlp.shared_expert.gate_proj",
  "experts.shared_up": "mlp.shared_expert.up_proj",
  "experts.shared_down": "mlp.shared_expert.down_proj",
  "experts.shared_weight": "mlp.shared_expert_gate",
  "mlp_post_norm": "post_feedforward_layernorm",
}
LAYER_LEAVES: dict[str, str] = {
  "scale": "weight",
  "kernel": "weight",
  "bias": "bias",
  "filter": "weight",
  "a_log": "A_log",
  "dt_bias": "dt_bias",
}

LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
ROWS_COMPARED = 4096  # of two tables, at a time
MAX_NAMES = 8  # the most tensors that an error message lists


class HFTensor(NamedTuple):
  """One tensor of a Hugging Face folder, and the parameter (of one layer) that it stores."""

  name: str
  shape: tuple[int, ...]
  path: tuple[str, ...]  # the path of our parameter
  layer: LayerPlace | None  # where its layer is; None outside the layers
  layout: StoredLayout
  expert: int | None = None  # the index of its matrix on axis 1; None if there is only one


class StoredLayout(NamedTuple):
  """How one parameter (of one layer) is stored in a Hugging Face tensor."""

  kind: Kind
  shape: tuple[int, ...]  # in our format
  inputs: int  # number of leading axes that a matrix contracts
  parts: tuple[int, ...] = ()  # of the features of a head, see `Declaration`

  @classmethod
  def of(cls, leaf: str, declaration: Declaration, first: int) -> StoredLayout:
    """Returns how a parameter with this name is stored, from its axis `first` on."""
    shape = declaration.value.shape[first:]
    return cls(KINDS[leaf], shape, declaration.inputs, declaration.parts)

  @property
  def _of_parts(self) -> list[StoredLayout]:
    """How each part would be stored by itself; the tensor has one after the other."""
    axis = len(self.shape) + self._feature_axis
    return [
      self._replace(shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]), parts=())
      for size in self.parts
    ]

  @property
  def _feature_axis(self) -> int:
    """The axis of a head's features, which `parts` divides, counted from the last."""
    return -2 if self.kind is Kind.FILTER else -1

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the Hugging Face tensor."""
    if self.kind is Kind.FILTER:
      return math.prod(self.shape[:-1]), 1, self.shape[-1]
    if self.kind is Kind.MATRIX:
      return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
    return (math.prod(self.shape),) if self.kind is Kind.VECTOR else self.shape

  def to_stored(self, value: np.ndarray) -> np.ndarray:
    """Converts our array of `shape` to one of `stored_shape`, contiguous."""
    if self.parts:
      axis = self._feature_axis
      values = np.split(value, np.cumsum(self.parts)[:-1], axis)
      both = zip(self._of_parts, values, strict=True)
      return np.concatenate([layout.to_stored(value) for layout, value in both])
    if self.kind is Kind.MATRIX:
      value = value.reshape(self.stored_shape[::-1]).T
    return np.ascontiguousarray(value.reshape(self.stored_shape))

  def read(self, tensor: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Reads the slice `index` of our array from a stored tensor.

    Where several axes are stored as one, only the first of them may be sliced.
    """
    if self.kind is Kind.TABLE:
      return tensor[index]
    if self.parts:
      values = []
      start = 0
      for layout in self._of_parts:  # puts the parts of a head together
        rows = layout.stored_shape[0]
        values.append(layout.read(_Rows(tensor, start), index))
        start += rows
      return np.concatenate(values, self._feature_axis)
    cuts = zip(index, self.shape, strict=True)
    part = tuple(len(range(*cut.indices(size))) for cut, size in cuts)
    if self.kind is Kind.FILTER:
      return tensor[self._flat(index, slice(-1))].reshape(part)
    if self.kind is Kind.VECTOR:
      return tensor[self._flat(index, slice(None))].reshape(part)
    inputs = self._flat(index, slice(self.inputs))
    outputs = self._flat(index, slice(self.inputs, None))
    return tensor[outputs, inputs].T.reshape(part)

  def _flat(self, index: tuple[slice, ...], axes: slice) -> slice:
    """Converts the slices of several axes to one slice of the flattened axis."""
    first, *rest = index[axes]
    size, *inner = self.shape[axes]
    start, stop, _ = first.indices(size)
    if any(cut.indices(full) != (0, full, 1) for cut, full in zip(rest, inner, strict=True)):
      raise UserError(
        f"a parameter of shape {self.shape} is split over its inner axes; "
        "choose a mesh that keeps each head on one device"
      )
    return slice(start * math.prod(inner), stop * math.prod(inner))


class _Rows(NamedTuple):
  """The rows of a stored tensor from `start` on."""

  tensor: Any
  start: int

  def __getitem__(self, index: Any) -> np.ndarray:
    first, *rest = index if isinstance(index, tuple) else (index,)
    rows = slice(first.start + self.start, first.stop + self.start)
    return self.tensor[(rows, *rest)]


def hf_tensors(model: Transformer) -> list[HFTensor]:
  """Returns every Hugging Face tensor of the model without adapters, in the order of the files."""
  declared: dict[tuple[str, ...], Declaration] = flatten_dict(declared_params(without_lora(model)))
  layer_names = {
    (*module.split("."), leaf): f"{hf_module}.{suffix}"
    for module, hf_module in (LAYER_MODULES | model.config.family.modules).items()
    for leaf, suffix in LAYER_LEAVES.items()
  }
  places = model.config.places
  paths = {(*place.path, *leaf) for place in places for leaf in layer_names}
  if unnamed := declared.keys() - OUTER_NAMES.keys() - paths:
    names = ", ".join(sorted("/".join(path) for path in unnamed))
    raise ValueError(f"no Hugging Face name for {names}; add it to LAYER_MODULES or OUTER_NAMES")

  def tensors(name: str, path: tuple[str, ...], place: LayerPlace | None) -> list[HFTensor]:
    shape = declared[path].value.shape
    numbered = declared[path].numbered
    first = numbered + (place is not None)
    layout = StoredLayout.of(path[-1], declared[path], first)
    stored = layout.stored_shape
    if not numbered:
      return [HFTensor(name, stored, path, place, layout)]
    return [HFTensor(name.format(i), stored, path, place, layout, i) for i in range(shape[1])]

  outer = [
    tensor
    for path, name in OUTER_NAMES.items()
    if path in declared
    for tensor in tensors(name, path, None)
  ]
  layers = [
    tensor
    for layer, place in enumerate(places)
    for leaf, name in layer_names.items()
    if (*place.path, *leaf) in declared
    for tensor in tensors(f"model.layers.{layer}.{name}", (*place.path, *leaf), place)
  ]
  return outer + layers


def hf_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
  """Returns the Hugging Face names and shapes of all tensors, in the order of the files."""
  return {tensor.name: tensor.shape for tensor in hf_tensors(model)}


def read_hf(
  model: Transformer, tensors: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
  """Converts the tensors of a Hugging Face folder to our parameters, one after the other.

  Args:
    model: the architecture, without adapters, on its mesh.
    tensors: name -> NumPy array, or an object that is sliced like one. A process reads only the
      slices that its devices need.

  Yields:
    The path of each parameter, and the parameter on the model's mesh.

  Raises:
    UserError: tensors are missing, unknown or of the wrong shape; the message names them.
  """
  shapes = {name: tuple(x.shape) for name, x in tensors.items()}
  _check_sizes(model.config, shapes)
  entries = hf_tensors(model)
  _check_shapes(model.config, {entry.name: entry.shape for entry in entries}, shapes)
  if model.config.tied and HEAD in tensors:
    _check_tied(tensors)
  by_path: dict[tuple[str, ...], list[HFTensor]] = {}
  for entry in entries:
    by_path.setdefault(entry.path, []).append(entry)  # by layer, and within it by expert

  def convert(path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
    parts = by_path[path]
    leading = len(like.shape) - len(parts[0].layout.shape)  # the axes of layers and of experts
    numbers = np.arange(len(parts)).reshape(like.shape[:leading])

    def read(index: tuple[slice, ...]) -> np.ndarray:
      cuts = zip(index, like.shape, strict=True)
      out = np.empty([len(range(*cut.indices(size))) for cut, size in cuts], like.dtype)
      for place in np.ndindex(out.shape[:leading]):
        part = parts[numbers[index[:leading]][place]]
        with np.errstate(over="ignore"):  # the caller looks for infinity
          out[place] = part.layout.read(tensors[part.name], index[leading:])
      return out

    return _to_devices(like, read)

  for path, like in flatten_dict(abstract_params(model)).items():
    yield path, convert(path, like)


def _check_sizes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Raises a UserError if the tensors do not have a size that config.json states."""
  layers = {int(match[1]) for name in shapes if (match := LAYER.match(name))}
  if layers and max(layers) + 1 != config.layers:
    raise UserError(
      f"num_hidden_layers = {config.layers}, but there are tensors of {max(layers) + 1} layers"
    )
  heads = "num_attention_heads * head_dim"
  kv_heads = "num_key_value_heads * head_dim"
  queries = config.heads * config.head_dim * (2 if config.family.output_gate else 1)
  attention = f"model.layers.{config.layer_kinds.index(config.attention_kinds[0])}.self_attn"
  for key, size, name, axis in (
    ("vocab_size", config.vocab_size, EMBEDDING, 0),
    ("hidden_size", config.width, EMBEDDING, 1),
    (heads, queries, f"{attention}.q_proj.weight", 0),
    (kv_heads, config.kv_heads * config.head_dim, f"{attention}.k_proj.weight", 0),
    ("intermediate_size", config.mlp, "model.layers.0.mlp.gate_proj.weight", 0),
  ):
    shape = shapes.get(name)
    if shape and len(shape) == 2 and shape[axis] != size:
      raise UserError(f"{key} = {size}, but {printable(name)} has the shape {shape}")


def _check_shapes(
  config: ModelConfig,
  expected: Mapping[str, tuple[int, ...]],
  shapes: Mapping[str, tuple[int, ...]],
) -> None:
  """Raises a UserError unless the tensors' names and shapes are the expected ones."""
  # Some files also store a tied head, as a copy of the embedding, or the rotary frequencies.
  optional = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")}
  if config.tied:
    optional.add(HEAD)
  wrong = [
    f"{name} {shapes[name]} instead of {shape}"
    for name, shape in expected.items()
    if name in shapes and shapes[name] != shape
  ]
  for complaint, names in (
    ("missing", sorted(expected.keys() - shapes.keys())),
    ("not of this architecture", sorted(shapes.keys() - expected.keys() - optional)),
    ("of the wrong shape", wrong),
  ):
    if names:
      listed = ", ".join(map(printable, names[:MAX_NAMES])) + (" ..." * (len(names) > MAX_NAMES))
      settings = ", ".join(f"{key} = {value}" for key, value in _named_settings(config).items())
      raise UserError(f"{len(names)} tensor(s) {complaint}: {listed}; config.json has {settings}")


def _named_settings(config: ModelConfig) -> dict[str, Any]:
  """Returns the settings of config.json that decide which tensors there are."""
  biases = {
    key: set(matrices) <= set(config.biases)
    for key, matrices in config.family.optional_biases.items()
  }
  settings = {"model_type": config.model_type, "tie_word_embeddings": config.tied, **biases}
  if mixture := config.mixture:
    count = "num_experts (or num_local_experts)"
    settings |= {count: mixture.experts, config.family.expert_mlp: mixture.mlp}
    if config.family.shared_mlp:
      settings[config.family.shared_mlp] = mixture.shared
  return settings


def _check_tied(tensors: Mapping[str, Any]) -> None:
  """Raises a UserError if a stored head is not a copy of the embedding that it is tied to.

  Transformers would use such a head.
  """
  shapes = [tuple(tensors[name].shape) for name in (EMBEDDING, HEAD)]
  same = shapes[0] == shapes[1]
  count = shapes[0][0] if same else 0
  for start in range(0, count, ROWS_COMPARED):
    rows = slice(start, min(start + ROWS_COMPARED, count))
    same = same and np.array_equal(tensors[EMBEDDING][rows], tensors[HEAD][rows])
  if not same:
    raise UserError(
      f"tie_word_embeddings is true, but {HEAD} is not a copy of {EMBEDDING}; set "
      f"tie_word_embeddings to false in config.json to use it, or remove {HEAD}"
    )


def _to_devices(
  like: jax.ShapeDtypeStruct, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
  """Builds an array from shards, each read once and freed on the host before the next is read."""
  devices: dict[tuple, list[jax.Device]] = {}
  for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
    bounds = tuple(cut.indices(size) for cut, size in zip(index, like.shape, strict=True))
    devices.setdefault(bounds, []).append(device)
  shards = {}
  for bounds, holders in devices.items():
    part = read(tuple(slice(start, stop) for start, stop, _ in bounds))
    shards |= {device: jax.block_until_ready(jax.device_put(part, device)) for device in holders}
  return jax.make_array_from_single_device_arrays(like.shape, like.sharding, list(shards.values()))


def hf_from_params(model: Transformer, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  """Converts parameters to Hugging Face tensors, with adapters merged.

  This is the inverse of `read_hf`. Every process must consume the full iterator. Each device
  has one gathered layer in memory at a time.

  Yields:
    (name, host array) in the order of `hf_shapes`.
  """
  merged_layer = jax.jit(
    lambda layers, i: merge_lora(
      model, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), layers)
    ),
    out_shardings=named_sharding(model.mesh),
  )
  current = None
  weights = {}
  for entry in hf_tensors(model):
    if entry.layer is None:
      value = fetch(at_path(params, entry.path))
    else:
      if entry.layer != current:
        current = entry.layer
        weights = merged_layer(at_path(params, current.path), current.index)
      leaf = entry.path[len(current.path) :]
      value = at_path(weights, leaf).addressable_data(0)
      value = np.asarray(value if entry.expert is None else value[0, entry.expert])
    yield entry.name, entry.layout.to_stored(value)


def hf_from_adapters(model: Transformer, params: Params) -> dict[str, np.ndarray]:
  """Returns the adapters under PEFT's names: lora_A [rank, inputs] and lora_B [outputs, rank]."""
  declared = flatten_dict(declared_params(model))
  places = model.config.places
  out = {}
  leaves = itertools.product(LAYER_MODULES, (("lora_a", "lora_A"), ("lora_b", "lora_B")))
  for (layer, place), (module, (leaf, name)) in itertools.product(enumerate(places), leaves):
    path = (*place.path, *module.split("."), leaf)
    if path not in declared:
      continue
    declaration = declared[path]
    layout = StoredLayout.of(leaf, declaration, 1 + declaration.numbered)
    value = fetch(at_path(params, path)[place.index])
    stem = f"base_model.model.model.layers.{layer}.{LAYER_MODULES[module]}.{name}.weight"
    for i, matrix in enumerate(value if declaration.numbered else [value]):
      out[stem.format(i)] = layout.to_stored(matrix)
  return out
