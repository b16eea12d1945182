"""The folders of the user in which the client keeps files."""

from __future__ import annotations

from pathlib import Path

from skypool.errors import UsageError


def state() -> Path:
    """Return the folder of files that must be kept. It may not exist. Raise UsageError without a home folder."""
    return _folder("user_state_dir")


def cache() -> Path:
    """Return the folder of files that can be made again. It may not exist. Raise UsageError without a home folder."""
    return _folder("user_cache_dir")


def _folder(kind: str) -> Path:
    import platformdirs  # imported here because nodes do not have it, and they may import this module

    try:
        return Path(getattr(platformdirs, kind)("skypool"))
    except RuntimeError as e:  # since platformdirs 4.6
        raise UsageError(
            "skypool finds no folder for its files: $HOME is not set, and the system knows no home of this user; set "
            "HOME, or XDG_STATE_HOME and XDG_CACHE_HOME"
        ) from e
