"""The files in which the events of pools are kept, and the limits of their size and age.

Each run of a pool has a folder `logs/POOL/BEGAN-SESSION` in the user's state folder. BEGAN is the time of its start,
and SESSION the id of the run. The folder has segments, `000001.jsonl` and so on, with one JSON object a line. Only the
user can read them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skypool.checks import seconds
from skypool.errors import UsageError
from skypool.safety import private, user_folders

SWITCH = "SKYPOOL_LOGS"
"""The environment variable that sets the limits: "off", or text such as "pool=64MB all=1GB age=30d"."""
SEGMENTS = 8
"""The most segments of a run. Together they have the size that one run may have. The oldest one is removed first."""
_SETTLED = 2 * 3600.0
"""Seconds since its last change after which a run may be removed to make room for others.

The run of a live pool is changed at least once an hour.
"""
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", re.IGNORECASE)
_RUN = re.compile(r"\d{8}T\d{6}-[0-9a-f]+")
_SEGMENT = re.compile(r"(\d{6,})\.jsonl")
_NAME = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what is kept.

    Attributes:
        pool: bytes for one run of a pool; 0 keeps nothing. The oldest output is removed first.
        total: bytes for all pools. The runs that changed least recently are removed first.
        age: seconds since its last change after which a run is removed.
    """

    pool: int = 64 * 10**6
    total: int = 10**9
    age: float = 30 * 86400.0


def limits(environ: Mapping[str, str] = os.environ) -> Limits:
    """Return the limits that the variable `SKYPOOL_LOGS` sets, or the defaults. Raise UsageError for a wrong value."""
    said = environ.get(SWITCH, "").strip()
    if said.lower() == "off":
        return Limits(pool=0)
    found = Limits()
    pool, total, age = found.pool, found.total, found.age
    for word in said.split():
        name, _, value = word.partition("=")
        match name:
            case "pool":
                pool = _size(value)
            case "all":
                total = _size(value)
            case "age":
                age = seconds(f"age in {SWITCH}", value)
            case _:
                raise UsageError(
                    f'{SWITCH} must be "off" or limits such as "pool=64MB all=1GB age=30d", not {said!r}; the part '
                    f"{word!r} is not known"
                )
    return Limits(pool, total, age)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    size = int(float(found[1]) * _UNITS.get(found[2].upper(), 0)) if found else 0
    if size < 10**6:
        raise UsageError(f"a size in {SWITCH} must be at least 1MB, such as 64MB or 1GB, not {text!r}")
    return size


def folder() -> Path:
    """Return the folder of all logs. It may not exist yet."""
    return user_folders.state() / "logs"


def pools() -> list[str]:
    """Return the sorted names of the pools that have logs. Raise NotPrivate if another user can change the folder."""
    with contextlib.suppress(FileNotFoundError):
        private.check(folder(), private.STATE)
        return sorted(each for each in os.listdir(folder()) if _NAME.fullmatch(each))
    return []


def runs(pool: str) -> list[Path]:
    """Return the folders of the runs of a pool, the oldest first; [] if there are none.

    Raises NotPrivate if another user can change the folder of the logs.
    """
    if not _NAME.fullmatch(pool):  # a path must not lead out of the folder
        return []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        private.check(folder(), private.STATE)
        return sorted(each for each in (folder() / pool).iterdir() if _RUN.fullmatch(each.name))
    return []


def segments(run: Path) -> dict[int, Path]:
    """Return the segments of a run by number, in order; {} if the run's folder is gone."""
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(run):
            if match := _SEGMENT.fullmatch(name):
                found[int(match[1])] = run / name
    return dict(sorted(found.items()))


def segment(run: Path, number: int) -> Path:
    """Return the path of a segment of a run."""
    return run / f"{number:06}.jsonl"


def make_run(pool: str, session: str) -> Path:
    """Return the folder of the run `session` of a pool, and make it if it does not exist. Only the user can enter it.

    A process that takes the pool over uses the same folder. Raises OSError if the folder cannot be made, or another
    user can change it.
    """
    for each in runs(pool):
        if each.name.endswith(f"-{session}"):
            return each
    made = folder() / pool / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{session}"
    for each in (folder(), made.parent, made):
        private.folder(each, private.STATE)
    return made


def size(run: Path) -> int:
    """Return the bytes of all segments of a run."""
    total = 0
    for path in segments(run).values():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def prune(kept: Limits, keep: Path) -> None:
    """Remove runs that are older than `kept.age`. If the others are larger than `kept.total`, remove more of them.

    Those that changed least recently are removed first. The run `keep` is never removed. A run that changed in the last
    two hours is not removed to make room, as its pool may be running.
    """
    now = time.time()
    found: list[tuple[float, Path]] = []
    for pool in pools():
        for run in runs(pool):
            with contextlib.suppress(FileNotFoundError):
                changed = max(each.stat().st_mtime for each in (run, *segments(run).values()))
                if run != keep:
                    found.append((changed, run))
    total = sum(size(run) for _, run in found)
    for changed, run in sorted(found):
        if now - changed > kept.age or (total > kept.total and now - changed > _SETTLED):
            total -= size(run)
            shutil.rmtree(run, ignore_errors=True)
            with contextlib.suppress(OSError):  # the pool has other runs
                run.parent.rmdir()
