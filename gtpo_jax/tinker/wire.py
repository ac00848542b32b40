"""Requests of the protocol as arrays, and results as the protocol's bytes."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from gtpo_jax.runtime.device_errors import OUT_OF_MEMORY, status
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.requests import ApiError, bad, one_line
from gtpo_jax.tinker.schema import BFLOAT16, CLASSES, FLOAT32, INT32, INT64

JSON, PROTO, ERROR = "json", "proto", "error"  # what a result is
# Operations: the paths of the protocol, and requests that were refused.
CREATE, LOAD, SAMPLE, REFUSED = "create_model", "load_weights", "asample", "refused"
FORWARD_BACKWARD, OPTIM_STEP = "forward_backward", "optim_step"
SAVE, SAVE_FOR_SAMPLER = "save_weights", "save_weights_for_sampler"
TARGETS = "target_tokens"
DTYPES = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32, BFLOAT16: np.uint16}
MAX_LENGTH = 1 << 20  # tokens of a datum, whatever the model


@dataclasses.dataclass(frozen=True)
class Submission:
  """Something to do."""

  op: str  # the path of the protocol
  target: str  # the id of the model, or of the sampler
  seq: int  # its number among the target's requests
  body: bytes  # what is asked, mostly as it was sent
  # f32[tokens of all data] as bytes, for credit: the entropies of tokens that were sampled here,
  # NaN for others
  drawn: bytes = b""
  digest: bytes = b""  # of the path and the body that were sent
  spec: dict[str, Any] | None = None  # of the new model that it makes

  @property
  def id(self) -> str:
    """The same whenever it is sent again."""
    return f"{self.target}:{self.seq}"


@dataclasses.dataclass(frozen=True)
class StoredResult:
  """What became of a request."""

  kind: str  # JSON, PROTO, or ERROR with a message as its body
  body: bytes  # what the client gets
  fault: str = ""  # of an error: "user" or "server"
  entropy: np.ndarray | None = None  # f32[number of tokens], nats, of a sample's tokens


def refusal(error: Exception, what: str) -> StoredResult:
  """Returns the outcome of a request that has failed in `what`; an unexpected error is printed."""
  if isinstance(error, UserError):
    error = one_line(error)
  if isinstance(error, ApiError):
    fault = "user" if error.status < 500 else "server"
    return StoredResult(ERROR, error.message.encode(errors="replace"), fault)
  print(f"gtpo: {what} failed", file=sys.stderr)
  traceback.print_exception(error)
  if status(error) == OUT_OF_MEMORY:
    return StoredResult(ERROR, b"the server is out of memory; send less at once", "server")
  return StoredResult(ERROR, b"the server has failed; its log says why", "server")


class SampledSpan(NamedTuple):
  """Targets that were sampled here."""

  start: int  # the position of the first among the targets
  length: int  # how many
  sequence: str  # the id of the sample
  offset: int  # the place of the first in it


@dataclasses.dataclass(frozen=True)
class Datum:
  """A sequence to learn from."""

  tokens: np.ndarray  # i32[s], what the model reads
  targets: np.ndarray  # i32[s], what it should predict at each position
  inputs: Mapping[str, np.ndarray]  # f32[s] each, the other inputs of the loss by name
  # the targets that were sampled here; None if the client does not say
  spans: tuple[SampledSpan, ...] | None


def parse_batch(body: bytes) -> Any:
  """Returns the message of a request to compute a loss."""
  try:
    return CLASSES["ForwardBackwardRequest"].FromString(body)
  except (DecodeError, RecursionError):
    raise bad("the body is not the protobuf of a ForwardBackwardRequest") from None


def read_config(message: Any) -> dict[str, float | str]:
  """Returns the settings of a message's loss."""
  # The newer map has everything that the older one has, and texts.
  config: dict[str, float | str] = dict(message.loss_fn_config)
  for name, value in message.loss_fn_config_v2.items():
    config[name] = getattr(value, value.WhichOneof("choice") or "number")
  for name, value in config.items():
    if not isinstance(value, str) and not np.isfinite(value):
      raise bad(f"loss_fn_config: {name[:80]} must be finite, got {value}")
  return config


def read_data(message: Any, vocab: int, longest: int) -> tuple[Datum, ...]:
  """Returns the arrays of a message, of at most `longest` tokens with ids below `vocab`."""
  if not message.data:
    raise bad("data is empty; send at least one datum")
  return tuple(of_each(lambda x: _read_datum(x, vocab, min(longest, MAX_LENGTH)), message.data))


def of_each(read: Callable[[Any], Any], data: Iterable[Any]) -> Iterator[Any]:
  """Yields what `read` returns of each datum; an error says of which one it is."""
  for i, datum in enumerate(data):
    try:
      yield read(datum)
    except ApiError as error:
      raise bad(f"data[{i}]: {error.message}") from None


def _read_datum(message: Any, vocab: int, longest: int) -> Datum:
  tokens = _tokens(message.model_input)
  check_tokens(tokens, vocab, longest)
  arrays = {name: _array(name, x, len(tokens)) for name, x in message.loss_fn_inputs.items()}
  targets = arrays.pop(TARGETS, None)
  if targets is None:
    raise bad(f"{TARGETS} is missing")
  if not np.issubdtype(targets.dtype, np.integer):
    raise bad(f"{TARGETS} must be integers")
  check_tokens(targets, vocab, longest, TARGETS)
  inputs = {name: x.astype(np.float32) for name, x in arrays.items()}
  for name, x in inputs.items():
    if not np.isfinite(x).all():
      raise bad(f"{name} has values that are not finite")
  return Datum(tokens, targets.astype(np.int32), inputs, _spans(message, len(tokens)))


def _tokens(chunks: Sequence[Any]) -> np.ndarray:
  parts = []
  for chunk in chunks:
    kind = chunk.WhichOneof("choice")
    if kind != "encoded_text":
      what = {"image": "images are", "dmel": "audio is"}.get(kind, "this kind of input is")
      raise bad(f"{what} not supported; send tokens")
    parts.append(_numbers(chunk.encoded_text.tokens, np.int32, "tokens"))
  return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _numbers(data: bytes, dtype: Any, name: str) -> np.ndarray:
  if len(data) % np.dtype(dtype).itemsize:
    raise bad(f"{name} has {len(data)} bytes, no whole number of values")
  return np.frombuffer(data, dtype)


def check_tokens(tokens: np.ndarray, vocab: int, longest: int, name: str = "model_input") -> None:
  """Raises ApiError unless these are ids of the vocabulary, at least 1 and at most `longest`."""
  if not 0 < len(tokens) <= longest:
    raise bad(f"{name} has {len(tokens)} tokens, but there must be 1 to {longest}")
  if tokens.min() < 0 or tokens.max() >= vocab:
    wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
    raise bad(f"{name} has the token id {wrong}, but ids are from 0 to {vocab - 1}")


def _array(name: str, tensor: Any, length: int) -> np.ndarray:
  """Returns an input of the loss, [length]."""
  if tensor.WhichOneof("choice") == "sparse_csr" or len(tensor.shape) > 1:
    raise bad(f"{name} has 2 axes; only one value for each position is supported")
  if tensor.dtype not in DTYPES:
    raise bad(f"{name} has the unknown dtype {tensor.dtype}")
  x = _numbers(tensor.dense, DTYPES[tensor.dtype], name)
  if tensor.dtype == BFLOAT16:
    x = (x.astype(np.uint32) << 16).view(np.float32)
  if list(tensor.shape) not in ([], [len(x)]):
    raise bad(f"{name} has {len(x)} values for the shape {list(tensor.shape)}")
  if len(x) != length:
    raise bad(f"{name} has {len(x)} values for the {length} tokens of model_input")
  return x


def _spans(message: Any, length: int) -> tuple[SampledSpan, ...] | None:
  """Returns where the targets were sampled; prompts are left out."""
  if not message.loss_fn_input_spans:
    return None
  spans = []
  start = 0
  for span in message.loss_fn_input_spans:
    kind = span.WhichOneof("choice")
    run = getattr(span, kind) if kind else None
    if run is None or run.length < 0 or run.offset < 0:
      raise bad("loss_fn_input_spans has a span without a length")
    if kind == "sampled_tokens":
      spans.append(SampledSpan(start, run.length, run.sequence_id, run.offset))
    start += run.length
  if start != length:
    raise bad(f"loss_fn_input_spans cover {start} positions of {length}")
  return tuple(spans)


def loss_output(
  outputs: Mapping[str, Sequence[np.ndarray]], count: int, metrics: Mapping[str, float]
) -> bytes:
  """Returns the result of a loss.

  Args:
    outputs: for each name an f32[s] for each datum.
    count: the number of data.
    metrics: by name; the part after the colon says how several chunks' are combined.
  """
  message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
  record = message.loss_fn_outputs.add(num_datums=count)
  for name, rows in outputs.items():
    offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    tensor = record.fields[name]
    tensor.data = b"".join(row.tobytes() for row in rows)
    tensor.offsets = offsets.tobytes()
    tensor.dtype = FLOAT32
  return message.SerializeToString(deterministic=True)


def write_top(
  message: Any, alternatives: Sequence[tuple[Sequence[int], Sequence[float]]], k: int
) -> None:
  """Writes the `k` most probable tokens at some positions: their ids, and log-probs in nats."""
  message.length, message.k = len(alternatives), k
  message.token_ids = np.asarray([ids[:k] for ids, _ in alternatives], np.int32).tobytes()
  message.logprobs = np.asarray([values[:k] for _, values in alternatives], np.float32).tobytes()


class Sample(NamedTuple):
  """A sampled sequence: its tokens i32[s], and the policy's entropy f32[s] in nats."""

  tokens: np.ndarray
  entropy: np.ndarray


def read_samples(body: bytes, entropy: np.ndarray) -> list[Sample]:
  """Returns the sequences of a result of sampling, whose tokens have the entropies f32[...]."""
  sequences = CLASSES["SampleResponse"].FromString(body).sequences
  tokens = [np.frombuffer(x.tokens, np.int32) for x in sequences]
  ends = np.cumsum([len(x) for x in tokens])
  return list(map(Sample, tokens, np.split(entropy, ends[:-1])))
