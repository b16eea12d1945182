"""Caches of their own for clients that are processes of their own."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from skypool.safety import private, user_folders
from skypool.shipping import package_zip


def with_zip(cache: Path) -> Path:
    """A cache, for XDG_CACHE_HOME, that has the zip for nodes and nothing else. To make the zip takes a second."""
    package_zip.bundle()
    kept = user_folders.cache() / "bundles"
    place = private.folder(cache / "skypool" / "bundles")
    for file in (*kept.glob("bundle-of-*.json"), kept / f"bundle-{package_zip.bundle().hash}.zip"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove what it has not used for long
            shutil.copy(file, place)
    return cache
