"""The tokens of a completion as they arrive, and log-probs in the protocol's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.text_stream import REPLACEMENT
from gtpo_jax.sampling.stop_strings import StopStrings

LOWEST = -9999.0  # JSON has no infinity; what the protocol writes for a token of probability 0


class Part(NamedTuple):
  """The next tokens of a completion.

  Attributes:
    tokens: their ids.
    log_probs: nats, under softmax(logits).
    alternatives: for each token, the ids and log-probs of the most probable ones; empty unless the
      completion wants them.
    finish: "stop" or "length" if these are the last, "error" if there are no more; else "".
    entropy: nats, of the policy at each of them; empty for a text that was scored.
  """

  tokens: list[int]
  log_probs: list[float]
  alternatives: list[tuple[list[int], list[float]]]
  finish: str = ""
  entropy: Sequence[float] = ()


NOTHING = Part([], [], [])
FAILED = Part([], [], [], "error")


class LogProbs:
  """Writes log-probs. A token appears as the text that it has after others."""

  def __init__(self, chat: Chat):
    self._chat = chat

  def chat_format(self, part: Part, top: int) -> dict[str, Any]:
    """Returns the "logprobs" of a choice of /v1/chat/completions."""
    texts = self._texts(part, top)
    content = []
    for i, (token, log_prob) in enumerate(zip(part.tokens, part.log_probs, strict=True)):
      listed = _listed(part, i, top)
      entry = _entry(texts[token], log_prob)
      entry["top_logprobs"] = [_entry(texts[other], value) for other, value in listed]
      content.append(entry)
    return {"content": content, "refusal": None}

  def completion_format(
    self, part: Part, top: int, offset: int = 0, first: int | None = None
  ) -> dict[str, Any]:
    """Returns the "logprobs" of a choice of /v1/completions.

    Args:
      part: tokens and log-probs.
      top: how many alternatives are listed.
      offset: where the text of the first token begins.
      first: the id of a token before the part, which has no log-prob; None for none.
    """
    texts = self._texts(part, top)
    pieces = [texts[token] for token in part.tokens]
    log_probs: list[float | None] = [_finite(x) for x in part.log_probs]
    tops: list[dict[str, float] | None] = []
    for i, token in enumerate(part.tokens):
      found: dict[str, float] = {}
      for other, value in [*_listed(part, i, top), (token, part.log_probs[i])]:
        found.setdefault(texts[other], _finite(value))
      tops.append(found)
    if first is not None:
      pieces.insert(0, self._chat.texts.single_texts([first])[first])
      log_probs.insert(0, None)
      tops.insert(0, None)
    offsets = []
    for piece in pieces:
      offsets.append(offset)
      offset += len(piece)
    return {
      "tokens": pieces,
      "token_logprobs": log_probs,
      "top_logprobs": tops if top else None,
      "text_offset": offsets,
    }

  def _texts(self, part: Part, top: int) -> dict[int, str]:
    others = (token for ids, _ in part.alternatives for token in ids[:top])
    return self._chat.texts.single_texts({*part.tokens, *others})


def joined(first: Part, second: Part) -> Part:
  """Returns two parts as one."""
  return Part(
    first.tokens + second.tokens,
    first.log_probs + second.log_probs,
    first.alternatives + second.alternatives,
    second.finish,
    [*first.entropy, *second.entropy],
  )


def new_search(chat: Chat, strings: Sequence[str]) -> StopStrings | None:
  """Returns what finds the stop strings of a request; None if it has none."""
  if not strings:
    return None
  return StopStrings(strings, lambda: chat.text_stream().add, chat.decode)


def _listed(part: Part, i: int, top: int) -> list[tuple[int, float]]:
  if not top:
    return []
  ids, log_probs = part.alternatives[i]
  return list(zip(ids[:top], log_probs[:top], strict=True))


def _entry(text: str, log_prob: float) -> dict[str, Any]:
  whole = REPLACEMENT not in text
  return {
    "token": text,
    "logprob": _finite(log_prob),
    "bytes": list(text.encode()) if whole else None,
  }


def _finite(log_prob: float) -> float:
  return max(log_prob, LOWEST)
