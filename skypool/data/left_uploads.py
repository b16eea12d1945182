"""Notes in which buckets pools save, and finds the unfinished uploads that ended pools have left there.

Each run of a pool has a file in the folder `places` of the state folder, as long as it may have left something. It has
the names of the variables with the keys, and no keys.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from skypool import clock
from skypool.buckets import unfinished
from skypool.buckets.bucket import Bucket
from skypool.data.local_files import is_inside
from skypool.data.save_asked import overlap
from skypool.errors import NotPrivate
from skypool.safety import private, user_folders

OLD = timedelta(days=1)
"""The age of an upload that nobody finishes any more."""
CLOCKS = timedelta(minutes=5)
"""By how much the clock of a store may be wrong."""
_MOST = 500
"""The most files: those of the newest runs."""
_SESSION = re.compile(r"\w{1,64}")
_lock = threading.Lock()
"""Held while a note is changed."""


class Noted(NamedTuple):
    """A run of a pool that saves, or has saved, to buckets. `since` is when it began."""

    session: str
    since: datetime
    buckets: tuple[Bucket, ...]


def note(session: str, buckets: Iterable[Bucket]) -> None:
    """Note that a run of a pool saves to buckets. It may be called again, for further ones.

    Raises:
        NotPrivate: another user can change the folder of the notes.
        OSError: the note cannot be written.
    """
    wanted = [each for each in buckets if each.scheme != "file"]
    if not wanted:
        return
    file = private.folder(_folder(), private.STATE) / f"{session}.json"
    with _lock:
        before = _read(file)
        at = before.since.timestamp() if before else clock.now()
        both = dict.fromkeys([*(before.buckets if before else ()), *wanted])
        part = file.with_suffix(f".{secrets.token_hex(8)}")
        part.write_text(json.dumps({"at": at, "buckets": [asdict(each) for each in both]}))
        part.replace(file)
    for old in sorted(file.parent.glob("*.json"), key=_written)[:-_MOST]:
        old.unlink(missing_ok=True)


def _written(file: Path) -> float:
    """Return when a file was written; 0 if another process has removed it."""
    with suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0


def forget(session: str) -> None:
    """Remove the note of a run that has left nothing. Raises OSError if it cannot be removed."""
    (_folder() / f"{session}.json").unlink(missing_ok=True)


def noted() -> list[Noted]:
    """Return all runs that may have left something.

    Raises NotPrivate if another user can change the folder of the notes.
    """
    folder = _folder()
    if not folder.exists():
        return []
    private.check(folder, private.STATE)
    return [found for each in sorted(folder.glob("*.json")) if (found := _read(each)) is not None]


def left(
    bucket: Bucket,
    runs: Sequence[Noted],
    ended: Callable[[str], float | None],
    variables: Mapping[str, str] = os.environ,
) -> list[unfinished.Unfinished]:
    """Return the unfinished uploads below a bucket's prefix that are a day old, or that ended runs have left.

    Args:
        runs: all that are noted.
        ended: returns when the run of a session has ended, in seconds since 1970, or None if it goes on.

    Raises as `unfinished.uploads` does.
    """
    near = [(run, place) for run in runs for place in run.buckets if overlap(place, bucket)]
    ends = {run.session: ended(run.session) for run, _ in near}
    old = clock.now() - OLD.total_seconds()
    late = CLOCKS.total_seconds()

    def is_left(upload: unfinished.Unfinished) -> bool:
        began = upload.began.timestamp()
        theirs = [
            ends[run.session]
            for run, place in near
            if (not place.prefix or is_inside(upload.key, place.prefix)) and began >= run.since.timestamp() - late
        ]
        if None in theirs:  # it may be of a run that goes on
            return False
        return began < old or any(end is not None and began <= end + late for end in theirs)

    return [each for each in unfinished.uploads(bucket, variables) if is_left(each)]


def forget_all(runs: Sequence[Noted], clean: Collection[Bucket], ended: Callable[[str], float | None]) -> None:
    """Remove the notes of ended runs all of whose buckets are clean. Raises OSError if one cannot be removed."""
    for each in runs:
        if {*each.buckets} <= {*clean} and ended(each.session) is not None:
            forget(each.session)


def _folder() -> Path:
    return user_folders.state() / "places"


def _read(file: Path) -> Noted | None:
    """Return what a file says; None if there is none, or none of this version."""
    if not _SESSION.fullmatch(file.stem):
        return None
    try:
        said = json.loads(private.read(file))
        buckets = tuple(Bucket(**each) for each in said["buckets"])
        return Noted(file.stem, datetime.fromtimestamp(said["at"], UTC), buckets)
    except NotPrivate:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None
