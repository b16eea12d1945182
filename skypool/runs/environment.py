"""Makes the Python environment of a project on a node, and brings it up to date for each run."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skypool import runtime
from skypool.errors import CommandFailed
from skypool.files.project_files import (
    LocalPackage,
    from_elsewhere,
    local_packages,
    pip_arguments,
    pyproject,
    table,
    uv_table,
)
from skypool.runs import node_folders

if TYPE_CHECKING:
    from skypool.files.project import Source

_PLACES = ("~/.local/bin/uv", "~/.cargo/bin/uv", "~/.skypool/bin/uv", "~/.skypool/uv/bin/uv")
"""Where uv may be besides `PATH`, the last two if the setup of the node has installed it."""
_MISLEADING = frozenset({
    "UV_SYSTEM_PYTHON", "UV_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_NO_SYNC", "UV_FROZEN", "UV_LOCKED", "UV_PROJECT",
    "UV_WORKING_DIRECTORY", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONPATH", "PYTHONHOME",
})  # fmt: skip
"""Variables that would make uv or pip install somewhere else."""
_BUILDERS = ("uv", "poetry", "setuptools", "hatch", "pdm", "flit")
"""The tables below `[tool]` that may say what a project needs, or how it is installed."""
_MADE = "made-by-skypool"
"""The name of a file in an environment that is complete."""
_TAIL = 4000
"""The most characters of what a failed program has printed that its error has."""
_INTERPRETERS = "~/.pyenv/versions/*/bin"
"""Where Pythons may be besides `PATH` and the folder of uv."""


def prepared(copy: str, source: Source, python: str, packages: Sequence[str], versions: Mapping[str, str]) -> str:
    """Make the environment of a project on this node, unless it is there. Return the folder of its programs.

    If the project has no environment of its own, return "".

    Args:
        copy: the project's folder on this node.
        source: what names its packages; "" if nothing does.
        python: the versions of Python that it works with; "" for any.
        packages: further packages; for a script with a header, those of the header.
        versions: variables that tell build tools the version of the project.

    Raises:
        CommandFailed: the environment cannot be made.
    """
    if not source and not python and not packages:
        return ""
    copied = [each for each in local_packages(Path(copy), source) if each.is_copied]
    said = [copy, source, python, _content(copy, source), _state_of(copy, copied), _system(), *packages]
    digest = hashlib.sha256("\0".join(said).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    home = Path(copy).parent.parent / "environments" / digest
    home.parent.mkdir(parents=True, exist_ok=True)
    with node_folders.alone(str(home)):
        # a lock names the sources of a workspace, which may need more than it says
        if not (home / _MADE).exists() or source == "uv.lock":
            _make(home, copy, source, python, packages, versions, copied)
            (home / _MADE).touch()
        os.utime(home)
    return str(home / "bin")


def _system() -> str:
    """Return what programs of an environment depend on, as machines with one home folder may differ in it."""
    return f"{platform.machine()} {platform.libc_ver()} {sys.version_info[:2]}"


def _content(copy: str, source: Source) -> str:
    """Return what the environment is made from, so that another one is made if it changes."""
    if source == "uv.lock":
        return _text(copy, source)
    if source not in ("pyproject.toml", "requirements.txt", "setup.py"):
        return ""
    said = pyproject(Path(copy))
    needed = {each: said.get(each) for each in ("project", "build-system", "dependency-groups")}
    needed |= {each: table(said.get("tool")).get(each) for each in _BUILDERS}
    seen: set[str] = set()  # the build of a project may read what it needs from such files
    files = [_requirements(copy, each.name, seen) for each in sorted(Path(copy).glob("*requirements*.txt"))]
    texts = [json.dumps(needed, sort_keys=True, default=str), _text(copy, "setup.py"), _text(copy, "setup.cfg")]
    return "\0".join([*texts, *files])


def _requirements(copy: str, path: str, seen: set[str]) -> str:
    """Return the text of a file with requirements, and those of the files that it names."""
    if path in seen:
        return ""
    seen.add(path)
    text = _text(copy, path)
    named = re.findall(r"(?m)^\s*(?:-[rc]\s*|--(?:requirement|constraint)[\s=]+)(\S+)", text)
    below = os.path.dirname(path)
    return text + "".join(_requirements(copy, os.path.normpath(os.path.join(below, each)), seen) for each in named)


def _text(copy: str, path: str) -> str:
    try:
        return Path(copy, path).read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def _make(
    home: Path,
    copy: str,
    source: Source,
    python: str,
    packages: Sequence[str],
    versions: Mapping[str, str],
    copied: Sequence[LocalPackage],
) -> None:
    """Make an environment, or bring that of a lock up to date. uv does so in less than a second if nothing is to do."""
    uv = _uv(home.parent.parent)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *glob.glob(os.path.expanduser(_INTERPRETERS))])
    env = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    env |= {"PATH": path, **versions, "UV_PROJECT_ENVIRONMENT": str(home), "VIRTUAL_ENV": str(home)}
    asked = ["--python", python] if python else []
    has_table = source == "uv.lock" or (source == "pyproject.toml" and "project" in pyproject(Path(copy)))
    if has_table and uv:  # uv reads where the packages come from, and whether the project itself is installed
        frozen = ["--frozen"] if source == "uv.lock" else []
        exact = ["--inexact"] if packages else []
        members = ["--all-packages"] if "workspace" in uv_table(pyproject(Path(copy))) else []
        anew: list[str] = []
        for each in copied:
            anew += ["--reinstall-package", each.name, "--refresh-package", each.name]
        if source != "uv.lock":
            Path(copy, "uv.lock").unlink(missing_ok=True)  # that of an earlier run, which the client does not have
        _do([*uv, "sync", *frozen, *exact, *members, *anew, "--project", copy, *asked], env, copy)
    elif source == "uv.lock":
        why = "there is no uv, which uv.lock needs, and pip cannot install it"
        raise CommandFailed("uv sync --frozen", node=runtime.node_number(), why=why)
    elif uv:
        _do([*uv, "venv", "--clear", str(home), *asked], env, copy)
    else:
        _check_python(python)
        _do([sys.executable, "-m", "venv", "--clear", str(home)], env, copy)
    wanted = [*([] if has_table and uv else _named(copy, source)), *packages]
    if wanted:
        interpreter = str(home / "bin" / "python")
        install = [*uv, "pip", "install", "--python", interpreter] if uv else [interpreter, "-m", "pip", "install"]
        _do([*install, *wanted], env, copy)


def _state_of(copy: str, packages: Sequence[LocalPackage]) -> str:
    """Return what tells states of the folders of packages apart: the files that were sent, and when they changed."""
    below = tuple(os.path.normpath(each.place) + "/" for each in packages)
    sent = node_folders.sent_files(copy) if below else {}
    return json.dumps({path: at for path, at in sorted(sent.items()) if path.startswith(below)})


def _named(copy: str, source: Source) -> list[str]:
    """Return the arguments by which pip installs the packages of a project, and the project if it is to be built."""
    if source == "pyproject.toml" and (told := from_elsewhere(Path(copy))):
        why = f"there is no uv, and [tool.uv] says where packages come from: {', '.join(told)}"
        raise CommandFailed("uv sync", node=runtime.node_number(), why=why)
    return pip_arguments(Path(copy), source)


def _check_python(python: str) -> None:
    """Raise CommandFailed if a project names another Python than this one, and there is no uv to get it."""
    found = re.match(r"==(\d+\.\d+)", python)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found and found[1] != here:
        why = f"the project needs Python {found[1]}, the node has {here}, and there is no uv, which would get the other"
        raise CommandFailed("python -m venv", node=runtime.node_number(), why=why)


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
    """Run a program. Raises CommandFailed, with the end of what it printed, if it fails."""
    done = subprocess.run(
        argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    if done.returncode:
        tail = done.stdout.decode(errors="replace")[-_TAIL:].strip()
        raise CommandFailed(shlex.join(argv), done.returncode, tail, runtime.node_number())
