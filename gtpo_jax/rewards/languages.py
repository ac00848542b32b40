"""What texts in several languages call an answer, as data: to add a language, add a row."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple


class Language(NamedTuple):
  """The words of a language, separated by bars as in regular expressions, in Unicode's form NFC.

  Attributes:
    answers: what an answer is called, as in "The answer is 7".
    copulas: what stands between that and the answer, besides a colon.
    options: what a choice is called, as in "option B".
    endings: what may follow the answer in a sentence.
    spaced: whether spaces separate words.
    between: how many words may stand between the answer's name and a colon.
  """

  answers: str
  copulas: str
  options: str = ""
  endings: str = ""
  spaced: bool = True
  between: int = 2


LANGUAGES = {
  "en": Language("answer", "is|equals", "option|choice|letter", between=0),
  "zh": Language(
    "答案|答",
    "是|为|為|应为|應為|应该是|應該是|就是|等于|等於",
    "选项|選項|选择|選擇|选|選",
    spaced=False,
  ),
  "ja": Language(
    "答え|解答|正解|回答", "は", "選択肢|選択", "です|である|だ|になります|となります", spaced=False
  ),
  "ko": Language("정답|해답|답", "은|는", "선택지|보기", "입니다|이다|이에요|예요", spaced=False),
  "es": Language("respuesta", "es|son", "opción|opcion|letra"),
  "fr": Language("réponse|reponse", "est|vaut", "option|choix|proposition|lettre"),
  "de": Language("antwort", "ist|lautet|beträgt", "option|auswahl|buchstabe"),
  "pt": Language("resposta", "é|são", "opção|alternativa|letra"),
  "it": Language("risposta", "è", "opzione|lettera"),
  "nl": Language("antwoord", "is", "optie|keuze"),
  "ru": Language("ответ", "равен|это|—|–|-", "вариант|буква"),
  "ar": Language("الإجابة|الجواب|إجابة|جواب", "هو|هي", "الخيار|خيار"),
  "hi": Language("उत्तर|जवाब", "है", "विकल्प"),
  "vi": Language("đáp án|câu trả lời", "là", "phương|đáp án"),
  "id": Language("jawaban", "adalah", "pilihan|opsi"),
  "tr": Language("cevap|yanıt", "", "seçenek|şık"),
  "pl": Language("odpowiedź", "to|jest", "opcja"),
}

# Letters of other scripts than those of mathematics (Latin without accents, and Greek).
FOREIGN = (
  "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0400-\u052f\u0590-\u05ff\u0610-\u065f"
  "\u066e-\u06ef\u0900-\u0965\u0970-\u0dff\u0e00-\u0e4f\u1100-\u11ff\u1e00-\u1eff\u3040-\u30ff"
  "\u3400-\u9fff\uac00-\ud7a3"
)
# Hyphens, dashes and minus signs that are not in Unicode's category of dashes.
_MINUS_SIGNS = "\u00ad\u02d7\u207b\u208b\u2212\u2796"
# Characters without a width that are in no category of their own.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u20e3\u2800\u3164\ufe00-\ufe0f\uffa0]")
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_LOWERED = re.compile("[\u2080-\u208e]+")


class _Ascii(dict):
  """What characters are in ASCII, for `str.translate`; looked up on first use.

  Decimal digits of all scripts, dashes, spaces, fractions, full-width forms and the letters of
  mathematics have an equivalent; invisible characters become nothing. Others stay.
  """

  def __missing__(self, code: int) -> str:
    self[code] = self._equivalent(chr(code))
    return self[code]

  @staticmethod
  def _equivalent(char: str) -> str:
    category = unicodedata.category(char)
    if char.isascii():
      return char
    if category == "Nd":
      return str(unicodedata.decimal(char))
    if category == "Pd" or char in _MINUS_SIGNS:
      return "-"
    if category == "Cf" or _INVISIBLE.match(char):
      return ""
    if category in ("Zs", "Zl", "Zp"):
      return " " if category == "Zs" else "\n"
    form = unicodedata.decomposition(char).partition(" ")[0]
    plain = unicodedata.normalize("NFKC", char)
    if form == "<fraction>" and not plain.endswith("\u2044"):
      return "\\frac{{{}}}{{{}}}".format(*plain.split("\u2044"))
    is_letter = form == "<font>" and ord(char) >= 0x1D400
    return plain if plain.isascii() and (is_letter or form in ("<wide>", "<small>")) else char


TO_ASCII = _Ascii(
  str.maketrans(
    {
      "、": ",",
      "\u066b": ".",
      "\u066c": ",",
      "\u2018": "'",
      "\u2019": "'",
      "\u02bc": "'",
      "\u2044": "/",
      "\u2215": "/",
      "\u2236": ":",
      "\u2062": "*",
      "\u2063": ",",
      "\u2064": "+",
      "【": "[",
      "】": "]",
    }
  )
)
# Words after a number that multiply it.
SCALES = {
  "hundred": 100,
  "thousand": 1000,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "quadrillion": 10**15,
  "quintillion": 10**18,
  "sextillion": 10**21,
  "septillion": 10**24,
  "octillion": 10**27,
  "nonillion": 10**30,
  "decillion": 10**33,
  "googol": 10**100,
  "lakh": 10**5,
  "crore": 10**7,
  "myriad": 10**4,
  "grand": 1000,
  "gross": 144,
  "score": 20,
  "dozen": 12,
  "permille": Fraction(1, 1000),
  "basis point": Fraction(1, 10**4),
  **dict.fromkeys(("half", "halve"), Fraction(1, 2)),  # and an s
  **{
    name: Fraction(1, number)
    for number, name in enumerate(
      str.split("third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"), 3
    )
  },
  "sixteenth": Fraction(1, 16),
  "twentieth": Fraction(1, 20),
  "hundredth": Fraction(1, 100),
  "thousandth": Fraction(1, 1000),
  "millionth": Fraction(1, 10**6),
  "billionth": Fraction(1, 10**9),
  **dict.fromkeys(("百", "백"), 100),
  **dict.fromkeys(("千", "천", "тыс", "тысяч", "тысячи", "тысяча", "ألف", "آلاف"), 1000),
  **dict.fromkeys(("tausend", "mille", "tysiąc", "tysięcy", "nghìn", "ribu", "हज़ार"), 1000),
  **dict.fromkeys(("万", "萬", "만"), 10**4),
  "लाख": 10**5,
  **dict.fromkeys(("百万", "百萬", "백만", "млн", "миллион", "миллиона", "миллионов"), 10**6),
  **dict.fromkeys(("millón", "millones", "millionen", "milhão", "milhões", "milioni"), 10**6),
  **dict.fromkeys(("مليون", "triệu", "juta"), 10**6),
  "करोड़": 10**7,
  **dict.fromkeys(("亿", "億", "억"), 10**8),
  **dict.fromkeys(("млрд", "миллиард", "миллиарда", "миллиардов", "مليار"), 10**9),
  **dict.fromkeys(("milliard", "milliarde", "milliarden", "miliardi"), 10**9),
}
# Units that begin as a scale does.
SCALED_UNITS = ("千米", "千克", "千瓦", "百分")
# Words after a number that change it in some other way, so they are no units; without those that
# are units in English, such as the quarts and tiers of French.
CHANGING_WORDS = frozenset(
  str.split(
    "medio tercio tercios cuarto cuartos docena docenas demi douzaine "
    "halb halbe drittel viertel dutzend meio terço quarto dúzia mezzo terzo dozzina половина "
    "половины половиной треть трети четверть четверти дюжина نصف ثلث ربع आधा"
  )
)
# In scripts without spaces, what a unit does not contain.
CHANGING_PARTS = str.split(
  "半 分之 打 成 割 折 以上 以下 以内 未満 未满 超 余 又 和 或 百 千 万 萬 亿 億 반 분의"
)


def nfc(text: str) -> str:
  """Returns the text with each letter and its accents as one character, where there is one."""
  return text if text.isascii() else unicodedata.normalize("NFC", text)


def to_ascii(text: str) -> str:
  """Returns the text with the equivalents of `TO_ASCII`, and with raised text as exponents."""
  if text.isascii():
    return text
  text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
  text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
  return text.translate(TO_ASCII)


def words_of(part: str) -> str:
  """Returns a part of all languages, such as "endings", as a regular expression."""
  words = {word for row in LANGUAGES.values() for word in getattr(row, part).split("|") if word}
  return "|".join(sorted(words, key=lambda word: (-len(word), word)))
