"""Makes the Python environment of a project on a node, once for each state of what names its packages."""

from __future__ import annotations

import fcntl
import glob
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
_PLACES = ("~/.local/bin/uv", "~/.cargo/bin/uv", "~/.skypool/bin/uv", "~/.skypool/uv/bin/uv")
"""Where uv may be besides `PATH`, the last two if the setup of the node has installed it."""
_INTERPRETERS = "~/.pyenv/versions/*/bin"
"""Where Pythons may be besides `PATH` and the folder of uv."""


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
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_name(f"{digest}.lock"), "w") as lock:  # another run of the project may make it at this moment
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not (home / ".complete").exists()
        if is_new:
            shutil.rmtree(home, ignore_errors=True)
            _make(home, copy, source, python, packages, versions)
            (home / ".complete").touch()
    node_folders.use(home)
    return str(home / "bin"), is_new


def _make(
    home: Path, copy: str, source: Source, python: str, packages: Sequence[str], versions: Mapping[str, str]
) -> None:
    uv = _uv(home.parent.parent)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *glob.glob(os.path.expanduser(_INTERPRETERS))])
    env = {**os.environ, "PATH": path, **versions, "UV_PROJECT_ENVIRONMENT": str(home), "VIRTUAL_ENV": str(home)}
    asked = ["--python", python] if python else []
    if source == "uv.lock":
        if not uv:
            why = "there is no uv, which uv.lock needs, and pip cannot install it"
            raise CommandFailed("uv sync --frozen", node=runtime.node_number(), why=why)
        _do([*uv, "sync", "--frozen", "--quiet", "--project", copy, *asked], env, copy)
    elif uv:
        _do([*uv, "venv", "--quiet", str(home), *asked], env, copy)
    else:
        _do([sys.executable, "-m", "venv", str(home)], env, copy)
    wanted = {"pyproject.toml": ["-e", "."], "requirements.txt": ["-r", "requirements.txt"]}.get(source, [])
    if wanted := [*wanted, *packages]:
        install = [*uv, "pip", "install"] if uv else [str(home / "bin" / "python"), "-m", "pip", "install"]
        _do([*install, "--quiet", *wanted], env, copy)


def _uv(home: Path) -> list[str]:
    """Return the command that runs uv. Where it is not, it is installed; [] if that fails."""
    own = home / "tools" / "uv" / "bin" / "uv"
    known = [
        shutil.which("uv"),
        *(os.path.expanduser(each) for each in _PLACES),
        Path(sys.executable).parent / "uv",
        own,
    ]
    for each in known:
        if each and os.access(each, os.X_OK):
            return [str(each)]
    made = home / "tools" / f"uv-{os.getpid()}"
    try:
        _do([sys.executable, "-m", "venv", str(made)], os.environ, str(home))
        _do([str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], os.environ, str(home))
        made.rename(own.parent.parent)
    except (CommandFailed, OSError):
        shutil.rmtree(made, ignore_errors=True)
    return [str(own)] if own.exists() else []


def _do(argv: list[str], env: Mapping[str, str], folder: str) -> None:
    """Run a program; what it prints is the output of the call. Raises CommandFailed if it fails."""
    done = subprocess.run(argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise CommandFailed(shlex.join(argv), done.returncode, node=runtime.node_number())
