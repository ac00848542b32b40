"""Reads and writes the rotary settings of a model's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from gtpo_jax.models.attention.rope import Linear, Llama3Scaling, RopeScaling, Yarn
from gtpo_jax.models.families import Family
from gtpo_jax.models.hf.json_values import check_same, number, shown, size
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import ABOVE_1
from gtpo_jax.runtime.fields import SHARE as A_SHARE
from gtpo_jax.runtime.files import printable

# types of layers
FULL, SLIDING, LINEAR = ("full_attention", "sliding_attention", "linear_attention")
LOCAL_THETA = 1e4  # of layers with a window, if they have a key of their own
SUPPORTED = {"partial_rotary_factor": 1.0, "truncate": True}
ROPE_KEYS = ("rope_parameters", "rope_scaling")
SHARE = "partial_rotary_factor"
# Which features are rotated by the places in an image. In a text, all places are the position.
OF_IMAGES = ("mrope_section", "mrope_interleaved")


class RopeType(NamedTuple):
  """A kind of RoPE scaling: our class, and its fields by the names of their settings."""

  scaling: type[RopeScaling]
  fields: Mapping[str, str]


ROPE_TYPES = {
  "linear": RopeType(Linear, {"factor": "factor"}),
  "yarn": RopeType(
    Yarn,
    {
      "factor": "factor",
      "original_max_position_embeddings": "original",
      "beta_fast": "beta_fast",
      "beta_slow": "beta_slow",
      "attention_factor": "attention_factor",
    },
  ),
  "llama3": RopeType(
    Llama3Scaling,
    {
      "factor": "factor",
      "original_max_position_embeddings": "original",
      "low_freq_factor": "low_freq_factor",
      "high_freq_factor": "high_freq_factor",
    },
  ),
}


def read_ropes(
  values: dict[str, Any], family: Family, path: str, context: int
) -> tuple[float, RopeScaling | None, float | None]:
  """Returns `read_rope` of the layers, and the base of layers with a window if it is their own."""
  if family.rope_share:
    # Without the share, and without keys that only images need.
    kept = lambda rope: {k: x for k, x in rope.items() if k not in (SHARE, *OF_IMAGES)}
    ropes = {key: values[key] for key in ROPE_KEYS if isinstance(values.get(key), dict)}
    values = values | {key: kept(rope) for key, rope in ropes.items()}
  both = values.get("rope_parameters")
  key = family.local_theta
  if not key:
    return *read_rope(values, path, context, family.rope_theta), None
  local = {} if both and key == "rope_theta" else {"rope_theta": values.get(key)}
  if both is not None:
    if not isinstance(both, dict) or both.keys() - {FULL, SLIDING}:
      raise UserError(
        f"{path!r} has rope_parameters = {shown(both)}; there must be objects for {FULL} and "
        f"{SLIDING}"
      )
    local |= {"rope_parameters": both.get(SLIDING)}
    values = values | {"rope_parameters": both.get(FULL)}
  theta, scaling = read_rope(values, path, context, family.rope_theta)
  default = theta if key == "rope_theta" else LOCAL_THETA
  local_theta, local_scaling = read_rope(local, path, context, default)
  if local_scaling:
    raise UserError(f"{path!r} has RoPE scaling of layers with a window, which is not supported")
  is_own = scaling is not None or local_theta != theta
  return theta, scaling, local_theta if is_own else None


def read_share(values: dict[str, Any], family: Family, path: str) -> float:
  """Returns the share of the features of a head that are rotated."""
  if not family.rope_share:
    return 1.0  # another one is refused elsewhere
  inside = {key: x for key in ROPE_KEYS if isinstance(x := values.get(key), dict)}
  shares = {SHARE: values.get(SHARE)} | {f"{k}.{SHARE}": x.get(SHARE) for k, x in inside.items()}
  check_same(path, shares)
  stated = [x for x in (values, *inside.values()) if x.get(SHARE) is not None]
  return number(stated[0], SHARE, path, A_SHARE) if stated else family.rope_share


def read_rope(
  values: dict[str, Any], path: str, context: int, default: float
) -> tuple[float, RopeScaling | None]:
  """Returns the base of the rotary angles, and their scaling or None.

  Older files have `rope_scaling` and `rope_theta`, newer ones `rope_parameters`.

  Args:
    values: the contents of config.json.
    path: the file, for the message of an error.
    context: positions that the model was trained for.
    default: the base if there is none.
  """
  for key in ROPE_KEYS:
    if not isinstance(values.get(key) or {}, dict):
      raise UserError(f"{path!r} has {key} = {shown(values[key])}; it must be an object")
  newer = values.get("rope_parameters") or {}
  older = values.get("rope_scaling") or {}
  if newer and older and not _same(newer, older, values.get("rope_theta")):
    raise UserError(f"{path!r} has rope_parameters and rope_scaling, which differ; keep one")
  thetas = [
    number(of, "rope_theta", path, ABOVE_1)
    for of in (values, newer, older)
    if of.get("rope_theta") is not None
  ]
  if any(theta != thetas[0] for theta in thetas[1:]):
    raise UserError(f"{path!r} has several rope_theta: {', '.join(map(str, thetas))}; keep one")
  theta = thetas[0] if thetas else default
  scaling = older or newer
  check_same(
    path,
    {
      f"{'rope_scaling' if older else 'rope_parameters'}.{key}": scaling.get(key)
      for key in ("rope_type", "type")
    },
  )
  kind = _kind(scaling)
  if kind not in ("default", *ROPE_TYPES):
    raise UserError(
      f"{path!r} has RoPE scaling of type {shown(kind)}; only {', '.join(ROPE_TYPES)} and no "
      "scaling are supported"
    )
  settings = _without_theta(scaling)
  for key, supported in SUPPORTED.items():
    value = settings.pop(key, supported)
    if value != supported:
      raise UserError(
        f"{path!r} has {key} = {shown(value)} for RoPE; only {supported} is supported"
      )
  valid = set() if kind == "default" else ROPE_TYPES[kind].fields.keys()
  if unknown := sorted(settings.keys() - valid):
    names = ", ".join(map(printable, unknown))
    raise UserError(f"{path!r} has RoPE settings that are not supported for {kind!r}: {names}")
  if kind == "default":
    return theta, None
  if values.get("original_max_position_embeddings") is not None:
    raise UserError(
      f"{path!r} has original_max_position_embeddings outside the RoPE scaling of type {kind!r}; "
      "move it there"
    )
  return theta, _scaling(ROPE_TYPES[kind], settings, path, kind, context)


def _kind(scaling: dict[str, Any]) -> Any:
  return scaling.get("rope_type") or scaling.get("type") or "default"


def _same(newer: dict[str, Any], older: dict[str, Any], theta: Any) -> bool:
  """Whether `rope_parameters` says nothing that `rope_scaling` and `rope_theta` do not say.

  Transformers 5 reads only the latter if a file has both.
  """
  return (
    _kind(newer) == _kind(older)
    and _without_theta(newer) == _without_theta(older)
    and newer.get("rope_theta") in (None, older.get("rope_theta"), theta)
  )


def _without_theta(scaling: dict[str, Any]) -> dict[str, Any]:
  """Returns the settings that are not null, without the type and the base."""
  return {
    key: value
    for key, value in scaling.items()
    if value is not None and key not in ("type", "rope_type", "rope_theta")
  }


def _scaling(
  rope_type: RopeType, settings: dict[str, Any], path: str, kind: str, context: int
) -> RopeScaling:
  settings = {"original_max_position_embeddings": context, **settings}
  required = {
    field.name
    for field in dataclasses.fields(rope_type.scaling)
    if field.default is dataclasses.MISSING
  }
  fields = {}
  for key, name in rope_type.fields.items():
    if key in settings:
      read = size if name == "original" else number
      fields[name] = read(settings, key, path)
    elif name in required:
      raise UserError(f"{path!r} has RoPE scaling of type {kind!r} without {key}")
  try:
    return rope_type.scaling(**fields)
  except UserError as error:
    raise UserError(f"{path!r} has RoPE scaling that has no meaning: {error}") from None


def write_rope(scaling: RopeScaling) -> dict[str, Any]:
  """Returns the object `rope_scaling`, which Transformers 4 and 5 read."""
  kind = next(name for name, kind in ROPE_TYPES.items() if isinstance(scaling, kind.scaling))
  settings = {key: getattr(scaling, name) for key, name in ROPE_TYPES[kind].fields.items()}
  # Programs that are older than Llama 3.1 read `type`.
  older = {"type": kind} if kind == "yarn" else {}
  return {**older, "rope_type": kind} | {
    key: value for key, value in settings.items() if value is not None
  }
