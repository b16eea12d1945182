"""Texts of strangers, for a terminal: nothing in them moves its cursor, changes its modes or hides anything."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)?|[PX^_][^\x1b\n]{0,512}(?:\x1b\\)?)?"
)
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """A text without escape sequences, control characters and what turns the direction of writing."""
    if text.isascii() and text.isprintable():
        return text
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    return _CONTROLS.sub("", text)
