"""Untrusted text in a form that is safe to show: on a terminal, in a report, in a model card."""

from __future__ import annotations

import unicodedata

SYMBOLS = {
  "\n": "⏎",
  "\t": "⇥",
  "\r": "␍",
  "\x7f": "␡",
  "\u200d": "‹ZWJ›",
  "\u200b": "‹ZWSP›",
  "\ufeff": "‹BOM›",
}
# Control, format, surrogate, unassigned and private-use characters; line and paragraph separators.
HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")


def visible(text: str, keep: str = "") -> str:
  """Returns untrusted text with a symbol for every invisible or directional character.

  Args:
    text: text from a model or a file.
    keep: characters that are not replaced.
  """

  def symbol(char: str) -> str:
    if char < " " and char not in SYMBOLS:
      return chr(0x2400 + ord(char))  # Unicode's control pictures
    is_hidden = unicodedata.category(char) in HIDDEN_CATEGORIES
    return SYMBOLS.get(char) or (f"‹U+{ord(char):04X}›" if is_hidden else char)

  return "".join(char if char in keep else symbol(char) for char in text)
