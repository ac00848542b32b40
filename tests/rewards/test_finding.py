"""Where the answer of a text is, for all kinds: after thinking, in tags, boxes and phrases."""

import itertools
import random
import unicodedata

import pytest

from gtpo_jax.rewards import VOTES, choice_correct, exact_correct, math_correct
from gtpo_jax.rewards.finding import after_thinking, marked_answer
from gtpo_jax.rewards.gym.scores import answer_of

CORRECT = {"math": math_correct, "exact": exact_correct, "choice": choice_correct}
# By language: phrases that state an answer, one with a colon and one a sentence, and a remark.
PHRASES = {
  "en": ("Final answer: {}", "The answer is {}.", "I thought of it for a while"),
  "zh": ("答案：{}", "所以正确答案是{}。", "我们先计算一下"),
  "ja": ("答え：{}", "答えは{}です。", "まず計算します"),
  "ko": ("정답: {}", "따라서 정답은 {}입니다.", "먼저 계산합니다"),
  "es": ("Respuesta final: {}", "La respuesta correcta es {}.", "Primero lo calculamos"),
  "fr": ("Réponse finale : {}", "La réponse est {}.", "Calculons d'abord"),
  "de": ("Antwort: {}", "Die Antwort lautet {}.", "Zuerst rechnen wir"),
  "pt": ("Resposta: {}", "A resposta é {}.", "Primeiro calculamos"),
  "ru": ("Ответ: {}", "Правильный ответ — {}.", "Сначала посчитаем"),
  "ar": ("الإجابة: {}", "الإجابة الصحيحة هي {}.", "نحسب أولا"),
}
STYLES = {
  "box": "{remark}\n$\\boxed{{{answer}}}$",
  "tag": "{remark} <answer>{answer}</answer>",
  "open tag": "{remark}\n<answer> {answer}",  # where a stop string has cut the end
  "hashes": "{remark}\n#### {answer}",
  "colon": "{remark}\n{colon}",
  "sentence": "{remark}\n**{sentence}**",
}
# By kind: right answers and a wrong one.
ANSWERS = {
  "math": ([("7", "7"), ("-3", "-3"), ("0.5", "\\frac{1}{2}"), ("12", "12")], "5"),
  "exact": ([("3a0", "3a0"), ("x = 1", "x = 1"), ("Köln", "Köln"), ("東京", "東京")], "cba"),
  "choice": ([("B", "B"), ("C", "(C)"), ("J", "J"), ("D", "D")], "A"),
}


def write(language, style, answer):
  colon, sentence, remark = PHRASES[language]
  return STYLES[style].format(
    remark=remark, answer=answer, colon=colon.format(answer), sentence=sentence.format(answer)
  )


def test_generated_answers_in_ten_languages_and_six_styles():
  """What is thought before the answer never counts, and a wrong answer is always wrong."""
  draw = random.Random(0)
  count = 0
  for language, style, kind in itertools.product(PHRASES, STYLES, CORRECT):
    rights, wrong = ANSWERS[kind]
    for (right, gold), thinks in itertools.product(rights, (None, "answer", "end")):
      answer = unicodedata.normalize(draw.choice(("NFC", "NFD")), right)
      text = write(language, style, answer)
      other = write(language, style, wrong)
      if thinks:
        decoy = write(draw.choice(list(PHRASES)), draw.choice(list(STYLES)), wrong)
        start = "<think>\n" if thinks == "answer" else ""  # the prompt may have opened it
        text = f"{start}{decoy}\n</think>\n\n{text}"
        other = f"{start}{decoy.replace(wrong, right)}\n</think>\n\n{other}"
      assert CORRECT[kind](text, gold) is True, (text, gold)
      assert CORRECT[kind](other, gold) is False, (other, gold)
      vote = VOTES[kind]
      assert vote(text) != vote(other), text
      count += 2
  assert count >= 2000


@pytest.mark.parametrize(
  ("kind", "completion", "answer", "correct"),
  [
    ("math", "<think>Try \\boxed{5}. Wrong.</think> The final answer is **7**.", "7", True),
    ("math", "<think>Try \\boxed{5}. Wrong.</think> The final answer is **7**.", "5", False),
    ("exact", "<think>Answer: 5</think>\nThe final answer is **7**.", "7", True),
    ("choice", "<think>#### A</think> Answer: B", "B", True),
    ("math", "<answer>x^2+1</answer>", "x^2+1", True),
    ("choice", "<answer>B</answer>", "B", True),
    ("choice", "Answer: $B$", "B", True),
    ("choice", "答案：B", "B", True),
    ("choice", "Final answer: Option B", "B", True),
    ("choice", "La respuesta correcta es la opción B.", "B", True),
    ("choice", "A resposta é a letra B", "B", True),
    ("choice", "（Ｂ）", "B", True),
    ("choice", "Answer: Beta", "B", False),
    ("exact", "<answer>B</answer>", "B", True),
    ("exact", "Answer: これは猫です", "これは猫です", True),
    ("math", "<answer>\nSo 3 + 4 makes \\boxed{7}.\n</answer>", "7", True),
    ("math", "<answer></answer> 7", "7", False),
    ("math", "Answer: 5!", "120", True),
    ("math", "The answer is 3 quarts.", "3", True),
    ("math", "The answer to this problem is 7.", "7", True),
    ("math", "答：小明有7个苹果。", "7", True),
  ],
)
def test_answers_that_people_have(kind, completion, answer, correct):
  assert CORRECT[kind](completion, answer) is correct


@pytest.mark.parametrize(
  ("text", "rest"),
  [
    ("7", "7"),
    ("<think>5</think>7", "7"),
    ("5</think>7", "7"),  # the prompt has opened the thinking
    ("<think>5", ""),  # thinking that never ends has no answer
    ("8 <think>5", "8 "),
    ("<think>5</think>7<think>6", "7"),
    ("<think>5</think>6<think>4</think>7", "7"),
    ("[THINK]5[/THINK]7", "7"),
    ("<reasoning>\n5\n</reasoning>\n<answer>7</answer>", "\n<answer>7</answer>"),
  ],
)
def test_what_follows_the_thinking(text, rest):
  assert after_thinking(text) == rest


def test_the_last_closed_tag_counts():
  assert marked_answer("<answer>5</answer> no: <answer>7</answer> in <answer>") == "7"
  assert marked_answer("<ANSWER>7</Answer>") == marked_answer("<final_answer>7") == "7"


def test_thinking_does_not_count_for_answers_of_reasoning_gym():
  text = "<think><answer>5</answer> \\boxed{5}</think>The answer is 7."
  assert answer_of(text) == answer_of(text, "boxed") == "7"
  assert answer_of(text, "tag") is None
