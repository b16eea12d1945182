"""A program has the Python of its project, whatever the client's is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skypool as sky
from tests.caches import with_zip
from tests.conftest import ROOT
from tests.lab import kernel
from tests.lab.machines import Lab, Machine

pytestmark = pytest.mark.slow

HERE = f"3.{sys.version_info[1]}"
OTHERS = ["3.12", "3.13"]
TRAIN = "import sys, six\nprint('{}.{}'.format(*sys.version_info), six.__name__)\n"


def interpreter(version: str) -> Path:
    """Return a Python of this minor version."""
    found = [Path(f"/usr/bin/python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for each in found:
        if each.exists():
            return each
    pytest.skip(f"this machine has no Python {version}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_zip(tmp_path / "cache")))
    (root / "train.py").write_text(TRAIN)
    return root


def asks_for(project: Path, version: str) -> None:
    table = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["six"]\n'
    (project / "pyproject.toml").write_text(f'{table}requires-python = "=={version}.*"\n')


@pytest.mark.parametrize("version", OTHERS)
def test_a_project_of_another_python_runs_here(version: str, project: Path) -> None:
    interpreter(version)
    asks_for(project, version)
    run = sky.run("train.py")
    assert (run.returncode, run.output) == (0, f"{version} six\n")


def test_a_project_of_another_python_runs_on_a_machine(lab: Lab, project: Path) -> None:
    version = OTHERS[-1] if OTHERS[-1] != HERE else OTHERS[0]
    shown = interpreter(version).parents[1]
    asks_for(project, version)

    def show(made: Machine) -> None:
        there = made.path(f"/root/.pyenv/versions/{shown.name}")
        there.mkdir(parents=True, exist_ok=True)
        kernel.bind(shown, there)

    machine = lab.machine(keys=[lab.public_key], prepare=show)
    host = sky.Host(machine.address, host_key=machine.host_key)
    run = sky.run("train.py", sky.SSH(hosts=[host], user="root", identity=str(lab.client_key)))
    machine.destroy()
    assert (run.returncode, run.output) == (0, f"{version} six\n")


def test_a_client_of_another_python_runs_a_project_of_this_one(project: Path, tmp_path: Path) -> None:
    other = interpreter("3.13" if HERE != "3.13" else "3.12")
    venv = tmp_path / "venv"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--python", other, venv], check=True)
    python = venv / "bin" / "python"
    source = tmp_path / "source"  # a build writes into it
    for each in ("skypool", "providers", "images", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy2
        source.mkdir(exist_ok=True)
        copy(ROOT / each, source / each)
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, source], check=True)
    asks_for(project, HERE)
    client = [str(python), "-m", "skypool", "run", "train.py"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(client, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"{HERE} six\n"), done.stderr
