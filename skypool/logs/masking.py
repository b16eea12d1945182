"""Replaces the values of secrets in text, so that they are not kept in files."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from skypool.safety.encodings import ENCODINGS, base64_parts

_SHORTEST = 4
"""Secrets of fewer characters are not replaced, because they are parts of ordinary words and numbers."""


_HEAD = 16
"""How many of a secret's first characters are searched for, to find a text that ends with its beginning."""


class Masker:
    """Replacer of secrets in streams of text by marks such as `[secret HF_TOKEN]`. `secrets` has the values by name.

    A secret is found as it is, and as it is written in URLs, JSON, Python, shells, HTML, hexadecimal and base64. It is
    found also as a part of a longer text in base64, as in HTTP Basic, and if it is cut into pieces of one stream.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._marks: dict[str, str] = {}
        for name, value in secrets.items():
            if len(value.strip()) < _SHORTEST:
                continue
            mark = f"[secret {name}]"
            for form in (value, value.strip()):
                written = (*(encode(form) for encode in ENCODINGS), *base64_parts(form))
                for each in written:
                    if len(each) >= _SHORTEST:
                        self._marks.setdefault(each, mark)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._characters = frozenset("".join(self._marks))
        self._held: dict[Hashable, str] = {}

    @property
    def is_needed(self) -> bool:
        """True if there are secrets to replace."""
        return self._pattern is not None

    def mask(self, text: str) -> str:
        """Return a text with marks in place of secrets."""
        if self._pattern is None or not any(each in text for each in self._marks):  # which is faster than the pattern
            return text
        return self._pattern.sub(lambda found: self._marks[found[0]], text)

    def feed(self, source: Hashable, text: str) -> str:
        """Return the next piece of a stream, with marks in place of secrets.

        If the piece ends with what may be the beginning of a secret, this end is held back until the next piece.
        `source` is any value that identifies the stream, such as a tuple.
        """
        if self._pattern is None:
            return text
        text = self.mask(self._held.pop(source, "") + text)
        begun = self._begun(text)
        if begun:
            self._held[source] = text[-begun:]
            text = text[:-begun]
        return text

    def finish(self, source: Hashable) -> str:
        """End a stream, and return its text that was held back; or a mark if that text is at least half of a secret."""
        held = self._held.pop(source, "")
        for secret, mark in self._marks.items():
            if len(held) >= max(_SHORTEST, len(secret) / 2) and secret.startswith(held):
                return mark
        return held

    def held(self) -> list[Hashable]:
        """Return the streams of which text is held back."""
        return list(self._held)

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of a text that is the beginning of a secret; 0 if there is none."""
        longest = 0
        if text[-1:] not in self._characters:  # such as the end of a line
            return longest
        for secret in self._marks:
            head = secret[:_HEAD]  # with more than one character, there are few places to look at
            at = text.find(head, max(0, len(text) - len(secret) + 1))
            while at >= 0 and len(text) - at > longest:
                if secret.startswith(text[at:]):
                    longest = len(text) - at
                at = text.find(head, at + 1)
            ends = range(min(len(head), len(secret) - 1, len(text)), longest, -1)
            longest = next((size for size in ends if text.endswith(secret[:size])), longest)
        return longest


def masker_of_bytes(secrets: Mapping[str, str]) -> Masker:
    """Return a masker for bytes, which are given to it as text of one character each (latin-1): no byte is lost."""
    return Masker({name: value.encode("utf-8", "surrogateescape").decode("latin-1") for name, value in secrets.items()})
