"""The messages of Tinker's protocol that are protobuf, as data.

Names, numbers and types are as in the client `tinker` 0.38.0 (Apache-2.0). Protobuf ignores
fields that a message here does not name, so a later client may send more.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CLIENT_VERSION = "0.38.0"  # the newest client that was tested
PACKAGE = "gtpo_tinker"

# Each field as "number name type". Types are protobuf's, or messages of this table. "*" means
# repeated, "?" that its absence can be told from its default, "{}" a map from strings; fields that
# end in "|" belong to one choice.
MESSAGES: dict[str, tuple[str, ...]] = {
  "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
  "SampledSequence": (
    "1 stop_reason int32",
    "2 tokens bytes",
    "3 logprobs bytes?",
    "4 topk_sampled_logprobs TopkLogprobs?",
  ),
  "SampleResponse": (
    "1 sequences SampledSequence*",
    "2 prompt_logprobs bytes?",
    "3 topk_prompt_logprobs TopkLogprobs?",
    "4 prompt_cache_hit_tokens int32",
  ),
  "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
  "Tensor": ("1 dense bytes|", "2 sparse_csr SparseCsr|", "3 dtype int32", "4 shape int64*"),
  "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64*"),
  "ArrayRecord": ("1 type_tag string", "2 fields BatchedTensor{}", "3 num_datums int64"),
  "ForwardBackwardOutput": (
    "1 loss_fn_output_type string",
    "2 loss_fn_outputs ArrayRecord*",
    "3 metrics double{}",
  ),
  "LossConfigValue": ("1 number double|", "2 text string|"),
  "Span": ("1 sequence_id string", "2 offset int64", "3 length int64"),
  "ProvenanceSpan": ("1 prompt_tokens Span|", "2 sampled_tokens Span|"),
  "EncodedTextChunk": ("1 tokens bytes",),
  "ImageChunk": ("1 data bytes",),
  "DmelChunk": ("1 dmel bytes",),
  "Chunk": ("1 encoded_text EncodedTextChunk|", "2 image ImageChunk|", "3 dmel DmelChunk|"),
  "Datum": (
    "1 model_input Chunk*",
    "2 loss_fn_inputs Tensor{}",
    "3 model_input_spans ProvenanceSpan*",
    "4 loss_fn_input_spans ProvenanceSpan*",
  ),
  "ForwardBackwardRequest": (
    "1 model_id string",
    "2 seq_id int32",
    "3 data Datum*",
    "4 loss_fn string",
    "5 loss_fn_config double{}",
    "6 forward_only bool",
    "7 loss_fn_config_v2 LossConfigValue{}",
  ),
}
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # values of `dtype`
STOP, LENGTH = 0, 1  # values of `stop_reason`

_FIELD = descriptor_pb2.FieldDescriptorProto


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
  number, name, kind = text.split(" ")
  field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
  scalar = kind.rstrip("*?{}|")
  if kind.endswith("{}"):
    # Protobuf sends a map as repeated entries, of a message with this name.
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    _add_field(entry, "1 key string")
    _add_field(entry, f"2 value {scalar}")
    scalar = f"{message.name}.{entry.name}"
    field.label = _FIELD.LABEL_REPEATED
  elif kind.endswith("*"):
    field.label = _FIELD.LABEL_REPEATED
  elif kind.endswith("|"):
    if not message.oneof_decl:
      message.oneof_decl.add(name="choice")
    field.oneof_index = 0
  if scalar[0].isupper():
    field.type = _FIELD.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{scalar}"
  else:
    field.type = getattr(_FIELD, f"TYPE_{scalar.upper()}")


def _classes() -> dict[str, Any]:
  file = descriptor_pb2.FileDescriptorProto(
    name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3"
  )
  for name, fields in MESSAGES.items():
    message = file.message_type.add(name=name)
    for field in fields:
      _add_field(message, field)
    # Protobuf 3 tells absence by a choice of one field; these come after the others.
    names = [field.split(" ")[1] for field in fields if field.endswith("?")]
    for optional in (field for field in message.field if field.name in names):
      optional.proto3_optional = True
      optional.oneof_index = len(message.oneof_decl)
      message.oneof_decl.add(name=f"_{optional.name}")
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  find = lambda name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}")
  return {name: message_factory.GetMessageClass(find(name)) for name in MESSAGES}


CLASSES = _classes()
