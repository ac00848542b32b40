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
  return "".join(char if char in keep else _symbol(char) for char in text)


def _symbol(char: str) -> str:
  if char in SYMBOLS:
    return SYMBOLS[char]
  if char < " ":
    return chr(0x2400 + ord(char))  # Unicode's control pictures
  if unicodedata.category(char) in HIDDEN_CATEGORIES:
    return f"‹U+{ord(char):04X}›"
  return char
