"""Runs the vendors' command-line tools, parses their output, and reads environment variables that hide devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skypool.devices.device import Device

PATIENCE = 20.0
"""Seconds after which a tool is killed. A broken device driver can make a tool hang forever."""


def find(tool: str, *places: str) -> str | None:
    """Return the path of a tool, found on PATH or else in the given directories; None if the tool is not found."""
    import shutil  # imported here because most processes never look for devices

    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(places) if places else "")


def ask(argv: Sequence[str], *places: str) -> str | None:
    """Run a tool and return its standard output as text. Blocks until the tool ends.

    Returns None if the tool is not installed, exits with another status than 0, or takes too long: after `PATIENCE`
    (20) seconds it is killed. The tool's standard error is dropped. The tool runs with LC_ALL=C, which makes it print
    English, and with an empty standard input.

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
    """Return the cells of comma-separated lines without a heading: a list of texts for each line.

    Empty lines, and spaces around cells, are left out. Quotation marks are ordinary characters.
    """
    return [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def document(text: str | None) -> Any:
    """Return the parsed JSON object or list in a tool's output; None if there is none.

    Text before the first "{" or "[" is ignored, because a tool may print warnings there.
    """
    import json

    starts = [at for at in ((text or "").find("{"), (text or "").find("[")) if at >= 0]
    try:
        return json.loads((text or "")[min(starts) :]) if starts else None
    except ValueError:
        return None


def number(cell: object) -> float | None:
    """Return the number at the start of a table cell as a float: 81559.0 for "81559 MiB".

    Square brackets around the cell are ignored. Returns None for anything else, such as "[N/A]", "", None or True.
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


def shown(
    variable: str, devices: Sequence[Device], names: Callable[[Device], Iterable[str]], ordered: bool = True
) -> tuple[Device, ...]:
    """Return those of the given devices that an environment variable of this process does not hide.

    If the variable is not set, no device is hidden. If the variable is set and empty, all devices are hidden.

    Args:
        variable: the name of the variable that lists the visible devices, such as "CUDA_VISIBLE_DEVICES".
        names: returns the texts by which the variable may list a device, such as its index and UUID. "" is ignored. The
            variable may have only the beginning of a UUID, if no other device's UUID begins so.
        ordered: True for a variable that also gives the order of the devices, as those of NVIDIA and AMD do. A word
            that names no device, such as "-1", then hides all devices after it. A device that is named twice hides all
            devices, as in PyTorch.
            https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html read 2026-11-26
    """
    told = os.environ.get(variable)
    if told is None:
        return tuple(devices)
    named = [(device, [name for name in names(device) if name]) for device in devices]
    found: list[Device] = []
    for word in told.split(","):
        device = _named(word.strip(), named)
        if device is not None:
            found.append(device)
        elif ordered:
            break
    if ordered:
        return tuple(found) if len(set(found)) == len(found) else ()
    return tuple(device for device in devices if device in found)


def _named(word: str, named: Sequence[tuple[Device, list[str]]]) -> Device | None:
    """Return the device that a word in an environment variable names; None if the word names none or several."""
    for device, names in named:
        if word in names:
            return device
    if not word or word.isdecimal():
        return None
    matches = [device for device, names in named if any(name.startswith(word) for name in names)]
    return matches[0] if len(matches) == 1 else None
