"""`ImageError`, which an image raises for an invalid field, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


class ImageError(ValueError):
    """An invalid field of an image, or a file or variable that the image names and that does not exist."""


def nearest(word: str, choices: Mapping[str, str]) -> str:
    """Return "; did you mean …?" for a mistyped `word`, or "" if no choice is close to it.

    Args:
        word: the mistyped word.
        choices: for each possible spelling, the name to suggest.
    """
    by_fold = {spelling.casefold(): meant for spelling, meant in choices.items()}
    found = difflib.get_close_matches(word.casefold(), by_fold, 1, 0.5)
    return f"; did you mean {by_fold[found[0]]}?" if found else ""
