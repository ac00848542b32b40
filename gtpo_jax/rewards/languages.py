"""What texts in several languages call an answer, as data: to add a language, add a row."""

from __future__ import annotations

import unicodedata
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
# The first digits of scripts that write decimal numbers as Latin ones do.
ZEROS = "\u0660\u06f0\u0966\u09e6\u0e50\uff10"
# Full-width forms and punctuation of East Asian scripts, and digits of other scripts, as ASCII.
TO_ASCII = str.maketrans(
  {
    **{0xFF01 + i: chr(0x21 + i) for i in range(0x5E - 1)},
    **{ord(zero) + i: str(i) for zero in ZEROS for i in range(10)},
    "、": ",",
    "\u3000": " ",
    "\u066b": ".",
    "【": "[",
    "】": "]",
  }
)
# Words after a number that multiply it.
SCALES = {
  "hundred": 100,
  "thousand": 1000,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "dozen": 12,
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


def words_of(part: str) -> str:
  """Returns a part of all languages, such as "endings", as a regular expression."""
  words = {word for row in LANGUAGES.values() for word in getattr(row, part).split("|") if word}
  return "|".join(sorted(words, key=lambda word: (-len(word), word)))
