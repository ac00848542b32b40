"""The JSON that clients send, field by field. What a result does not depend on is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model

from gtpo_jax.sampling.filters import ALTERNATIVES
from gtpo_jax.sampling.settings import LOWEST_TEMPERATURE
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop
from gtpo_jax.serving.requests import (
  HIGHEST_TEMPERATURE,
  LARGEST_TOP_K,
  Body,
  Lenient,
  bad,
  checked,
  shown,
)
from gtpo_jax.tinker.losses import LARGEST
from gtpo_jax.tinker.models import MAX_SEED, ServedBase
from gtpo_jax.tinker.saved_weights import NAME
from gtpo_jax.tinker.wire import LOAD, OPTIM_STEP, SAVE, SAVE_FOR_SAMPLER

MAX_SAMPLES = 1024  # of one request
LARGEST_SEQ = 2**63 - 1  # of the numbers that clients give
LONGEST_TTL_S = 10**9  # that weights may be kept for
SMALLEST = float(np.finfo(np.float32).tiny)
BELOW_1 = 1 - 2.0**-24  # the largest float32 below 1


def _check_metadata(value: dict[str, Any]) -> dict[str, Any]:
  try:
    json.dumps(value, allow_nan=False)
  except ValueError:
    raise ValueError("must have no numbers that are not finite") from None
  return value


def _check_name(name: str) -> str:
  if not NAME.fullmatch(name):
    raise ValueError(f"must be a name of letters, digits and . _ - =, got {shown(name)}")
  return name


def _check_temperature(value: float) -> float:
  if 0 < value < LOWEST_TEMPERATURE:
    raise ValueError("must be 0 or at least 2**-20")
  return value


def _check_stop(stop: Any) -> tuple[str, ...] | tuple[int, ...]:
  values = (stop,) if isinstance(stop, str) else stop
  if isinstance(values, list) and not values:
    raise ValueError("must not be empty: samples end at the model's end tokens; leave it out")
  if isinstance(values, list) and all(type(x) is int for x in values):
    return tuple(values)
  if not isinstance(values, list | tuple) or not is_stop(tuple(values)):
    raise ValueError(f"must be tokens, or up to {MAX_STOP_STRINGS} strings, got {shown(stop)}")
  return tuple(values)


Seq = Annotated[int, Field(ge=0, le=LARGEST_SEQ)]
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]
Beta = Annotated[float, Field(ge=0, le=BELOW_1)]
Positive = Annotated[float, Field(ge=0, le=LARGEST)]
Name = Annotated[str, AfterValidator(_check_name)]
Top = Annotated[int, Field(ge=0, le=ALTERNATIVES)]


class Page(Body):
  """The parameters of a list."""

  model_config = ConfigDict(strict=False)

  limit: Annotated[int, Field(ge=0, le=LARGEST_SEQ)] | None = None
  offset: Annotated[int, Field(ge=0, le=LARGEST_SEQ)] = 0
  access_scope: Literal["owned", "accessible"] = "owned"


class NumberedBody(Body):
  """A request of a model."""

  model_id: str
  seq_id: Annotated[Seq, Field(ge=1)]


# Of session_heartbeat; of retrieve_future and cancel_future; of get_info; of weights_info.
SessionBody = create_model("SessionBody", __base__=Lenient, session_id=(str, ...))
RequestBody = create_model("RequestBody", __base__=Lenient, request_id=(str, ...))
ModelBody = create_model("ModelBody", __base__=Body, model_id=(str, ...), type=(str, ""))
PathBody = create_model("PathBody", __base__=Body, tinker_path=(str, ...))
OptimizerBody = create_model("OptimizerBody", __base__=Body, type=(Literal["adamw"], "adamw"))


class LoraBody(Body):
  """Adapters. The head has none, whatever `train_unembed` says."""

  rank: Annotated[int, Field(ge=0)]
  seed: Seed | None = None
  train_unembed: bool = True
  train_mlp: bool = True
  train_attn: bool = True


class NewModelBody(Body):
  """create_model."""

  session_id: str
  model_seq_id: Seq
  base_model: str
  user_metadata: Metadata = Field(default_factory=dict)
  lora_config: LoraBody | None = None
  optimizer_config: OptimizerBody = OptimizerBody()
  type: Literal["create_model"] = "create_model"


class LoadBody(Body):
  """load_weights: into a model, or into a new one of a session."""

  model_id: str | None = None
  seq_id: Annotated[Seq, Field(ge=1)] | None = None
  session_id: str | None = None
  model_seq_id: Seq | None = None
  base_model: str | None = None
  user_metadata: Metadata = Field(default_factory=dict)
  path: str
  optimizer: bool
  optimizer_config: OptimizerBody = OptimizerBody()
  weights_access_token: str | None = None
  type: Literal["load_weights"] = "load_weights"


class AdamBody(Body):
  """Settings of a step, within what float32 holds."""

  learning_rate: Positive = 1e-4
  beta1: Beta = 0.9
  beta2: Beta = 0.95
  eps: Annotated[float, Field(ge=SMALLEST, le=LARGEST)] = 1e-12
  weight_decay: Positive = 0.0
  grad_clip_norm: Positive = 0.0


class StepBody(NumberedBody):
  """optim_step."""

  adam_params: AdamBody
  type: Literal["optim_step"] = "optim_step"


class SaveBody(NumberedBody):
  """save_weights."""

  path: Name | None = None
  ttl_seconds: Annotated[int, Field(ge=1, le=LONGEST_TTL_S)] | None = None
  overwrite: bool = False
  user_metadata: dict[str, str] | None = None
  type: Literal["save_weights", "save_weights_for_sampler"] = "save_weights"


class SaveForSamplerBody(SaveBody):
  """save_weights_for_sampler."""

  sampling_session_seq_id: Seq | None = None
  kind: Literal["snapshot", "inflight"] = "snapshot"


OF_MODELS: dict[str, type[Any]] = {  # requests of a model, by operation
  LOAD: LoadBody,
  OPTIM_STEP: StepBody,
  SAVE: SaveBody,
  SAVE_FOR_SAMPLER: SaveForSamplerBody,
}


class SamplerBody(Body):
  """create_sampling_session."""

  session_id: str
  sampling_session_seq_id: Seq
  base_model: str | None = None
  model_path: str | None = None
  type: Literal["create_sampling_session"] = "create_sampling_session"


class ChunkBody(Body):
  """A part of a prompt: tokens only."""

  type: Literal["encoded_text"] = "encoded_text"
  tokens: list[int]


class PromptBody(Body):
  """A prompt."""

  chunks: list[ChunkBody]


class SamplingBody(Body):
  """How samples are drawn."""

  max_tokens: Annotated[int, Field(ge=0)] | None = None
  seed: Seed | None = None
  stop: Annotated[Any, BeforeValidator(lambda x: () if x is None else _check_stop(x))] = ()
  temperature: Annotated[
    float, Field(ge=0, le=HIGHEST_TEMPERATURE), AfterValidator(_check_temperature)
  ] = 1.0
  top_k: Annotated[int, Field(ge=-1, le=LARGEST_TOP_K)] = -1
  top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(Body):
  """asample."""

  sampling_session_id: str
  seq_id: Seq
  prompt: PromptBody
  num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
  sampling_params: SamplingBody = SamplingBody()
  prompt_logprobs: bool = False
  prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
  topk_prompt_logprobs: Top = 0
  topk_sample_logprobs: Top = 0
  prompt_alt_tokens_k: Literal[0] = 0
  record_stability_info: Literal[False] = False
  type: Literal["sample"] = "sample"

  @property
  def tokens(self) -> list[int]:
    """The ids of the prompt."""
    return [token for chunk in self.prompt.chunks for token in chunk.tokens]


def read_sample(values: dict[str, Any], base: ServedBase, queue: int) -> tuple[SampleBody, int]:
  """Returns a request to sample, and the most tokens of each sample.

  At most `queue` samples may run and wait at once.
  """
  body = checked(SampleBody, values)
  engine = base.worker.engine
  longest = min(engine.max_prompt_tokens, base.longest - 1)
  prompt = body.tokens
  size, count, last = len(prompt), body.num_samples, body.prompt_logprobs_last_n
  if not all(0 <= x < base.vocab for x in prompt):
    raise bad(f"prompt has a token that is no id from 0 to {base.vocab - 1}", "prompt")
  if not size:
    raise bad("prompt is empty; it needs a token", "prompt")
  context = f"the model's context is {base.longest} tokens"
  if size > longest:
    limit = engine.max_prompt_tokens
    remedy = "start the server with a higher --max_prompt_tokens" if limit == longest else context
    raise bad(f"prompt has {size} tokens, but at most {longest} are possible; {remedy}", "prompt")
  if count + 1 > queue:
    raise bad(
      f"num_samples is {count}, but this server samples and queues {queue - 1} at most; start it "
      "with a higher --queue",
      "num_samples",
    )
  most = min(engine.max_tokens, base.longest - size)
  wanted = body.sampling_params.max_tokens
  if wanted is not None and wanted > most:
    own = most == engine.max_tokens
    remedy = "lower it, or start the server with a higher --max_tokens" if own else context
    raise bad(
      f"max_tokens is {wanted}, but at most {most} can follow this prompt; {remedy}", "max_tokens"
    )
  stop = [x for x in body.sampling_params.stop if isinstance(x, int)]
  if wrong := [x for x in stop if not 0 <= x < base.vocab]:
    raise bad(f"stop has the token {wrong[0]}, but ids are from 0 to {base.vocab - 1}", "stop")
  scored = body.prompt_logprobs or body.topk_prompt_logprobs
  if last is not None and (last >= size or not scored):
    raise bad(
      f"prompt_logprobs_last_n must be below the prompt's {size} tokens, and needs prompt_logprobs",
      "prompt_logprobs_last_n",
    )
  return body, most if wanted is None else wanted
