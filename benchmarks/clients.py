"""Opens exports with other programs, each installed from PyPI in an environment of its own.

    python benchmarks/clients.py --folder=/tmp/clients [--clients=peft,mlx] [--json=clients.json]

It exports the tiny model, adapters on it, and models like Qwen2.5, DeepSeek-R1-Distill-Qwen, Qwen3,
Llama 3 and Mistral. Every client must load them without a warning or an unmatched key, and give the
same 32 greedy tokens, up to the same end token, and the same ids of the chat template. Clients of
Transformers also save a model, which `gtpo_jax` must load. The result is a table in Markdown. The
exit status is 1 if something differs, or if a client opens a case that it is known not to support.

The environments take about 1 GB each; each one is deleted after its client, unless --keep is given.
Only the CPU is used. If pip would install torch for CUDA, set PIP_EXTRA_INDEX_URL to an index that
has its CPU build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import numpy as np
from client_folders import CASES, make
from client_runner import SAVED

from gtpo_jax.models import load

TORCH = "torch==2.13.0"
TOLERANCE = 5e-4
FIELDS = ("yarn fields", "head_dim")
Result = dict[str, Any]


class Client(NamedTuple):
  """A program that opens exports.

  Attributes:
    kind: its function in client_runner.py.
    packages: what pip installs; the table lists them.
    fails: the cases that it is known not to support.
    cases: the cases that it opens.
    without: packages that are removed after the installation.
    own_warnings: beginnings of warnings about its own calls, which it gives for any folder.
  """

  kind: str
  packages: tuple[str, ...]
  fails: tuple[str, ...] = ()
  cases: tuple[str, ...] = ("tiny", *CASES)
  without: tuple[str, ...] = ()
  own_warnings: tuple[str, ...] = ()


CLIENTS = {
  **{
    f"transformers-{version}": Client("transformers", (f"transformers=={version}", TORCH))
    for version in ("4.57.6", "5.5.4", "5.20.2", "5.23.0")
  },
  "peft": Client("peft", ("peft==0.21.2", "transformers==5.23.0", TORCH), (), ("adapter",)),
  "mlx": Client("mlx", ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4", "transformers==5.23.0"), FIELDS),
  "ctranslate2": Client(
    "ctranslate2", ("ctranslate2==4.8.5", "transformers==5.23.0", TORCH), ("yarn", *FIELDS, "llama")
  ),
  # PyPI's torchvision fails beside a torch for the CPU; only models of images need it.
  "openvino": Client(
    "openvino",
    ("optimum-intel[openvino]==2.2.0", TORCH),
    without=("torchvision",),
    own_warnings=(
      "Could not infer whether the model was already converted",
      "Implicitly cleaning up <TemporaryDirectory",
      "`cache_position` is deprecated",
      "`loss_type=None` was set in the config",
      "`torch_dtype` is deprecated",
    ),
  ),
  "onnxruntime-genai": Client(
    "onnxruntime-genai",
    ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers==5.23.0", TORCH),
    ("yarn", "yarn fields"),
  ),
  "llama.cpp": Client(
    "llama.cpp",
    ("xllamacpp==2026.10.11549", "transformers==4.57.6", "sentencepiece", "protobuf<5", TORCH),
    FIELDS,
    ("tiny", "adapter", *CASES),
  ),
}
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source package contains llama.cpp's converter


def run(command: list[str], log: Path, **environment: str) -> int:
  """Runs a command, appends its output to `log`, and returns its status."""
  with log.open("a") as out:
    done = subprocess.run(
      command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
    )
  return done.returncode


def install(client: Client, home: Path, log: Path) -> Path:
  """Makes the client's environment and returns its Python.

  Raises:
    RuntimeError: pip failed.
  """
  python = home / "venv" / "bin" / "python"
  if not python.exists():
    run([sys.executable, "-m", "venv", str(home / "venv")], log)
  packages = [*client.packages, "jinja2", "numpy"]
  if run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *packages], log):
    raise RuntimeError(f"pip could not install {' '.join(client.packages)}; see {log}")
  if client.without:
    run([str(python), "-m", "pip", "uninstall", "--yes", "--quiet", *client.without], log)
  return python


def llama_cpp_source(python: Path, home: Path, log: Path) -> Path:
  """Downloads llama.cpp's converter and returns its folder.

  Raises:
    RuntimeError: pip failed.
  """
  folder = home / "source"
  command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
  if run([*command, "--no-binary=llama-cpp-python", LLAMA_CPP], log):
    raise RuntimeError(f"pip could not download {LLAMA_CPP}; see {log}")
  (archive,) = folder.glob("*.tar.gz")
  with tarfile.open(archive) as opened:
    opened.extractall(folder, filter="data")
  return next(folder.glob("*/vendor/llama.cpp"))


def try_client(name: str, cases: dict[str, Any], folder: Path) -> dict[str, Result]:
  """Installs a client and returns what it computed for each case."""
  client = CLIENTS[name]
  home = folder / "environments" / name
  home.mkdir(parents=True, exist_ok=True)
  log = home / "log"
  try:
    python = install(client, home, log)
    extra = {}
    if client.kind == "llama.cpp":
      extra["LLAMA_CPP"] = str(llama_cpp_source(python, home, log))
  except RuntimeError as error:
    return {case: {"failure": str(error)} for case in client.cases}
  job, result = home / "job.json", home / "result.json"
  job.write_text(json.dumps({case: cases[case] for case in client.cases}))
  result.unlink(missing_ok=True)
  runner = str(Path(__file__).with_name("client_runner.py"))
  run([str(python), runner, client.kind, str(job), str(result)], log, **extra)
  results = json.loads(result.read_text()) if result.exists() else {}
  missing = {"failure": f"no result; see {log}"}
  expected = (*client.cases, *SAVED) if client.kind == "transformers" else client.cases
  return {case: results.get(case, missing) for case in expected}


def faults(client: Client, result: Result, case: dict[str, Any]) -> list[str]:
  """Returns a description of each difference from the expected results."""
  if "failure" in result:
    return [result["failure"]]
  found = []
  if result["error"] > TOLERANCE:
    found.append(f"logits differ by {result['error']:.2g}")
  stop = set(case["stop"])
  cut = lambda rows: [[x for x in row if x not in stop] for row in rows]
  ends = lambda rows: [len(row) for row in cut(rows)]
  if cut(result["completions"]) != cut(case["completions"]):
    same_length = ends(result["completions"]) == ends(case["completions"])
    found.append("greedy tokens differ" if same_length else "completions end elsewhere")
  if result["template"] != case["prompts"]:
    found.append("chat template differs")
  if result.get("keys"):
    found.append(f"unmatched keys: {', '.join(result['keys'][:3])}")
  messages = [*result["warnings"], *result.get("warnings_of_converter", ())]
  messages = [message for message in messages if not message.startswith(client.own_warnings)]
  found += [f"warning: {message[:120]}" for message in messages]
  return found


def faults_of_saved(result: Result) -> list[str]:
  """Returns what is wrong if `gtpo_jax` loads the folder that a client saved."""
  if "failure" in result:
    return [result["failure"]]
  model, params = load(result["folder"], "float32")
  tokens = np.array(result["tokens"], np.int32)
  logits = np.asarray(model.apply({"params": params}, tokens))
  result["error"] = float(np.abs(logits - np.load(result["logits"])).max())
  return [] if result["error"] < TOLERANCE else [f"logits differ by {result['error']:.2g}"]


def table(results: dict[str, dict[str, Result]]) -> list[str]:
  """Returns the rows: a client's packages, then the largest logit error or the faults per case."""
  names = ["tiny", "adapter", *CASES, *SAVED]
  lines = [f"| client | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
  for client, found in results.items():
    cells = []
    for case in names:
      if case not in found:
        cells.append("")
        continue
      bad = found[case]["faults"]
      cells.append("; ".join(bad) if bad else f"{found[case]['error']:.0e}")
    lines.append(f"| {', '.join(CLIENTS[client].packages)} | {' | '.join(cells)} |")
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--folder", required=True, type=Path, help="where everything is written")
  parser.add_argument("--clients", default=",".join(CLIENTS), help="names, joined by commas")
  parser.add_argument("--keep", action="store_true", help="keep the environments")
  parser.add_argument("--json", type=Path, help="where to write the results")
  args = parser.parse_args()
  if unknown := set(args.clients.split(",")) - set(CLIENTS):
    parser.error(f"unknown clients {', '.join(sorted(unknown))}; known are {', '.join(CLIENTS)}")
  folder = args.folder.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / "cases.json"
  if not file.exists():
    file.write_text(json.dumps(make(folder / "exports")))
  cases = json.loads(file.read_text())
  results = {}
  bad = []
  for name in args.clients.split(","):
    results[name] = try_client(name, cases, folder)
    for case, result in results[name].items():
      found = (
        faults_of_saved(result) if case in SAVED else faults(CLIENTS[name], result, cases[case])
      )
      result["faults"] = found
      print(f"{name}: {case}: {'; '.join(found) or format(result['error'], '.1e')}", flush=True)
      if bool(found) != (case in CLIENTS[name].fails):
        bad.append((name, case))
    if not args.keep:
      shutil.rmtree(folder / "environments" / name / "venv", ignore_errors=True)
    if args.json:
      args.json.write_text(json.dumps(results, indent=1))
  print("\n".join(table(results)))
  sys.exit(bool(bad))


if __name__ == "__main__":
  main()
