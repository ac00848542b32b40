"""The last number of running text is taken whole, or not at all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards import math_correct
from gtpo_jax.rewards.math.extraction import extract

# Right answers: a text and the gold answer that it states.
RIGHT = [
  ("So it is 1024.", "1024"),
  ("It is 2^10", "1024"),
  ("We get 3\\sqrt{2}.", "3\\sqrt{2}"),
  ("It is 5π", "5\\pi"),
  ("It is $5\\pi$.", "5\\pi"),
  ("So it equals 5x", "5x"),
  ("It is 3½", "3.5"),
  ("It is 1⅛", "9/8"),
  ("It is 10⁴", "10000"),
  ("It is 10²³", "10^{23}"),
  ("It is 2 3/4 cups", "11/4"),
  ("It is 3 / 4 of it", "3/4"),
  ("It is 1.5 x 10^3 m", "1500"),
  ("That makes 1.000.000 euros", "1000000"),
  ("That makes 12\xa0500 people", "12500"),
  ("That makes 12\u2009500 people", "12500"),
  ("That makes 12'500 people", "12500"),
  ("That makes 12_500 people", "12500"),
  ("First 3, so the sum is 𝟓", "5"),
  ("So it is 1\u200b2", "12"),
  ("It is −5", "-5"),
  ("It is minus 5", "-5"),
  ("It is negative 5 degrees", "-5"),
  ("It is 5 million", "5000000"),
  ("It is 3 dozen eggs", "36"),
  ("She has **72** clips.", "72"),
  ("It is 72!", "72"),
  ("Total: $18", "18"),
  ("x = 5", "5"),
  ("So 5 = x.", "5"),
  ("f(2) = 7", "7"),
  ("16 - 3 - 4 = <<16-3-4=9>>9 eggs", "9"),
  ("9 * 2 = $<<9*2=18>>18", "18"),
  ("Step 1: we add 3 and 4, which gives 7.", "7"),
  ("1. Add\n2. Then\nThe total is 12 apples", "12"),
  ("- 5 apples", "5"),
  ("So the result—5—follows", "5"),
  ("the price per hour is 60/hour", "60"),
  ("It is (5)", "5"),
  ("It is 5 (five)", "5"),
  ("It is (3, 5)", "(3,5)"),
  ("* 5 apples", "5"),
  ("<b>5</b>", "5"),
  ("<answer>She has 5 apples</answer>", "5"),
  ("3 + 4 → 7", "7"),
  ("It costs 5 a day", "5"),
  ("5 I think", "5"),
  ("It is 1/2 or 0.5", "1/2"),
  ("not 5 but 7", "7"),
  ("The answer is 3 or 5", "3,5"),
  ("The answer is $5$ million.", "5000000"),
  ("It is 5cm long", "5"),
  ("It is 60 miles per hour", "60"),
  ("= 5 \\text{ cm}", "5"),
  ("一共5个苹果。", "5"),
  ("所以答案是5万元。", "50000"),
  ("3 times 4 is 12", "12"),
  ("He ran 3 times", "3"),
  ("It is 75%", "75%"),
  ("He is in 4th place", "4"),
  ("She needs 370g of flour", "370"),
  ("So 10 dogs are not barking.", "10"),
  ("They lost a total of 89 pounds", "89"),
  ("66.666...%, which rounds up to 67%", "67"),
  ("The answer is Thus, she has C = 28 - 6 = 22 posters now", "22"),
  ("It is 75 %.", "75"),
  ("| total | 5 |", "5"),
  ("`5`", "5"),
  ("so \\(x = 5\\).", "5"),
  ("so \\[x = 5\\]", "5"),
  ("It costs $2k", "2000"),
  ("So it is $2k per month.", "2000"),
  ("It is £1.5m", "1500000"),
  ("the height is 1200m-300m = 900m", "900"),
  ("So it equals 5m", "5m"),
  ("Answer: 5m/s", "5"),
  ("It is 980cm³", "980"),
  ("It is 980 cm^3", "980"),
  ("It is 5 m^2.", "5"),
  ("It is %95.", "95"),
  ("There are 200 * 38% = 76 sixth graders.", "76"),
  ("It is 72Mb per hour.", "72"),
  ("The answer is 18, not 17.", "18"),
  ("The answer is 18 (not 17)", "18"),
  ("It is 5 bn dollars", "5000000000"),
  ("\\boxed{5 basis points}", "0.0005"),
  ("It is 0.(3)", "1/3"),
  ("x = – 5", "-5"),
  ("It is - 5 degrees", "-5"),
  ("half of 10 is 5", "5"),
  ("She has a total of 5", "5"),
  ("The length of 5 sides is 20", "20"),
]
# Wrong: a text, and a gold answer that only a piece of it states.
WRONG = [
  ("It is 2^10", "10"),
  ("It is 3√2", "2"),
  ("It is 3\\sqrt{2}", "2"),
  ("It is 5π", "5"),
  ("It is 5\\pi", "5"),
  ("It is 5 pi", "5"),
  ("So it equals 5x", "5"),
  ("So it equals 5 x", "5"),
  ("So it equals x + 5", "5"),
  ("So it equals 5(x+1)", "1"),
  ("It is 3½", "3"),
  ("It is 1⅛", "1"),
  ("It is 10⁴", "10"),
  ("It is 10⁴", "4"),
  ("It is 2 3/4", "3/4"),
  ("It is 5 and 3/4", "3/4"),
  ("It is 3 / 4", "4"),
  ("It is 3 ÷ 4", "4"),
  ("It is 1.5 x 10^3", "3"),
  ("It is 1.5 × 10^3", "3"),
  ("It is 1.000.000", "0"),
  ("It is 12\xa0500", "500"),
  ("It is 12\u202f500", "500"),
  ("It is 12'500", "500"),
  ("It is 12’500", "500"),
  ("It is 12_500", "500"),
  ("It is 3,5", "5"),
  ("First 3, so the sum is 𝟓", "3"),
  ("First 3, so the sum is ⑤", "3"),
  ("So it is 1\u200b2", "2"),
  ("It is 5 tenths", "5"),
  ("It is 5-tenths", "5"),
  ("It is 5 squared", "5"),
  ("It is 5 point five", "5"),
  ("It is 5 and a half", "5"),
  ("It is 5 trillion", "5"),
  ("It is 101_2", "101"),
  ("It is |-5|", "-5"),
  ("It is 2 times 5", "5"),
  ("It is 7 minus 5", "5"),
  ("It is 12 divided by 3", "3"),
  ("It is 5 mod 3", "3"),
  ("It is log 5", "5"),
  ("It is 2**5", "5"),
  ("It is x > 5", "5"),
  ("It is >= 5", "5"),
  ("It is ≠ 5", "5"),
  ("It is 5+", "5"),
  ("It is ±5", "5"),
  ("It is 5 * 7", "7"),
  ("It is 5 ✕ 7", "7"),
  ("It is 5‰", "5"),
  ("It is 5′", "5"),
  ("It is 12`500", "500"),
  ("It is (3, 5)", "5"),
  ("It is {3, 5}", "5"),
  ("It is 5 choose 2", "2"),
  ("It is 10 to the 3", "3"),
  ("It is any of 3, 4 and 5", "5"),
  ("It is anything but 5", "5"),
  ("It is 5 give or take 2", "2"),
  ("It is five, or 3", "3"),
  ("It is 5万", "5"),
  ("It is 3 : 4", "3"),
  *((f"It is {dash}5", "5") for dash in "‑‐‒–—―﹣⁻➖\xad－−-"),
  *((f"\\boxed{{{dash}5}}", "5") for dash in "‑‐‒–—―﹣⁻➖\xad－−-"),
  *((f"Answer: {dash}5", "5") for dash in "‑‐‒–—―﹣⁻➖\xad－−-"),
  ("\\boxed{minus 5}", "5"),
  ("\\boxed{negative 5}", "5"),
  ("It is minus 5", "5"),
  ("The answer is minus $5$", "5"),
  ("The answer is $5$ million", "5"),
  ("The answer is either 2, 3 or 5", "5"),
  ("The answer is $2$ or $3$", "3"),
  ("The answer is between 1 and 9", "9"),
  ("The answer is from 3 to 5", "5"),
  ("The answer is not 5", "5"),
  ("The answer is certainly not 5", "5"),
  ("The answer is less than 100", "100"),
  ("The answer is at least 7", "7"),
  ("The answer is at most 7", "7"),
  ("The answer is neither 3 nor 4", "4"),
  ("The answer is 7 or more", "7"),
  ("The answer is not equal to 5", "5"),
  ("It isn't 5", "5"),
  ("5 is not the answer", "5"),
  ("It is 3 or 5", "5"),
  ("It is somewhere between 3 and 5.", "5"),
  ("\\boxed{not 5}", "5"),
  ("\\boxed{5 \\text{ or more}}", "5"),
  ("\\boxed{\\ge 5}", "5"),
  ("It is twice 5", "5"),
  ("It is half of 5", "5"),
  ("It is double 5", "5"),
  ("It is the square of 5", "5"),
  ("It is the square root of 25", "25"),
  ("It is a third of 15", "15"),
  ("It is 20% of 5", "5"),
  ("It is 20 percent of 50", "50"),
  ("It is the sum of 3 and 4", "4"),
  ("It is the difference of 9 and 4", "4"),
  ("It is 5 bn", "5"),
  ("It is 5 mil", "5"),
  ("It is $5k", "5"),
  ("It costs $2k", "2"),
  ("It is 5k", "5"),
  ("It is 5 • 3", "3"),
  ("It is ⌊5.5⌋", "5.5"),
  ("It is 0.(3)", "3"),
  ("It is −\xad5", "5"),
  ("x = – 5", "5"),
  ("It is - 5 degrees", "5"),
  ("It is neg 5", "5"),
  ("It is 5 and/or 6", "6"),
  ("maybe 5, maybe 6", "6"),
  ("It is one of 3, 4, 5", "5"),
  ("It is almost 5 but not quite", "5"),
  ("It is hardly 5", "5"),
  ("It is unlikely to be 5", "5"),
  ("everything besides 5", "5"),
  ("all numbers but 5", "5"),
  ("The answer is none of 5", "5"),
  ("The answer is different from 5", "5"),
  ("The answer is between 3 & 5", "5"),
  ("The answer is within 3 of 5", "5"),
  ("The answer is 3 or maybe 5", "5"),
  ("The answer is 3, or else 5", "5"),
  ("The answer is 3; alternatively 5", "5"),
  ("\\boxed{between 1 and 9}", "9"),
]


def test_a_number_of_running_text_is_taken_whole():
  for text, gold in RIGHT:
    assert math_correct(text, gold) is True, (text, gold, extract(text))


def test_no_piece_of_an_expression_and_no_hedged_number_is_an_answer():
  for text, gold in WRONG:
    assert math_correct(text, gold) is not True, (text, gold, extract(text))


NUMBERS = st.integers(2, 999).map(str)
# What changes a number that it touches, or makes it no answer.
CHANGES = st.sampled_from(
  [
    *("{}x", "{}π", "{}\\pi", "{}½", "{}⁴", "{}^3", "{} × 10^3", "3√{}", "3\\sqrt{{{}}}", "{}_7"),
    *("7 / {}", "{} / 7", "7 + {}", "{} tenths", "{} lakh", "{} squared", "{} trillion", "{}万"),
    *("minus {}", "‑{}", "—{}", "{},5", "{} and a half", "2 times {}", "{} point five", "log {}"),
    *("not {}", "less than {}", "at least {}", "either 1234 or {}", "between 1234 and {}"),
    *("from 1234 to {}", "neither 1234 nor {}", "{} or more", "1\u200b{}", "1\u2009{}"),
    *("twice {}", "half of {}", "the square root of {}", "20% of {}", "the sum of 3 and {}"),
    *("{} bn", "3 • {}", "3 & {}", "maybe 1234, maybe {}", "hardly {}", "within 3 of {}"),
    *("{} modulo 7", "{}\u20dd", "≠ {}", "<{}", "± {}", "{} divided by 3"),
  ]
)


@settings(derandomize=True, max_examples=600, deadline=None)
@given(
  NUMBERS, CHANGES, st.sampled_from(["It is {}", "The answer is {}.", "Answer: {}", "So {}\n"])
)
def test_a_number_that_is_changed_or_hedged_is_not_the_number(number, change, sentence):
  text = sentence.format(change.format(number))
  assert math_correct(f"First 4321. {text}", number) is not True, text


UNKNOWN = st.text("bcdfgjklpqrstvwz", min_size=4, max_size=9)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(NUMBERS, UNKNOWN, st.sampled_from(["\\boxed{{{} {}}}", "\\boxed{{{} \\text{{ {}}}}}"]))
def test_a_word_that_is_no_unit_is_not_dropped(number, word, box):
  assert math_correct(box.format(number, "apples"), number) is True
  assert math_correct(box.format(number, word), number) is not True


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.text(max_size=60) | st.text("0123 ^½√\\frac{}()x+-*/=.,'_%$π⁴𝟓and", max_size=40))
def test_any_text_is_read(text):
  extract(text)
