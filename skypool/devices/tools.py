"""Runs the vendors' command-line tools, parses their output, and reads environment variables that hide devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

PATIENCE = 20.0
"""Seconds after which a tool is killed. A broken device driver can make a tool hang forever."""


def find(tool: str, *places: str) -> str | None:
    """Return the path of a tool, found on PATH or else in the given directories; None if the tool is not found.

    Args:
        tool: the tool's file name.
        places: directories to search if the tool is not on PATH.
    """
    import shutil  # imported here because most processes never look for devices

    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(places) if places else "")


def ask(argv: Sequence[str], *places: str) -> str | None:
    """Run a tool and return its standard output as text. Blocks until the tool ends.

    Returns None if the tool is not installed, exits with another status than 0, or takes longer than `PATIENCE` seconds
    (20), after which the tool is killed. The tool's standard error is dropped. The tool runs with LC_ALL=C, which makes
    it print English, and with an empty standard input.

    Args:
        argv: the tool's name and its arguments.
        places: directories to search if the tool is not on PATH.
    """
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
    """Return the cells of comma-separated lines: a list of texts, without surrounding spaces, for each line.

    Empty lines are left out. Quotation marks are ordinary characters.

    Args:
        text: the lines, without a heading; None gives an empty list.
    """
    return [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def document(text: str | None) -> Any:
    """Return the parsed JSON object or list in a tool's output. Text before the first "{" or "[" is ignored.

    A tool may print warnings before the JSON. Returns None if the text is None or has neither "{" nor "[". Also returns
    None if the rest of the text is not valid JSON.
    """
    import json

    starts = [at for at in ((text or "").find("{"), (text or "").find("[")) if at >= 0]
    try:
        return json.loads((text or "")[min(starts) :]) if starts else None
    except ValueError:
        return None


def number(cell: object) -> float | None:
    """Return the number at the start of a table cell as a float: 81559.0 for "81559 MiB".

    Square brackets around the cell are ignored. An int or a float is converted. Returns None for anything else, such as
    "[N/A]", "N/A", "", None or True.
    """
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    words = str(cell).strip("[]").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def whole(cell: object) -> int | None:
    """Return the number at the start of a table cell as an int, rounded toward zero: 81559 for "81559.7 MiB".

    Returns None if there is no number.
    """
    found = number(cell)
    return None if found is None else int(found)


def allowed(variable: str, tokens: Iterable[str]) -> bool:
    """Return True if an environment variable of this process does not hide a device.

    If the variable is not set, no device is hidden. If the variable is set and empty, all devices are hidden.

    Args:
        variable: name of the environment variable that lists the visible devices, such as "CUDA_VISIBLE_DEVICES".
        tokens: the texts by which the variable may list the device, such as the device's index and UUID. The variable
            may have only the beginning of a UUID. "" among the tokens is ignored.
    """
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
