"""Asks a server as one client program does; `benchmarks/serving_clients.py` runs it.

    python serving_client_runner.py KIND JOB RESULT

JOB has "url", "model", "folder", "questions" and "choices". RESULT gets what the client has read:
"texts", the greedy answers; "streams", the same as streams where the client has them; for lm-eval
"scores" too, the log-likelihoods of the choices, and those of Transformers as "expected".
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 24
Job = dict[str, Any]


def ask_both_ways(job: Job, create: Callable[..., Any]) -> Job:
  """Asks by a function with the arguments of OpenAI's client, with and without a stream."""

  def ask(question: str, **settings: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return create(messages=messages, temperature=0, max_tokens=TOKENS, **settings)

  texts = [ask(question).choices[0].message.content for question in job["questions"]]
  streams = [
    "".join(event.choices[0].delta.content or "" for event in ask(question, stream=True))
    for question in job["questions"]
  ]
  return {"texts": texts, "streams": streams}


def ask_openai(job: Job) -> Job:
  import openai

  client = openai.OpenAI(base_url=job["url"], api_key="none")
  return ask_both_ways(job, functools.partial(client.chat.completions.create, model=job["model"]))


def ask_litellm(job: Job) -> Job:
  import litellm

  server = {"model": f"openai/{job['model']}", "api_base": job["url"], "api_key": "none"}
  return ask_both_ways(job, functools.partial(litellm.completion, **server))


def ask_langchain(job: Job) -> Job:
  from langchain_openai import ChatOpenAI

  chat = ChatOpenAI(
    model=job["model"], base_url=job["url"], api_key="none", temperature=0, max_tokens=TOKENS
  )
  texts = [chat.invoke(question).content for question in job["questions"]]
  streams = [
    "".join(part.content for part in chat.stream(question)) for question in job["questions"]
  ]
  return {"texts": texts, "streams": streams}


def ask_inspect(job: Job) -> Job:
  os.environ["GTPO_BASE_URL"] = job["url"]
  os.environ["GTPO_API_KEY"] = "none"
  from inspect_ai import Task
  from inspect_ai import eval as evaluate
  from inspect_ai.dataset import Sample
  from inspect_ai.model import GenerateConfig
  from inspect_ai.scorer import includes
  from inspect_ai.solver import generate

  task = Task(
    dataset=[Sample(input=question, target="a") for question in job["questions"]],
    solver=generate(),
    scorer=includes(),
    config=GenerateConfig(temperature=0, max_tokens=TOKENS),
  )
  with tempfile.TemporaryDirectory() as folder:
    (log,) = evaluate(task, model=f"openai-api/gtpo/{job['model']}", log_dir=folder, display="none")
    if log.status != "success":
      raise RuntimeError(str(log.error))
    return {"texts": [sample.output.completion for sample in log.samples]}


GENERATION = """\
task: gtpo_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: {tokens}, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
CHOICES = """\
task: gtpo_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


def ask_lm_eval(job: Job) -> Job:
  import lm_eval
  from lm_eval.tasks import TaskManager

  with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.jsonl"
    rows = [{"question": question, "choices": job["choices"]} for question in job["questions"]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("generation", GENERATION), ("choices", CHOICES)):
      file = Path(folder) / f"{name}.yaml"
      file.write_text(text.format(data=json.dumps(str(data)), tokens=TOKENS))
    tasks = TaskManager(include_path=folder, include_defaults=False)

    def run(model: str, arguments: Job) -> tuple[list[str], list[float]]:
      result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["gtpo_generation", "gtpo_choices"],
        task_manager=tasks,
        bootstrap_iters=0,
      )
      samples = result["samples"]
      texts = [sample["resps"][0][0] for sample in samples["gtpo_generation"]]
      scores = [float(r[0][0]) for sample in samples["gtpo_choices"] for r in sample["resps"]]
      return texts, scores

    server = {"model": job["model"], "base_url": f"{job['url']}/completions"}
    texts, scores = run("local-completions", {**server, "tokenizer": job["folder"]})
    reference = {"pretrained": job["folder"], "dtype": "float32", "device": "cpu"}
    expected_texts, expected = run("hf", reference)
  return {"texts": texts, "expected_texts": expected_texts, "scores": scores, "expected": expected}


KINDS = {
  "openai": ask_openai,
  "litellm": ask_litellm,
  "langchain-openai": ask_langchain,
  "inspect-ai": ask_inspect,
  "lm-eval": ask_lm_eval,
}

if __name__ == "__main__":
  kind, job_file, result_file = sys.argv[1:]
  Path(result_file).write_text(json.dumps(KINDS[kind](json.loads(Path(job_file).read_text()))))
