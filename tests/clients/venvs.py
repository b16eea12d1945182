"""Virtual environments of the clients and engines, made from the package index when a test first needs them.

    python -m tests.clients.venvs awscli     # write requirements/awscli.txt anew, after a change of its first line
    python -m tests.clients.venvs tests/engines/requirements/frameworks.txt     # the same for a file elsewhere

Each file in requirements/ names the packages that a client consists of, all with their versions. Its first line has
those that were asked for; the others followed from them. A venv lies in build/clients, by the hash of its file, and is
shared by all processes of a test run. Those of tests/engines lie in build/engines.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build" / "clients"
REQUIREMENTS = HERE / "requirements"
INSTALLING = 600.0
"""Seconds in which an environment must be installed. A test that needs a large one may take longer than others."""
NO_WHEEL = re.compile(r"No matching distribution found for (torch==\S+)")
"""What pip says where no source of packages has PyTorch for CPUs, which the package index does not have."""
UNREACHABLE = re.compile(r"connection broken by|NewConnectionError|Name or service not known|Network is unreachable")


def environment(name: str, requirements: Path = REQUIREMENTS) -> Path:
    """Return the folder of a venv, which is made if it is not there yet.

    Skips the test if the package index cannot be reached, but fails it in CI. Skips it also in CI if PyTorch for CPUs
    cannot be had.

    Args:
        name: of a file in `requirements`, without its suffix.
        requirements: the folder of that file, `requirements` in a folder of tests. Default: that of the clients.
    """
    told = requirements / f"{name}.txt"
    key = hashlib.sha256(told.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = PLACE.parent / requirements.parent.name / f"{name}-{key}"
    with _locked(folder.with_suffix(".lock")):
        if not (ready := folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed while it made it
            _made(folder)
            if failure := _installed(folder, "--no-deps", "--requirement", str(told)):
                shutil.rmtree(folder)
                _refuse(name, failure)
            ready.touch()
    return folder


def with_skypool(folder: Path) -> Path:
    """Let a venv see this checkout's skypool and its drivers, and return the folder of the venv.

    Args:
        folder: the folder of the venv.
    """
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    lines = [str(ROOT / each) for each in ("", "providers", "images")]
    (packages / "_skypool.pth").write_text("\n".join(lines) + "\n")
    own = metadata.distribution("skypool")
    target = packages / f"skypool-{own.version}.dist-info"
    target.mkdir(exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):  # the names of the drivers
        (target / name).write_text(own.read_text(name) or "")
    return folder


def version(name: str, package: str) -> str:
    """Return the version of a package in a client's requirements."""
    return _pins(name)[package]


@functools.cache
def _pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return {package: version for package, found, version in (line.partition("==") for line in lines[1:]) if found}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _made(folder: Path) -> None:
    # The tools of this environment install into it. A pip of its own would take four seconds more.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)


def _installed(folder: Path, *what: str) -> str:
    """Install packages; return what pip said if it failed, "" otherwise."""
    python = str(folder / "bin" / "python")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    # It takes a tenth of pip's time, but does not read pip's settings, with which pip may find more: PyTorch for CPUs.
    if subprocess.run([*uv, *what], capture_output=True, timeout=INSTALLING, check=False).returncode == 0:
        return ""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    # Modules are compiled when they are first imported: most of these packages' are never.
    run = subprocess.run(
        [*pip, "--no-compile", "--retries", "2", *what], capture_output=True, text=True, timeout=INSTALLING
    )
    return "" if run.returncode == 0 else run.stdout + run.stderr


def _refuse(name: str, failure: str) -> None:
    if wheel := NO_WHEEL.search(failure):
        pytest.skip(
            f"pip finds no {wheel[1]} with this machine's settings, and the package index has none for CPUs alone"
        )
    if UNREACHABLE.search(failure) and os.environ.get("CI") != "true":
        pytest.skip(f"the package index cannot be reached, from which {name} would come")
    pytest.fail(f"pip could not install {name}:\n{failure}")


def lock(name: str) -> None:
    """Write requirements anew, by the wishes in their first line.

    Args:
        name: of a client, or the path of a file that ends in .txt.
    """
    file = Path(name) if name.endswith(".txt") else REQUIREMENTS / f"{name}.txt"
    first = file.read_text().splitlines()[0]
    wishes = first.removeprefix("# ").split()
    with tempfile.TemporaryDirectory() as folder:
        _made(Path(folder))
        if failure := _installed(Path(folder), *wishes):
            raise SystemExit(failure)
        python = str(Path(folder) / "bin" / "python")
        freeze = [sys.executable, "-m", "pip", "--python", python, "freeze", "--exclude", "setuptools"]
        pins = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    file.write_text(f"{first}\n{pins}")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        lock(each)
