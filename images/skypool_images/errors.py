"""`ImageError`, which an image raises for an invalid field, and `nearest`, which suggests a name for a misspelt one."""

from __future__ import annotations

from collections.abc import Mapping


class ImageError(ValueError):
    """The error for an invalid field of an image, or for an unusable local file or environment variable."""


def nearest(word: str, choices: Mapping[str, str]) -> str:
    """Return "; did you mean NAME?" for a mistyped word, or "" if no known spelling is similar.

    `choices` is a dict from each known spelling to the NAME to suggest.
    """
    import difflib  # imported here because only a mistake needs it

    by_fold = {spelling.casefold(): meant for spelling, meant in choices.items()}
    found = difflib.get_close_matches(word.casefold(), by_fold, 1, 0.5)
    return f"; did you mean {by_fold[found[0]]}?" if found else ""
