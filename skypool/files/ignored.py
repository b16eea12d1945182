"""`Ignored`: tells which files `.gitignore` and `.skypoolignore` leave out, as git does it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

OURS = ".skypoolignore"
NAMES = (".gitignore", OURS)
"""The files with patterns, the later one being stronger."""
_MOST = 10_000
"""The number of folders whose patterns are kept in memory."""


class Ignored:
    """The patterns of a folder and all folders below it. In a git checkout, those of the folders above it count, too,
    unless they leave out the folder itself.

    Ask about a folder before what is in it, as `entries.walk` does, and not about what is in one that is left out.

    Args:
        root: the folder.
        names: the names of the files with patterns, of `NAMES`.
    """

    def __init__(self, root: str, names: Sequence[str] = NAMES) -> None:
        self._names = names
        self._root = os.path.abspath(root)
        self._specs: dict[str, tuple[tuple[int, GitIgnoreSpec], ...]] = {}
        above = _checkout(self._root)
        self._above = os.path.relpath(self._root, above).replace(os.sep, "/") if above != self._root else ""
        self._top = above
        parts = self._above.split("/") if self._above else []
        if any(self._left_out("/".join(parts[: number + 1]), True) for number in range(len(parts))):
            self._top, self._above = self._root, ""
            self._specs.clear()

    def __call__(self, path: str, is_folder: bool) -> bool:
        """Return True if a path below the folder is left out."""
        return self._left_out(f"{self._above}/{path}" if self._above else path, is_folder)

    def _left_out(self, whole: str, is_folder: bool) -> bool:
        """Return True if the patterns leave out a path below `_top`."""
        found = False
        for begin, spec in self._of(whole.rpartition("/")[0]):
            said = spec.check_file(whole[begin:] + ("/" if is_folder else "")).include
            if said is not None:
                found = said
        return found

    def _of(self, folder: str) -> tuple[tuple[int, GitIgnoreSpec], ...]:
        """Return the patterns that hold in a folder: where paths begin for them, and the patterns. Weak ones first."""
        known = self._specs.get(folder)
        if known is None:
            above = self._of(folder.rpartition("/")[0]) if folder else ()
            begin = len(folder) + 1 if folder else 0
            known = (*above, *((begin, each) for each in _read(os.path.join(self._top, folder), self._names)))
            if len(self._specs) >= _MOST:
                self._specs.clear()  # a node may ask about any folder
            self._specs[folder] = known
        return known


def _checkout(folder: str) -> str:
    """Return the git checkout that a folder is in, or the folder itself."""
    at = folder
    while True:
        if os.path.exists(os.path.join(at, ".git")):
            return at
        above = os.path.dirname(at)
        if above == at:
            return folder
        at = above


def _read(folder: str, names: Sequence[str]) -> list[GitIgnoreSpec]:
    from pathspec import GitIgnoreSpec

    made = []
    for name in names:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read().split("\n")
        except OSError:
            continue  # there is none
        patterns: list[Any] = []
        for line in lines:
            with contextlib.suppress(ValueError, re.error):  # git, too, passes over a line that is no pattern
                patterns += GitIgnoreSpec.from_lines([line.removesuffix("\r")]).patterns
        made.append(GitIgnoreSpec(patterns))
    return made
