"""What an image refuses, on the line that wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ImageError(ValueError):
    """A field that cannot be meant, or a file or variable that an image names and that is not there."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean …?` where one of `choices` is close to `word`, and "" where none is."""
    by_fold = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold(), by_fold, 1, 0.5)
    return f"; did you mean {by_fold[found[0]]}?" if found else ""
