"""The server as the openai client sees it, on a small model with random weights."""

import asyncio
import functools
import json
import threading
import time

import httpx2
import jax
import numpy as np
import pytest
from live_server import running

from gtpo_jax.models import load

pytestmark = pytest.mark.slow

AS_JSON = {"Content-Type": "application/json"}
ASK = [{"role": "user", "content": "12+7:"}]
FILTERS = [{}, {"top_p": 0.7}, {"extra_body": {"top_k": 3}}, {"extra_body": {"min_p": 0.2}}]


@pytest.fixture(scope="module", autouse=True)
def client_library():
  """Imports openai, which takes a second that other processes of a parallel run need not spend."""
  global openai
  import openai


@pytest.fixture(scope="module")
def live(folder):
  with running(folder, queue=512) as server:
    yield server


@pytest.fixture(scope="module")
def reference(folder):
  """(ids) -> the float32 log-probs [t, v] after each of them."""
  model, params = load(folder, "float32")

  @functools.partial(jax.jit, static_argnums=0)
  def forward(length, padded):
    return jax.nn.log_softmax(model.apply({"params": params}, padded), -1)

  def log_probs(ids):
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(forward(128, padded))[0, : len(ids)]

  return log_probs


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("stop", [None, ["e", "ak"]])
def test_a_stream_is_the_whole_answer(live, settings, stop):
  client = live.client()
  ask = functools.partial(
    client.chat.completions.create,
    model=live.model,
    messages=ASK,
    max_tokens=30,
    n=3,
    seed=5,
    stop=stop,
    logprobs=True,
    **settings,
  )
  whole = ask()
  texts = [""] * 3
  log_probs = [[], [], []]
  ends = {}
  for event in ask(stream=True):
    for choice in event.choices:
      texts[choice.index] += choice.delta.content or ""
      log_probs[choice.index] += choice.logprobs.content if choice.logprobs else []
      if choice.finish_reason:
        ends[choice.index] = choice.finish_reason
  for i, choice in enumerate(whole.choices):
    assert texts[i] == choice.message.content
    assert ends[i] == choice.finish_reason
    assert [x.token for x in log_probs[i]] == [x.token for x in choice.logprobs.content]
    assert not any(string in texts[i] for string in stop or ())
  assert len(set(texts)) == 3


def test_completions_stream_too(live):
  ask = functools.partial(
    live.client().completions.create,
    model=live.model,
    prompt=["12+7:", "3+4"],
    n=2,
    seed=5,
    logprobs=2,
  )
  whole = ask()
  texts = [""] * 4
  offsets = [[], [], [], []]
  last = None
  for event in ask(stream=True, stream_options={"include_usage": True}):
    last = event
    for choice in event.choices:
      texts[choice.index] += choice.text
      offsets[choice.index] += choice.logprobs.text_offset
  assert texts == [choice.text for choice in whole.choices]
  assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
  assert last.usage == whole.usage
  assert whole.usage.prompt_tokens == 8 and 4 <= whole.usage.completion_tokens <= 4 * 16


def test_stop_strings_end_the_text_and_free_the_rest(live):
  ask = functools.partial(
    live.client().chat.completions.create,
    model=live.model,
    messages=ASK,
    max_tokens=40,
    seed=1,
    extra_body={"return_token_ids": True},
  )
  full = ask().choices[0]
  string = full.message.content[4:6]
  cut = ask(stop=string).choices[0]
  assert cut.message.content == full.message.content[: full.message.content.find(string)]
  assert cut.finish_reason == "stop"
  assert full.token_ids[: len(cut.token_ids)] == cut.token_ids


@pytest.mark.parametrize("settings", FILTERS)
def test_log_probs_are_those_of_the_model(live, reference, settings):
  extra = settings.get("extra_body", {}) | {"return_token_ids": True}
  answer = live.client().chat.completions.create(
    model=live.model,
    messages=ASK,
    max_tokens=30,
    seed=2,
    temperature=0.7,
    logprobs=True,
    top_logprobs=5,
    extra_body=extra,
    top_p=settings.get("top_p"),
  )
  prompt = answer.prompt_token_ids
  tokens = answer.choices[0].token_ids
  expected = reference(prompt + tokens)[len(prompt) - 1 : -1]
  content = answer.choices[0].logprobs.content
  got = [x.logprob for x in content]
  np.testing.assert_allclose(got, expected[np.arange(len(tokens)), tokens], atol=1e-4)
  best = -np.sort(-expected, axis=-1)[:, :5]
  top = [[x.logprob for x in entry.top_logprobs] for entry in content]
  np.testing.assert_allclose(top, best, atol=1e-4)


def test_greedy_takes_the_most_probable_tokens(live, reference):
  answer = live.client().chat.completions.create(
    model=live.model,
    messages=ASK,
    temperature=0,
    max_tokens=20,
    extra_body={"return_token_ids": True},
  )
  prompt = answer.prompt_token_ids
  tokens = answer.choices[0].token_ids
  expected = reference(prompt + tokens)[len(prompt) - 1 : -1]
  assert expected.argmax(-1).tolist() == tokens


def test_echo_scores_the_prompt(live, reference):
  ids = [65, 32, 90, 104, 12, 77, 40]
  answer = live.client().completions.create(
    model=live.model, prompt=[ids, ids[:4]], echo=True, max_tokens=1, logprobs=1, temperature=0
  )
  for prompt, choice in zip([ids, ids[:4]], answer.choices, strict=True):
    scored = choice.logprobs.token_logprobs
    assert scored[0] is None and len(scored) == len(prompt) + 1
    expected = reference(prompt)
    want = expected[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(scored[1:-1], want, atol=1e-4)
    best = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
    np.testing.assert_allclose(best, expected.max(-1), atol=1e-4)
  only = live.client().completions.create(
    model=live.model, prompt=ids, echo=True, max_tokens=0, logprobs=1
  )
  np.testing.assert_allclose(
    only.choices[0].logprobs.token_logprobs[1:],
    answer.choices[0].logprobs.token_logprobs[1:-1],
    atol=1e-6,
  )
  assert only.usage.completion_tokens == 0


def test_a_seed_gives_the_same_text_alone_and_among_others(live):
  async def ask(client, seed, **settings):
    answer = await client.chat.completions.create(
      model=live.model, messages=ASK, max_tokens=10 + seed % 30, seed=seed, **settings
    )
    return answer.choices[0].message.content

  async def run():
    async with live.client("AsyncOpenAI") as client:
      settings = [
        FILTERS[seed % 4] | {"temperature": (0.0, 0.5, 1.0)[seed % 3]} for seed in range(64)
      ]
      alone = [await ask(client, seed, **settings[seed]) for seed in range(0, 64, 6)]
      together = await asyncio.gather(*(ask(client, i, **settings[i]) for i in range(64)))
      assert alone == together[::6]
      assert len(set(together)) > 40

  asyncio.run(run())


def test_n_and_seed_are_those_of_the_engine(live):
  """Choice j of a request has the key of completion j in `gtpo sample --seed`."""
  answer = live.client().chat.completions.create(
    model=live.model,
    messages=ASK,
    n=3,
    max_tokens=8,
    seed=11,
    extra_body={"return_token_ids": True},
  )
  worker = live.opened.worker
  from gtpo_jax.sampling.settings import SamplingParams

  engine = worker.engine
  prompt = worker.chat.encode_prompt(ASK)
  assert prompt == answer.prompt_token_ids
  rollouts = engine.sample(
    live.opened.generator._params,
    [prompt],
    jax.random.key(11),
    group=3,
    sampling_params=SamplingParams(),
  )
  assert [x.token_ids for x in answer.choices] == rollouts.tokens[0, :, :8].tolist()


def idle(live, seconds=20.0):
  """Waits until nothing runs or waits."""
  generator = live.opened.generator
  until = time.monotonic() + seconds
  while generator.running or generator.waiting:
    assert time.monotonic() < until, "a slot leaked"
    time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots(live, stream):
  idle(live)
  generator = live.opened.generator
  before = generator.counts["generated_tokens"]
  body = {"model": live.model, "messages": ASK, "n": 120, "max_tokens": 48, "stream": stream}
  ask = functools.partial(httpx2.stream, "POST", f"{live.url}/v1/chat/completions")
  with pytest.raises(httpx2.ReadTimeout), ask(json=body, timeout=0.2) as response:
    for _ in response.iter_bytes():
      raise httpx2.ReadTimeout("hang up")
  idle(live)
  assert generator.counts["generated_tokens"] - before < 120 * 48


def test_a_full_queue_answers_429(folder):
  with running(folder, slots=1, queue=2) as live:
    with pytest.raises(openai.RateLimitError) as caught:
      live.client().chat.completions.create(model=live.model, messages=ASK, n=4, max_tokens=2)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "queue_full"
    answer = live.client().chat.completions.create(
      model=live.model, messages=ASK, n=3, max_tokens=2
    )
    assert len(answer.choices) == 3


def test_more_choices_than_ever_fit_are_refused_before_anything_is_made(live):
  answer = httpx2.post(
    f"{live.url}/v1/completions", json={"model": live.model, "prompt": ["a"] * 1024, "n": 128}
  )
  assert answer.status_code == 429 and live.opened.generator.waiting == 0


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prompt_of_megabytes_does_not_keep_others_waiting(live, path, monkeypatch):
  """It is refused after a piece of it was encoded, and not on the event loop."""
  encoded = []
  threads = set()
  encode = live.opened.worker.chat.encode

  def counted(text, plain=False):
    encoded.append(len(text))
    threads.add(threading.current_thread())
    return encode(text, plain)

  monkeypatch.setattr(live.opened.worker.chat, "encode", counted)
  text = "hello world " * 1_200_000
  body = {"prompt": text} if path == "completions" else {"messages": [{**ASK[0], "content": text}]}
  answer = httpx2.post(f"{live.url}/v1/{path}", json={"model": live.model, **body}, timeout=120)
  assert answer.status_code == 400
  assert "over this server's limit of 64" in answer.json()["error"]["message"]
  assert sum(encoded) < 100_000
  assert not {thread.name for thread in threads} & {"MainThread", "event loop"}
  assert all(thread.name.startswith("asyncio_") for thread in threads)


def test_echo_keeps_the_only_token_of_a_prompt(live):
  answer = live.client().completions.create(
    model=live.model, prompt=[[65], [65, 32]], echo=True, max_tokens=1, logprobs=1
  )
  for length, choice in zip((1, 2), answer.choices, strict=True):
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == length + 1
    assert found.token_logprobs[0] is None and "".join(found.tokens) == choice.text
    assert found.text_offset[0] == 0 and found.text_offset[1] == len(found.tokens[0])


def test_a_page_elsewhere_cannot_have_a_local_server_generate(live):
  """A browser sends such bodies without asking the server; it asks before it sends JSON."""
  body = json.dumps({"model": live.model, "prompt": "a", "max_tokens": 1})
  post = lambda **headers: httpx2.post(
    f"{live.url}/v1/completions", content=body, headers=headers, timeout=120
  )
  before = live.opened.generator.counts["completions"]
  kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
  for kind in kinds:
    answer = post(**{"Content-Type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
  assert post().status_code == 415
  assert live.opened.generator.counts["completions"] == before
  assert post(**{"Content-Type": "application/json; charset=utf-8"}).status_code == 200
  asked = httpx2.options(f"{live.url}/v1/completions", headers={"Origin": "http://elsewhere"})
  assert not any(name.startswith("access-control") for name in asked.headers)


@pytest.mark.parametrize(
  ("host", "status"),
  [
    ("127.0.0.1:8000", 200),
    ("127.0.0.2:8000", 200),
    ("localhost", 200),
    ("[::1]", 200),
    ("[::1]:8000", 200),
    ("elsewhere:8000", 403),
    ("127.0.0.1.elsewhere:80", 403),
    ("192.168.0.1", 403),
    ("[::2]:8000", 403),
  ],
)
def test_hosts_of_this_machine_are_answered(live, host, status):
  assert httpx2.get(f"{live.url}/health", headers={"Host": host}).status_code == status


def test_a_token_may_have_any_characters(folder):
  with running(folder, token="schlüssel") as live:
    get = lambda key: httpx2.get(f"{live.url}/v1/models", headers={"Authorization": key})
    assert get("Bearer schlüssel".encode()).status_code == 200
    assert get("Bearer schlüssel".encode("latin-1")).status_code == 401
    assert get(b"Bearer schl").status_code == 401


def test_a_token_is_required_if_there_is_one(folder):
  with running(folder, token="s3cret") as live:
    for key in ("wrong", "s3cre", "é"):
      headers = {"Authorization": f"Bearer {key}".encode()}
      response = httpx2.get(f"{live.url}/v1/models", headers=headers)
      assert response.status_code == 401
    assert httpx2.get(f"{live.url}/v1/models").status_code == 401
    assert httpx2.get(f"{live.url}/metrics").status_code == 401
    assert httpx2.get(f"{live.url}/health").status_code == 200
    assert live.client(api_key="s3cret").models.list().data[0].id == live.model


def test_wrong_requests_get_one_line(live):
  client = live.client()
  with pytest.raises(openai.NotFoundError, match="there is no model"):
    client.chat.completions.create(model="gpt", messages=ASK)
  with pytest.raises(openai.BadRequestError, match="over this server's limit of 64"):
    client.completions.create(model=live.model, prompt=[5] * 65)
  with pytest.raises(openai.BadRequestError, match="at most 48 can follow"):
    client.completions.create(model=live.model, prompt="a", max_tokens=49)
  with pytest.raises(openai.BadRequestError, match="token id 100000"):
    client.completions.create(model=live.model, prompt=[100_000])
  with pytest.raises(openai.BadRequestError, match="is empty"):
    client.chat.completions.create(model=live.model, messages=[{"role": "user", "content": " "}])
  with pytest.raises(openai.BadRequestError, match="role"):
    client.chat.completions.create(model=live.model, messages=[{"role": "king", "content": "a"}])
  with pytest.raises(openai.BadRequestError, match="cannot be forced"):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    client.chat.completions.create(
      model=live.model, messages=ASK, tools=[tool], tool_choice="required"
    )
  for path, status in (("/v1/nothing", 404), ("/", 404), ("/v1/completions", 405)):
    response = httpx2.get(live.url + path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
  response = httpx2.post(f"{live.url}/v1/completions", content=b"{", headers=AS_JSON)
  assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]
  response = httpx2.post(f"{live.url}/v1/completions", json={"prompt": "a"})
  assert response.json()["error"]["param"] == "model"
  response = httpx2.get(f"{live.url}/v1/models", headers={"Host": "evil.example"})
  assert response.status_code == 403


def test_metrics_and_models(live):
  assert live.client().models.retrieve(live.model).id == live.model
  text = httpx2.get(f"{live.url}/metrics").text
  values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
  assert values["gtpo_slots"] == "16"
  assert int(values["gtpo_generated_tokens_total"]) > 0


TOOL_TEMPLATE = (
  "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
  "Call as <tool_call>...</tool_call><|im_end|>\n{% endif %}"
  "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
  "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
  "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
  "<|im_start|>assistant\n{% endif %}"
)

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
CALL = 'Well.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def chat_with_tools(folder):
  """The small model's tokenizer with a chat template that shows tools."""
  from gtpo_jax.data.chat import Chat, load_chat

  tokenizer = load_chat(folder).tokenizer
  tokenizer.chat_template = TOOL_TEMPLATE
  return Chat(tokenizer)


def test_calls_of_tools(chat_with_tools):
  """The text of a call is parsed; earlier calls are in the prompt."""
  from gtpo_jax.serving.conversation import Conversations

  conversations = Conversations(chat_with_tools)
  message = conversations.message(CALL, [TOOL])
  (call,) = message["tool_calls"]
  assert message["content"] == "Well." and call["function"]["name"] == "add"
  assert json.loads(call["function"]["arguments"]) == {"a": 1}
  assert conversations.message(CALL, [])["content"] == CALL
  broken = "<tool_call>{"
  assert conversations.message(broken, [TOOL])["content"] == broken
  past = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call | {"function": {"name": "add", "arguments": {"a": 1}}}],
  }
  result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
  ids = conversations.encode([*ASK, past, result], [TOOL])
  rendered = conversations.chat.tokenizer.decode(ids)
  assert '"arguments": {"a": 1}' in rendered and rendered.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("text", [CALL, "No call at all.", "<tool_call>{"])
def test_a_stream_of_an_answer_with_tools_is_the_whole_answer(chat_with_tools, text):
  """As the openai client puts the parts together; the ids of calls are random."""
  from openai.lib.streaming.chat import ChatCompletionStreamState
  from openai.types.chat import ChatCompletionChunk

  from gtpo_jax.serving.answers import Answers
  from gtpo_jax.serving.choices import Choice, Part
  from gtpo_jax.serving.requests import ChatRequest, checked, parse_object

  answers = Answers("small", chat_with_tools)
  body = json.dumps({"messages": ASK, "tools": [TOOL], "n": 2}).encode()
  request = checked(ChatRequest, parse_object(body))
  ids = chat_with_tools.encode(text)
  choices = [Choice([1], chat_with_tools, None) for _ in range(2)]

  async def parts():
    for start in range(0, len(ids), 4):
      for index, choice in enumerate(choices):
        tokens = ids[start : start + 4]
        part = Part(tokens, [-1.0] * len(tokens), [], "stop" if start + 4 >= len(ids) else "")
        choice.add(part)
        yield index, part

  async def received():
    state = ChatCompletionStreamState()
    async for chunk in answers.chat_stream(request, choices, parts()):
      state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion().choices

  streamed = asyncio.run(received())
  whole = answers.chat(request, choices)["choices"]
  assert len(streamed) == len(whole) == 2
  for got, expected in zip(streamed, whole, strict=True):
    assert got.finish_reason == expected["finish_reason"]
    assert (got.message.content or None) == (expected["message"]["content"] or None)
    calls = [call.function for call in got.message.tool_calls or ()]
    expected_calls = [call["function"] for call in expected["message"].get("tool_calls", ())]
    assert [{"name": x.name, "arguments": x.arguments} for x in calls] == expected_calls
