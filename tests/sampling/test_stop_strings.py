"""Stop strings end a completion at the token that completes the first match."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from completions import completion
from small import CONFIG, PAD, RAGGED_PROMPTS, assert_same, build, places
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gtpo_jax.data.chat import TOKENIZER_DIR, Chat, load_chat
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.sampling.stop_strings import StopStrings

GROUP = 6
TOKENS = 40
STRINGS = ("ly", "tar", "sol", "sh")


def byte_fallback():
  """A tokenizer like Llama 2's: bytes are tokens, and the first space of a text is removed."""
  words = ["▁a", "▁b", "a", "b", "ab", "▁", "é", "x"]
  vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
  tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(vocab)}, [], byte_fallback=True))
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  tokenizer.add_special_tokens([AddedToken(x, special=True) for x in vocab[:3]])
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
  )


def merged_bytes():
  """The package's tokenizer, with tokens that end or begin inside a character, such as x\\xe2."""
  values = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
  for first, second in (("x", "â"), ("¬", "y"), ("Ġ", "ð")):
    values["model"]["vocab"][first + second] = len(values["model"]["vocab"])
    values["model"]["merges"].append([first, second])
  return PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer.from_str(json.dumps(values)),
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
  )


@pytest.fixture(scope="module")
def chats():
  return {"bytes": load_chat(), "merged": Chat(merged_bytes()), "fallback": Chat(byte_fallback())}


def finder(chat, *strings):
  return StopStrings(strings, lambda: chat.text_stream().add, chat.decode)


def slow_end(chat, strings, ids):
  """Decodes every prefix as a whole. What ends in bytes of a begun character is not trusted."""
  for count in range(1, len(ids) + 1):
    text = chat.decode([ids[:count]])[0].rstrip("\ufffd")
    if any(string in text for string in strings):
      return count
  return None


def found(chat, strings, ids, chunk):
  """Returns the end that the search finds, with `chunk` tokens at a time."""
  search = finder(chat, *strings).search()
  for begin in range(0, len(ids), chunk):
    end = search.add(ids[begin : begin + chunk])
    if end is not None:
      return begin + end
  return None


def single(chat, *pieces):
  """Returns token ids by their names in the vocabulary."""
  ids = chat.tokenizer.convert_tokens_to_ids(list(pieces))
  assert None not in ids
  return ids


@functools.cache
def byte_ids(chat):
  """Returns the token of each byte in the byte-level alphabet."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  names = {byte: chr(byte) for byte in printable}
  names |= {byte: chr(256 + k) for k, byte in enumerate(others)}
  return single(chat, *(names[byte] for byte in range(256)))


def utf8(chat, data):
  """Returns a token for each byte."""
  if chat.tokenizer.convert_tokens_to_ids("<0x41>") is not None:
    return single(chat, *(f"<0x{byte:02X}>" for byte in data))
  return [byte_ids(chat)[byte] for byte in data]


# --- the search, in scripted completions ---


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_cases_by_hand(chats, chunk):
  chat = chats["bytes"]
  spell = lambda text: utf8(chat, text if isinstance(text, bytes) else text.encode())
  the = chat.tokenizer.encode("answer")
  special = single(chat, "<|im_start|>")
  cases = [
    (spell("ab.\nQ:xy"), ["\nQ:"], 6, "ab."),  # over three tokens
    (the, ["sw"], None, "an"),  # inside one token, see below
    (spell("aéb"), ["é"], 3, "a"),  # one character of two tokens
    (spell("x🙂y"), ["🙂y"], 6, "x"),
    (spell("x🙂y"), ["🙂"], 5, "x"),
    (spell(b"\xe2\xf0\x9f\x99\x82y"), ["🙂"], 5, "\ufffd"),  # after a byte that is no character
    (spell(b"\xf0\x9f\x99\xf0\x9f\x99\x82"), ["🙂"], 7, "\ufffd"),
    (spell("abc"), ["abcd", "é"], None, "abc"),  # never
    (spell("abcabd"), ["abd"], 6, "abc"),  # after a false beginning
    (spell("xabcd"), ["abcd", "bc"], 4, "xa"),  # the first to be complete ends it
    (spell("stop"), ["s", "t"], 1, ""),  # at the first token
    ([*spell("a"), *special, *spell("b")], ["im_"], 2, "a<|"),  # inside a special token
    ([*spell("a"), *special, *spell("b")], [">b"], 3, "a<|im_start|"),
    ([*spell("a"), chat.tokenizer.eos_token_id], ["im_end", "a<"], None, "a"),  # has no text
  ]
  for ids, strings, end, text in cases:
    if strings == ["sw"]:
      assert len(the) < len("answer")
      end = slow_end(chat, strings, ids)
    assert found(chat, strings, ids, chunk) == end == slow_end(chat, strings, ids), strings
    (whole,) = chat.decode([ids[:end]])
    assert finder(chat, *strings).cut(whole) == text, strings


def test_the_earliest_match_in_the_text_is_cut(chats):
  """One token completes two matches; the earlier one in the text counts, whatever the order."""
  for strings in (("b", "ab"), ("ab", "b")):
    stop = finder(chats["bytes"], *strings)
    assert stop.cut("xxabx") == "xx"
    assert stop.cut("xxx") == "xxx"
    assert stop.cut("") == ""


def test_a_begun_match_is_not_shown(chats):
  stop = finder(chats["bytes"], "\nQ:", "end")
  shown = {"a\nQ": "a", "a\nQx": "a\nQx", "a\n": "a", "ae": "a", "aen": "a", "aenx": "aenx", "": ""}
  for text, expected in shown.items():
    assert stop.without_begun(text) == expected


def test_tokens_that_end_inside_a_character(chats):
  chat = chats["merged"]
  ids = [*single(chat, "xâ"), *utf8(chat, b"\x82"), *single(chat, "¬y")]
  assert chat.decode([ids]) == ["x€y"]
  for string, end in (("x", 1), ("x€", 3), ("€", 3), ("y", 3), ("xy", None)):
    for chunk in (1, 2, 3):
      assert found(chat, [string], ids, chunk) == end == slow_end(chat, [string], ids), string


@pytest.mark.parametrize("name", ["bytes", "merged", "fallback"])
def test_the_search_agrees_with_decoding_every_prefix(chats, name):
  """The completions are random tokens: parts of characters, spaces, words and special tokens."""
  chat = chats[name]
  rng = np.random.default_rng(0)
  bits = [utf8(chat, x.encode()) for x in ("é", "€", "🙂", "ab", "\n", "x")]
  bits += [utf8(chat, x) for x in (b"\xe2", b"\xf0\x9f", b"\x82", b"\xc3")]
  words = {
    "bytes": "a b x Ġ the",
    "merged": "a b x xâ ¬y Ġð xâ ¬y Ġð",
    "fallback": "▁a ▁b a b ab ▁ é x",
  }[name]
  bits += [single(chat, word) for word in words.split()]
  bits += [single(chat, "<s>" if name == "fallback" else "<|im_start|>")]
  ends = []
  for _ in range(400):
    ids = [i for k in rng.integers(len(bits), size=rng.integers(1, 25)) for i in bits[k]]
    strings = [str(x) for x in rng.choice(["é", "€a", "🙂", "a b", "xx", "\nab", "b€", "s>"], 2)]
    ends.append(slow_end(chat, strings, ids))
    for chunk in (1, 4, 16):
      assert found(chat, strings, ids, chunk) == ends[-1], (ids, strings)
    whole = chat.tokenizer.decode(ids)
    # This tokenizer replaces all bytes next to a byte that is no character.
    if name != "fallback" or "\ufffd" not in whole:
      assert "".join(chat.pieces(ids)) == whole
  assert 50 < sum(end is not None for end in ends) < 350


# --- the engine ---

MODEL = dataclasses.replace(CONFIG, vocab_size=384)
BUILD = {"config": MODEL, "max_tokens": TOKENS}


def sample_parts(built, calls=()):
  """Samples in several calls of `generate`, which end after `calls` chunks each."""
  _, engine, layout = built
  n = len(RAGGED_PROMPTS)
  rows = engine.completions(RAGGED_PROMPTS, engine.completion_keys(jax.random.key(4), n, GROUP))
  ended = []
  for chunks in (*calls, 10**6):
    stream = engine.generate(layout, rows, sampling_params=SamplingParams())
    assert set(next(stream)) == set(ended)
    for _, have_ended in zip(range(chunks), stream, strict=False):
      ended += have_ended
    stream.close()
  assert sorted(places(ended)) == [(i, j) for i in range(n) for j in range(GROUP)]  # each ends once
  return engine.rollouts(rows)


@pytest.fixture(scope="module")
def whole(chats):
  """The completions without stop strings."""
  return sample_parts(build(**BUILD, stop=chats["bytes"].stop))


@pytest.fixture(scope="module")
def expected(chats, whole):
  """What must remain of them: everything up to the token that completes the first match."""
  chat = chats["bytes"]
  cut = jax.tree.map(np.copy, whole)
  ends = np.zeros(whole.finished.shape, int)
  for i, j in np.ndindex(ends.shape):
    length = int(whole.lengths[i, j])
    ids = whole.tokens[i, j, :length].tolist()
    end = slow_end(chat, STRINGS, ids)
    if end is None:
      continue
    ends[i, j] = end
    cut.finished[i, j] = True
    cut.tokens[i, j, end:] = PAD
    for x in (cut.present, cut.mask, cut.log_probs, cut.entropy):
      x[i, j, end:] = 0
  shorter = (ends > 0) & (ends < whole.lengths)
  assert 0.2 < shorter.mean() < 0.9 and (ends == 1).any()
  assert ((ends == TOKENS) & ~whole.finished).any()  # a match and the limit at once
  return cut


@pytest.fixture(scope="module")
def stop_strings(chats):
  return finder(chats["bytes"], *STRINGS)


@pytest.mark.parametrize(("slots", "chunk"), [(64, 16), (5, 4), (3, 1)])
@pytest.mark.some(1, slow=1)
def test_completions_end_as_if_nothing_was_drawn_after_a_match(
  slots, chunk, expected, chats, stop_strings
):
  """Tokens, masks, log-probs, entropies and flags do not depend on slots and chunks."""
  engine_config = EngineConfig(slots=slots, chunk=chunk)
  built = build(
    **BUILD, stop=chats["bytes"].stop, engine_config=engine_config, stop_strings=stop_strings
  )
  rollouts = sample_parts(built)
  assert_same(rollouts, expected)
  np.testing.assert_array_equal(rollouts.present, expected.present)
  stop_token = np.isin(rollouts.tokens, chats["bytes"].stop) & rollouts.mask
  tokens = [row[x].tolist() for row, x in zip(rollouts.tokens[0], rollouts.mask[0], strict=True)]
  for text, done, token in zip(
    chats["bytes"].decode(tokens), rollouts.finished[0], stop_token[0].any(-1), strict=True
  ):
    assert (stop_strings.cut(text) != text) == (done and not token)


def test_completions_that_go_on_end_at_the_same_tokens(expected, chats, stop_strings):
  """A match may begin in one call and end in the next one."""
  engine_config = EngineConfig(slots=5, chunk=4)
  built = build(
    **BUILD, stop=chats["bytes"].stop, engine_config=engine_config, stop_strings=stop_strings
  )
  assert_same(sample_parts(built, (3, 1, 2)), expected)


@pytest.mark.slow
def test_pages_do_not_matter(expected, chats, stop_strings):
  config = EngineConfig(slots=6, chunk=8, attention="pallas", page_size=16, cache_fraction=0.5)
  built = build(**BUILD, stop=chats["bytes"].stop, engine_config=config, stop_strings=stop_strings)
  assert_same(sample_parts(built, (2,)), expected)


def test_a_match_in_restored_tokens_ends_a_completion(chats, stop_strings):
  """It is possible if the stop strings have changed since they were drawn."""
  built = build(
    **BUILD,
    stop=chats["bytes"].stop,
    engine_config=EngineConfig(slots=64, chunk=16),
    stop_strings=stop_strings,
  )
  _, engine, layout = built
  rows = engine.completions([[5]], engine.completion_keys(jax.random.key(0), 1, 1))
  restored = rows[0][0]
  ids = utf8(chats["bytes"], b"alyxy")
  restored.resume(completion(0, 0, ids, finished=False))
  for _ in engine.generate(layout, rows, sampling_params=SamplingParams()):
    pass
  assert restored.tokens.tolist() == ids[:3] and restored.finished
