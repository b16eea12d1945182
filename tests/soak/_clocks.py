"""A Python whose processes have a clock of their own, which a file moves. The clock of this computer stays as it is."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

_SCRIPT = """#!/bin/bash
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={file} FAKETIME_NO_CACHE=1
export FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1
exec -a "$0" {python} "$@"
"""
_SHARED = Path("/dev/shm")


def _library() -> Path | None:
    found = importlib.util.find_spec("libfaketime")
    places = [] if found is None else [*(found.submodule_search_locations or ())]
    return next((each for place in places for each in sorted(Path(place).rglob("libfaketime.so.1"))), None)


def missing() -> str:
    """Return why no clock can be moved; "" if one can."""
    return "" if _library() is not None else "libfaketime is not installed; `pip install libfaketime` brings it"


class MovedClock:
    """The wall clock of the processes of one Python, and of what they start. Their monotonic clock is not moved.

    Args:
        folder: for the Python and for the file that moves the clock.

    Attributes:
        python: the path of this Python. It has the packages of the one that runs this program.
    """

    def __init__(self, folder: Path) -> None:
        library = _library()
        assert library is not None
        self._before = self._left()
        self._file = folder / "clock"
        self.python = folder / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        base = Path(sys.executable).resolve()
        (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
        (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
        words = {"library": library, "file": self._file, "python": base}
        self.python.write_text(_SCRIPT.format(**{name: shlex.quote(str(path)) for name, path in words.items()}))
        self.python.chmod(0o755)
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Let the clock be so many seconds ahead of that of this computer, or behind it."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)

    def clean(self) -> None:
        """Remove what the library has left in shared memory of processes that were killed."""
        for each in self._left() - self._before:
            if not Path("/proc", each.name.rpartition("_")[2]).exists():
                each.unlink(missing_ok=True)

    @staticmethod
    def _left() -> set[Path]:
        return {*_SHARED.glob("faketime_shm_*"), *_SHARED.glob("sem.faketime_sem_*")}
