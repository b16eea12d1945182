"""Libraries that nodes need beside skypool, for the machine of the node: compiled ones, which no zip can hold."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from skypool.errors import SkypoolError, UsageError
from skypool.safety import private, user_folders
from skypool.text import one_line

MOVER = ("obstore", "typing_extensions")
"""What the mover of a node needs. The first one is compiled for one kind of machine."""
_TO_FETCH = 300.0
"""Seconds in which a library must have come."""
_OLDEST_PYTHON = "3.11"
"""The oldest Python of a node."""


def folder_of(machine: str) -> Path:
    """Return a folder of this computer with the libraries of the mover, for a Linux machine such as "x86_64".

    If this computer has another kind of system, they are fetched from the package index, by uv or pip, and kept.

    Raises:
        UsageError: they are not installed here, so that their versions are not known.
        SkypoolError: they could not be fetched.
    """
    if not machine:
        raise SkypoolError("the kind of the node's processor is not known, so that nothing can be saved there")
    try:
        found = [distribution(each) for each in MOVER]
    except PackageNotFoundError as e:
        raise UsageError(f"{e.name} is not installed, and saving needs it: pip install 'skypool[buckets]'") from e
    name = "-".join([*(f"{each.name}-{each.version}" for each in found), machine])
    made = user_folders.cache() / "parts" / name
    if made.is_dir():
        private.check(made)  # it runs on nodes, with the keys of buckets
        return made
    private.folder(made.parent)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        part = Path(folder, "part")
        part.mkdir(mode=0o700)
        if (platform.system(), platform.machine()) == ("Linux", machine):
            for each in found:
                for file in each.files or ():
                    if file.suffix != ".pyc" and ".." not in file.parts:
                        target = part / file
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(str(each.locate_file(file)), target)
        else:
            _fetch([f"{each.name}=={each.version}" for each in found], machine, part)
        try:
            os.rename(part, made)
        except OSError:  # another process has made it
            if not made.is_dir():
                raise
    return made


def _fetch(requirements: Sequence[str], machine: str, target: Path) -> None:
    """Have uv or pip install libraries for another machine into a folder."""
    uv = shutil.which("uv")
    where = ["--target", str(target), "--no-deps", *requirements]
    if uv is not None:
        kind = ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", _OLDEST_PYTHON]
        argv = [uv, "pip", "install", "--quiet", "--only-binary", ":all:", *kind, *where]
    else:
        kinds = [word for minor in (17, 28) for word in ("--platform", f"manylinux_2_{minor}_{machine}")]
        kind = [*kinds, "--python-version", _OLDEST_PYTHON]
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *kind, *where]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TO_FETCH)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SkypoolError(f"{requirements[0]} for {machine} could not be fetched: {one_line(str(e), 300)}") from e
    if done.returncode:
        said = one_line(done.stderr.strip().rpartition("\n")[2], 300)
        raise SkypoolError(
            f"{requirements[0]} for {machine} could not be fetched: {said}; check the network and the package index"
        )
