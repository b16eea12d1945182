"""What an image refuses, on the line that wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


class ImageError(ValueError):
    """A field that cannot be meant, or a file or variable that an image names and that is not there."""


def nearest(word: str, choices: Mapping[str, str]) -> str:
    """`; did you mean …?`, where a mistyped `word` is close to one of `choices`: spelling -> what is meant by it."""
    by_fold = {spelling.casefold(): meant for spelling, meant in choices.items()}
    found = difflib.get_close_matches(word.casefold(), by_fold, 1, 0.5)
    return f"; did you mean {by_fold[found[0]]}?" if found else ""
