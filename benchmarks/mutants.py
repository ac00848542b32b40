"""Do the tests notice if the code is wrong? Changes one expression at a time and runs their tests.

    python benchmarks/mutants.py --out before.jsonl --count 200
    python benchmarks/mutants.py --out after.jsonl --again before.jsonl

The second command tries the mutants of the first one again, for example after tests were deleted,
and ends with status 1 if any that died now lives. A run that is stopped resumes where it was. A
mutant is named by its file, its function, the code that is changed and how often that code occurred
before in the function, so it is found again if other code moves.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import json
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Code, and the tests that must notice: the default ones of these files and folders.
TARGETS = {
  "algorithms": ["tests/algorithms"],
  "sampling/session.py": ["tests/sampling", "tests/serving/test_generator.py"],
  "sampling/completion.py": ["tests/sampling", "tests/rollout"],
  "rollout": ["tests/rollout", "tests/faults"],
  "training/gradient.py": ["tests/training"],
  "checkpoint": ["tests/checkpoint", "tests/faults"],
  "rewards/math": ["tests/rewards/math"],
}
SWAPS = {
  ast.Lt: ast.LtE,
  ast.LtE: ast.Lt,
  ast.Gt: ast.GtE,
  ast.GtE: ast.Gt,
  ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq,
  ast.Is: ast.IsNot,
  ast.IsNot: ast.Is,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Div,
  ast.Div: ast.Mult,
  ast.And: ast.Or,
  ast.Or: ast.And,
}
LIMIT_S = 900  # of the tests of a mutant; one that hangs has been noticed


class Mutant(NamedTuple):
  """A change of one expression: in `file`, `function` the code `before` becomes `after`."""

  file: str
  function: str
  before: str
  after: str
  occurrence: int


def changed(node: ast.AST) -> ast.AST | None:
  """Returns a changed copy of an expression; None if this kind is not changed."""
  new = copy.deepcopy(node)
  if isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPS:
    new.ops[0] = SWAPS[type(new.ops[0])]()
  elif isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPS:
    new.op = SWAPS[type(new.op)]()
  elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
    new = new.operand
  elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
    new.value = not new.value
  elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
    new.value += 1
  else:
    return None
  return new


def mutants_of(file: str) -> Iterator[tuple[Mutant, str]]:
  """Yields the mutants of a file, each with the text of the changed file."""
  source = (ROOT / file).read_text()
  starts = [0]  # in bytes, as the columns of `ast` are
  for line in source.encode().splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  seen: Counter[tuple[str, str]] = Counter()

  def visit(node: ast.AST, function: str) -> Iterator[tuple[Mutant, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      function = f"{function}.{node.name}".lstrip(".")
      children: list[ast.AST] = list(node.body)  # neither annotations nor decorators
    elif isinstance(node, ast.AnnAssign):
      children = [node.value] if node.value else []
    else:
      children = list(ast.iter_child_nodes(node))
    new = changed(node) if isinstance(node, ast.expr) else None
    if new is not None:
      begin = starts[node.lineno - 1] + node.col_offset
      end = starts[node.end_lineno - 1] + node.end_col_offset
      before = source.encode()[begin:end].decode()
      after = f"({ast.unparse(new)})"
      text = source.encode()[:begin] + after.encode() + source.encode()[end:]
      yield Mutant(file, function, before, after, seen[function, before]), text.decode()
      seen[function, before] += 1
    for child in children:
      if not isinstance(child, ast.JoinedStr):
        yield from visit(child, function)

  yield from visit(ast.parse(source), "")


def every_mutant() -> dict[Mutant, str]:
  """Returns all mutants of `TARGETS`, each with the text of the changed file."""
  package = ROOT / "gtpo_jax"
  found = {}
  for target in TARGETS:
    path = package / target
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
      found |= dict(mutants_of(file.relative_to(ROOT).as_posix()))
  return found


def dies(tree: Path, mutant: Mutant, text: str) -> bool:
  """Returns whether the tests fail in a copy of the project with a mutant."""
  file = tree / mutant.file
  original = file.read_text()
  name = mutant.file.removeprefix("gtpo_jax/")
  tests = next(tests for target, tests in TARGETS.items() if name.startswith(target))
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
  file.write_text(text)
  try:
    done = subprocess.run(command, cwd=tree, capture_output=True, timeout=LIMIT_S)
    return done.returncode != 0
  except subprocess.TimeoutExpired:
    return True
  finally:
    file.write_text(original)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=Path, required=True, help="a JSON line for each mutant")
  parser.add_argument("--count", type=int, default=200, help="mutants, the same number per target")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--jobs", type=int, default=2)
  parser.add_argument("--again", type=Path, help="an earlier --out, whose mutants are tried")
  args = parser.parse_args()
  texts = every_mutant()
  read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
  name = lambda row: Mutant(*(row[field] for field in Mutant._fields))
  earlier = {name(row): row["dies"] for row in read(args.again)} if args.again else {}
  chosen = list(earlier)
  if not args.again:
    draw = random.Random(args.seed)
    for target in TARGETS:
      of_target = [x for x in texts if x.file.startswith(f"gtpo_jax/{target}")]
      chosen += draw.sample(of_target, min(-(-args.count // len(TARGETS)), len(of_target)))
  results: dict[Mutant, Any] = (
    {name(x): x["dies"] for x in read(args.out)} if args.out.exists() else {}
  )
  trees: queue.Queue[Path] = queue.Queue()

  def run(mutant: Mutant) -> None:
    if mutant not in texts:
      results[mutant] = None  # its code has gone
    else:
      tree = trees.get()
      results[mutant] = dies(tree, mutant, texts[mutant])
      trees.put(tree)
    row = {**mutant._asdict(), "dies": results[mutant]}
    with args.out.open("a") as file:
      file.write(json.dumps(row) + "\n")
    print(f"{'gone' if row['dies'] is None else 'dies' if row['dies'] else 'LIVES'}: {mutant}")

  with tempfile.TemporaryDirectory() as folder:
    for job in range(args.jobs):
      skip = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "site", "build")
      trees.put(shutil.copytree(ROOT, Path(folder) / str(job), ignore=skip))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      list(pool.map(run, [mutant for mutant in chosen if mutant not in results]))
  tried = [results[mutant] for mutant in chosen if results[mutant] is not None]
  print(f"{sum(tried)} of {len(tried)} mutants died")
  lost = [x for x in chosen if earlier.get(x) and results[x] is False]
  for mutant in lost:
    print(f"died before and lives now: {mutant}")
  return bool(lost)


if __name__ == "__main__":
  sys.exit(main())
