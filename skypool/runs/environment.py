"""Makes the Python environment of a project on a node, once for each state of what names its packages."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skypool import runtime
from skypool.errors import CommandFailed
from skypool.runs import node_folders

if TYPE_CHECKING:
    from skypool.files.project import Source

_NAMING: Mapping[Source, tuple[str, ...]] = {
    "uv.lock": ("uv.lock", "pyproject.toml"),
    "pyproject.toml": ("pyproject.toml",),
    "requirements.txt": ("requirements.txt",),
}
"""The files that name the packages of a project."""


def prepared(
    copy: str, source: Source, python: str, packages: Sequence[str], versions: Mapping[str, str]
) -> tuple[str, bool]:
    """Make the environment of a project on this node, unless it is there.

    Args:
        copy: the project's folder on this node.
        source: what names its packages.
        python: the versions of Python that it works with; "" for any.
        packages: further packages; for a script with a header, those of the header.
        versions: variables that tell build tools the version of the project.

    Returns:
        The folder of its programs, or "" if the project has no environment of its own; and whether it was made now.

    Raises:
        CommandFailed: the environment cannot be made. What its program printed is the output of the call.
    """
    node_folders.use(Path(copy))
    if not source:
        return "", False
    said = [source, python, *packages]
    said += [Path(copy, each).read_text("utf-8", "surrogateescape") for each in _NAMING.get(source, ())]
    digest = hashlib.sha256("\0".join([copy, *said]).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    home = Path(copy).parent.parent / "environments" / digest
    programs = home / "bin"
    done = home / ".complete"
    if done.exists():
        node_folders.use(home)
        return str(programs), False
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    uv = _uv()
    env = {
        **os.environ,
        **versions,
        "UV_PROJECT_ENVIRONMENT": str(home),
        "VIRTUAL_ENV": str(home),
        "UV_NO_PROGRESS": "1",
    }
    if source == "uv.lock":
        if not uv:
            raise CommandFailed(
                "uv sync --frozen", node=runtime.node_number(), why="there is no uv, which uv.lock needs"
            )
        _do([*uv, "sync", "--frozen", "--project", copy, *(["--python", python] if python else [])], env, copy)
        wanted = [*packages]
    else:
        wanted = {"pyproject.toml": ["-e", "."], "requirements.txt": ["-r", "requirements.txt"]}.get(source, [])
        wanted = [*wanted, *packages]
        if uv:
            _do([*uv, "venv", str(home), *(["--python", python] if python else [])], env, copy)
        else:
            _do([sys.executable, "-m", "venv", str(home)], env, copy)
    if wanted:
        install = [*uv, "pip", "install"] if uv else [str(programs / "python"), "-m", "pip", "install", "--quiet"]
        _do([*install, *wanted], env, copy)
    done.touch()
    return str(programs), True


def _uv() -> list[str]:
    """Return the command that runs uv; [] if this node has none and cannot get it."""
    for each in (shutil.which("uv"), os.path.expanduser("~/.local/bin/uv")):
        if each and os.access(each, os.X_OK):
            return [each]
    own = Path(sys.executable).parent / "uv"
    return [str(own)] if own.exists() else []


def _do(argv: list[str], env: Mapping[str, str], folder: str) -> None:
    """Run a program; what it prints is the output of the call. Raises CommandFailed if it fails."""
    done = subprocess.run(argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise CommandFailed(shlex.join(argv), done.returncode, node=runtime.node_number())
