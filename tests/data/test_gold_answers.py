"""What is accepted is understood: gold answers of all kinds, judged by their own verifiers.

Rows are generated in every notation, written to files, and read as a run reads them. Of each row
that is accepted, a completion that states the answer must be right, an empty one wrong, and another
value wrong. The generators know which rows must be accepted and which refused.
"""

import decimal
import json
import random
from fractions import Fraction

import pytest

from gtpo_jax.config.data_sections import RewardSection
from gtpo_jax.data.sources import load_records, load_source
from gtpo_jax.rewards import VERIFIERS, check_gold, truth_marks
from gtpo_jax.rewards.math.extraction import gold_answer

LETTERS = "ABCDEFGHIJ"
PIECES = (
  *(
    "word",
    "Word",
    "two words",
    "Köln",
    "上海",
    "it's",
    "x_1",
    "a\tb",
    "a\nb",
    " ",
    "...",
    "**b**",
  ),
  *(r"\text{a b}", r"\text{}", r"\mbox{ }", r"\textbf{c}", r"\frac{a}{b}", r"\boxed{7}", "{", "}"),
  *(
    "def f(x):\n  return {x: [1]}",
    '{"a": [1, 2]}',
    "#### 5",
    "Answer: 6",
    "$x$",
    "\\",
    "`y`",
    ".",
  ),
)
UNITS = ("km", "cm^2", "dollars", "per box", r"\text{ kg}", "degrees", r"\%", "apples")


def number(rng):
  """Returns a number in one of its notations, and its value; a percentage counts as its number."""
  n = rng.choice((rng.randint(0, 9), rng.randint(10, 999), rng.randint(1000, 10**7)))
  sign = rng.choice(("", "", "", "-"))
  d = rng.randint(2, 99)
  places = rng.randint(1, 4)
  digits = f"{n / 10**places:.{places}f}"
  texts = {
    str(n): n,
    f"{n:,}": n,
    f"{n:,}".replace(",", "{,}"): n,
    digits: Fraction(digits),
    f"{n}/{d}": Fraction(n, d),
    rf"\frac{{{n}}}{{{d}}}": Fraction(n, d),
    rf"\dfrac{{{n}}}{{{d}}}": Fraction(n, d),
    f"{n}e{places}": n * 10**places,
    f"{n}.0": n,
    f"{n}%": n,
    rf"{digits}\%": Fraction(digits),
    f"{n} {rng.choice(UNITS[:6])}": n,
    f"0x{n:X}": n,
    f"{n} million": n * 10**6,
    rf"{n}^\circ": n,
  }
  text, value = rng.choice(list(texts.items()))
  if rng.random() < 0.2 and not sign and text[0].isdigit() and "e" not in text:
    return f"${text}", Fraction(value)
  return sign + text, -Fraction(value) if sign else Fraction(value)


def math_row(rng):
  """A number, or several; returns an answer, and pairs of completions with their verdicts."""
  text, value = number(rng)
  if rng.random() < 0.6:
    wrap = rng.choice(
      ("{}", "{}", "{}", "${}$", r"\boxed{{{}}}", "so\n#### {}", "The answer is {}.")
    )
    text = wrap.format(text) if "$" not in text else text
    percent = "%" if "%" in text else ""
    return text, [(f"{value}{percent}", True), (f"{value + 1}{percent}", False)]
  items = [rng.randint(-9, 99) for _ in range(rng.randint(2, 4))]
  inside = ", ".join(map(str, items))
  other = ", ".join(map(str, [items[0] + 100, *items[1:]]))
  groups = [
    ("({})", "({})"),
    ("[{})", "[{})"),
    (r"\{{{}\}}", r"\left\{{ {} \right\}}"),
    ("{}", "{}"),
  ]
  left, right = rng.choice(groups)
  if rng.random() < 0.2:  # a row of a matrix
    return inside.replace(",", " "), [
      (inside.replace(",", ""), True),
      (other.replace(",", ""), False),
    ]
  return left.format(inside), [(right.format(inside), True), (right.format(other), False)]


def symbols(rng):
  """An answer that only math-verify compares."""
  n = rng.randint(2, 99)
  forms = (r"\sqrt{{{}}}", r"x^{{{}}}+1", r"{}\pi", r"(-\infty, {}] \cup [{}, \infty)", r"x \le {}")
  return rng.choice(forms).replace("{}", str(n)).replace("{{", "{").replace("}}", "}"), []


def choice(rng):
  letter = rng.choice(LETTERS)
  other = rng.choice(LETTERS.replace(letter, ""))
  form = rng.choice(("{}", "({})", "{}.", "{})", "**{}**", r"\text{{{}}}", '"{}"'))
  return form.format(rng.choice((letter, letter.lower()))), [(letter, True), (f"({other})", False)]


def text(rng):
  """A text, of which nothing is known but that it must hold if it is accepted."""
  return rng.choice(("", " ")).join(rng.choices(PIECES, k=rng.randint(1, 3))), []


def digits(rng):
  n = rng.randint(0, 10**6)
  return str(n), []


def countdown(rng):
  """Numbers with a target that some steps reach."""
  numbers = [rng.randint(1, 30) for _ in range(rng.randint(2, 4))]
  total, *rest = numbers
  steps = []
  for x in rest:
    new = rng.choice((total + x, total * x, *([total - x] if total >= x else [])))
    operator = next(
      o for o, y in zip("+*-", (total + x, total * x, total - x), strict=True) if y == new
    )
    steps.append(f"{total}{operator}{x}={new}")
    total = new
  return str(total), [(",".join(steps), True), (steps[0] + ",1+1=3", False)], numbers


REFUSED = (
  {"kind": "choice", "answer": "K"},
  {"kind": "choice", "answer": "AB"},
  {"kind": "exact", "answer": r"\text{}"},
  {"kind": "math", "answer": r"\text{ }"},
  {"kind": "math", "answer": r"\frac{1}{2"},
  {"kind": "math", "answer": "7" * 1001},
  {"kind": "countdown", "answer": "5", "numbers": [7, 8]},
  {"kind": "last_number", "answer": "1,000"},
  {"kind": "code", "answer": "f", "test_list": []},
  {"kind": "math", "answer": "5", "truth": [["5", " "]]},
)
CODE = {"kind": "code", "answer": "f", "extra": {"test_list": ["assert f(1) == 2"]}}


def row(rng, index):
  """Returns a row, and the completions in a box whose verdict is known; None if it is refused."""
  prompt = {"prompt": f"question {index}"}
  if rng.random() < 0.05:
    return prompt | rng.choice(REFUSED), None
  if rng.random() < 0.02:
    return prompt | CODE, []
  kind, make = rng.choice(
    [("math", math_row)] * 6
    + [("math", symbols), ("choice", choice), ("exact", text), ("exact", text), ("math", text)]
    + [("last_number", digits), ("forks", digits), ("countdown", countdown)]
  )
  answer, cases, *numbers = make(rng)
  made = prompt | {"answer": answer, "kind": kind}
  if numbers:
    made["extra"] = {"numbers": numbers[0]}
  if kind == "math" and make is math_row and rng.random() < 0.3:
    made["kind"] = None
  if rng.random() < 0.3:
    values = [number(rng)[0] for _ in range(rng.randint(1, 3))]
    made["truth"] = [[f"step {i} = ", value] for i, value in enumerate(values)]
  return made, cases


def statements(problem):
  """Returns the completions that state an answer; one of them at least must be right."""
  answer = problem.answer
  if problem.kind == "forks":
    return ["".join(digit * 2 for digit in answer)]
  if problem.kind == "last_number":
    return [f"so {answer}"]
  if problem.kind == "math":
    answer = gold_answer(answer).strip()  # without the solution before it
  boxed = [rf"thus \boxed{{{answer}}}"]
  return [*boxed, f"Answer: {answer}", answer] if problem.kind == "exact" else boxed


def verdicts(problem, completions):
  """Returns the verdicts of the problem's own verifier."""
  n = len(completions)
  extras = [problem.extra] * n
  return VERIFIERS[problem.kind](completions, [problem.answer] * n, extras, RewardSection())


def assert_understood(problem, cases):
  """The gold answer, an empty completion and the cases have the verdicts that they must have."""
  if problem.kind != "code":
    if problem.kind != "countdown":
      assert True in verdicts(problem, statements(problem)), problem
    assert not any(verdicts(problem, ["", " ", r"\boxed{}"])), problem
    for completion, verdict in cases:
      text = completion if problem.kind == "countdown" else rf"\boxed{{{completion}}}"
      assert verdicts(problem, [text]) == [verdict], (problem, completion)
  steps = problem.extra.get("truth") or []
  if steps:
    completion = "; ".join(before + value for before, value in steps)
    marks = truth_marks(problem.kind, "", completion, problem.answer, problem.extra)
    assert marks.count("d") == sum(len(value) for _, value in steps), (steps, marks)
  for before, value in steps:
    marks = truth_marks("math", "", f"{before}13579{value}", "1", {"truth": [[before, value]]})
    assert "D" in marks and "d" not in marks, (before, value, marks)


def check_rows(count, seed, folder):
  rng = random.Random(seed)
  made = [row(rng, i) for i in range(count)]
  file = folder / "rows.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row, _ in made))
  loaded = load_source(str(file), bad_rows=count, check=check_gold)
  cases = {row["prompt"]: cases for row, cases in made}
  kept = {problem.messages[0]["content"]: problem for problem in loaded.problems}
  texts = {row["prompt"] for row, _ in made if row["answer"] and cases[row["prompt"]] == []}
  for prompt, expected in cases.items():
    if expected is None:
      assert prompt not in kept, kept.get(prompt)
    elif prompt not in texts:
      assert prompt in kept, (prompt, [bad for bad in loaded.bad if prompt in bad][:1])
  for prompt, problem in kept.items():
    assert_understood(problem, cases[prompt])
  assert len(kept) > 0.8 * count


def check_columns(count, seed, folder):
  """The same values in columns of Parquet of every type, with kinds that are null."""
  import pyarrow
  import pyarrow.parquet

  rng = random.Random(seed)
  types = {
    "float32": (pyarrow.float32(), 3),
    "float64": (pyarrow.float64(), 9),
    "int64": (pyarrow.int64(), 0),
    "decimal": (pyarrow.decimal128(12, 4), 4),
    "string": (pyarrow.string(), 9),
  }
  for name, (kind, places) in types.items():
    texts = [f"{rng.randint(-999, 999) / 10**places:.{places}f}" for _ in range(count)]
    convert = {"string": str, "decimal": decimal.Decimal, "int64": int}.get(name, float)
    answers = pyarrow.array(list(map(convert, texts)), kind)
    kinds = pyarrow.array([rng.choice((None, "math")) for _ in texts], pyarrow.string())
    prompts = [f"question {i}" for i in range(count)]
    table = {"prompt": prompts, "answer": answers, "kind": kinds}
    file = folder / f"{name}.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    loaded = load_source(str(file), check=check_gold)
    assert len(loaded.problems) == count
    for problem, text in zip(loaded.problems, texts, strict=True):
      value = Fraction(text)
      assert_understood(problem, [(text, True), (str(value), True), (str(value + 1), False)])


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.manual)])
def test_accepted_answers_are_understood(count, tmp_path):
  check_rows(count, count, tmp_path)
  check_columns(count // 10, count, tmp_path)


# Tasks of reasoning-gym that the kind chosen for their answers judges well.
CHOSEN = str.split(
  "acre aiw arc_1d basic_arithmetic binary_matrix bitwise_arithmetic calendar_arithmetic chain_sum "
  "complex_arithmetic count_primes decimal_arithmetic dice fraction_simplification game_of_life "
  "gcd gsm_symbolic knights_knaves lcm leg_counting maze mini_sudoku number_sorting "
  "polynomial_multiplication prime_factorization products rotate_matrix simple_equations "
  "simple_geometry spell_backward spiral_matrix string_splitting syllogism word_ladder"
)
# Tasks that need the kind exact: math has no verdict on other answers, or accepts some of them.
BY_EXACT = str.split(
  "base_conversion cryptarithm futoshiki group_anagrams jugs n_queens quantum_lock "
  "time_intervals tower_of_hanoi word_sorting"
)


def changed(answer, rng):
  """Returns the answer with another digit, or another letter if it has none."""
  places = [i for i, c in enumerate(answer) if c in "0123456789"]
  places = places or [i for i, c in enumerate(answer) if c.isalpha()] or [0]
  i = rng.choice(places)
  other = str((int(answer[i]) + 1) % 10) if answer[i] in "0123456789" else "Qq"[answer[i] == "Q"]
  return answer[:i] + other + answer[i + 1 :]


@pytest.mark.slow
def test_answers_of_reasoning_gym():
  """The published answer is right, and one with a changed digit or letter is wrong."""
  gym = pytest.importorskip("reasoning_gym")
  rng = random.Random(0)
  for name in CHOSEN + BY_EXACT:
    rows = gym.create_dataset(name, size=25, seed=2)
    kind = {"kind": "exact"} if name in BY_EXACT else {}
    made = [{"prompt": row["question"], "answer": row["answer"], **kind} for row in rows]
    for problem in load_records(made, name, check=check_gold).problems:
      wrong = rf"\boxed{{{changed(problem.answer, rng)}}}"
      assert_understood(problem, [(problem.answer, True)])
      assert verdicts(problem, [wrong]) == [False], (name, problem.answer, wrong)
