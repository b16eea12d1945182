"""`unsaved`: the files that a program has written outside of what is fetched or saved.

A node can run this as a program, with `safety.never_sent` beside it. Its only argument has those of `unsaved` as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence

from skypool.safety.never_sent import is_cache

_MOST_NAMED = 1000
"""The most files that are told because they are not saved."""


def unsaved(copy: str, since: int, saved: Sequence[str]) -> list[tuple[str, int]]:
    """Return the files of a project that were written since its program began, as (path, size), the largest first.

    Args:
        since: the time of the beginning, as from `node_folders.begun`.
        saved: the folders below the project that are fetched or saved, which are left out.
    """
    found = []
    for folder, folders, names in os.walk(copy):
        below = os.path.relpath(folder, copy)
        folders[:] = [
            each for each in folders if not is_cache(each) and os.path.normpath(f"{below}/{each}") not in saved
        ]
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(folder, name))
                if about.st_ctime_ns >= since and about.st_size and stat.S_ISREG(about.st_mode):
                    found.append((os.path.normpath(f"{below}/{name}"), about.st_size))
    return sorted(found, key=lambda each: -each[1])[:_MOST_NAMED]


def main(said: str) -> None:
    """Print what is not saved, as a line of JSON."""
    print(json.dumps(unsaved(*json.loads(said))))
