"""Removes folders in which a program of the user may have mounted something, without touching what is mounted."""

from __future__ import annotations

import contextlib
import os
import shutil

_MNT_DETACH = 2
"""The flag of umount2(2) that unmounts also while files are open."""
_ESCAPED = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
"""Escapes in paths in /proc/self/mountinfo, and their characters. The backslash comes last."""


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder with everything in it, except what is mounted in it, which is unmounted first.

    A mount that this user may not unmount stays, with the folders above it. Symbolic links in the folder are removed,
    not followed. Errors, such as a missing folder, are ignored.
    """
    top = os.path.realpath(folder)
    for mount in reversed(_mounts_below(top)):
        _unmount(mount)
    _clear(top, _mounts_below(top))


def _clear(folder: str, kept: list[str]) -> None:
    """Remove a folder, except the mount points in `kept` and the folders above them."""
    if not any(each == folder or each.startswith(f"{folder}/") for each in kept):
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.isdir(folder):
            _open(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return
    if folder in kept:
        return
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            _clear(entry.path, kept)
        elif entry.path not in kept:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _open(folder: str) -> None:
    """Let this user write to a folder and those in it: some programs make folders that are for reading only."""
    with contextlib.suppress(OSError):  # it is another user's
        os.chmod(folder, 0o700)
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                _open(entry.path)


def _mounts_below(folder: str) -> list[str]:
    """Return the mount points below a folder in the order of mounting; [] on systems without /proc."""
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            places = [line.split(" ")[4] for line in file]
    except OSError:
        return []
    for code, character in _ESCAPED.items():
        places = [place.replace(code, character) for place in places]
    return [place for place in places if place.startswith(f"{folder}/")]


def _unmount(place: str) -> None:
    """Unmount a mount point, if this user may. Root may unmount all, and other users their own FUSE mounts."""
    import ctypes  # imported here, as they are seldom needed
    import subprocess

    if ctypes.CDLL(None).umount2(os.fsencode(place), _MNT_DETACH) == 0:
        return
    for program in ("fusermount3", "fusermount"):
        with contextlib.suppress(OSError):
            subprocess.run([program, "-u", "-z", place], capture_output=True, timeout=10)
