"""Runs the vendors' command-line tools, and parses their CSV and JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

PATIENCE = 20.0
"""Seconds a tool may take; a driver in trouble can hang its tool for ever."""


def find(tool: str, *places: str) -> str | None:
    """Where a tool is: on PATH, or in one of the directories its vendor installs it to."""
    import shutil  # not needed where nobody asks for devices

    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(places) if places else "")


def ask(argv: Sequence[str], *places: str) -> str | None:
    """What a tool printed; None where it is missing, fails or hangs. Starts nothing where it is missing."""
    import subprocess

    if (path := find(argv[0], *places)) is None:
        return None
    try:
        done = subprocess.run(
            [path, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def table(text: str | None) -> list[list[str]]:
    """The cells of comma-separated lines without a heading."""
    return [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def document(text: str | None) -> Any:
    """A JSON document, past any warnings printed before it; None if there is none."""
    import json

    starts = [at for at in ((text or "").find("{"), (text or "").find("[")) if at >= 0]
    try:
        return json.loads((text or "")[min(starts) :]) if starts else None
    except ValueError:
        return None


def number(cell: object) -> float | None:
    """The number in "81559 MiB", "36.5" or 12; None in "[N/A]", "N/A" and the like."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    words = str(cell).strip("[]").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def whole(cell: object) -> int | None:
    """The same as a whole number."""
    found = number(cell)
    return None if found is None else int(found)


def allowed(variable: str, tokens: Iterable[str]) -> bool:
    """Whether a device, known by any of these tokens, is shown by a pinning variable already set."""
    shown = os.environ.get(variable)
    if shown is None:
        return True
    words = [word.strip() for word in shown.split(",") if word.strip()]
    return any(
        token == word or (token.startswith(word) and not word.isdecimal())
        for token in tokens
        for word in words
        if token
    )
