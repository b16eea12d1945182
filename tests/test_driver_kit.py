"""What `skypool new-driver` writes, and what docs/driver-tutorial.md says to write, keeps the contract of drivers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def install(project: Path, site: Path) -> None:
    """Make a distribution known as an editable installation does: by its metadata, in a folder of the Python path."""
    told = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = site / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in told["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)


def run(project: Path, site: Path, words: Sequence[str], **env: str) -> str:
    """Run a command in the folder of a project that is installed; what it printed.

    Raises:
        AssertionError: it failed.
    """
    path = os.pathsep.join(map(str, (site, project, ROOT, ROOT / "providers", ROOT / "images")))
    state = {"XDG_STATE_HOME": str(site / "state"), "XDG_CACHE_HOME": str(site / "cache")}
    whole = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:cacheprovider -rs", **state, **env}
    done = subprocess.run(words, cwd=project, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}"
    return done.stdout


def new_driver(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "new-driver", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)


def texts(project: Path) -> dict[str, str]:
    """The files of a project by their paths."""
    files = [each for each in project.rglob("*") if each.is_file() and "__pycache__" not in each.parts]
    return {each.relative_to(project).as_posix(): each.read_text() for each in files}


# --- skypool new-driver --------------------------------------------------------------------------------------


def test_a_new_driver_has_its_name_everywhere_and_keeps_the_contract_at_once(tmp_path: Path) -> None:
    done = new_driver(tmp_path, "big-cloud")
    assert done.returncode == 0, done.stderr
    assert "cd skypool-big-cloud && pip install -e '.[dev]' && python -m pytest" in done.stdout
    project = tmp_path / "skypool-big-cloud"
    files = texts(project)
    assert set(files) == {
        "README.md",
        "pyproject.toml",
        "skypool_big_cloud/__init__.py",
        "skypool_big_cloud/_api.py",
        "skypool_big_cloud/_catalog.py",
        "skypool_big_cloud/errors.csv",
        "skypool_big_cloud/py.typed",
        "tests/test_big_cloud.py",
    }
    assert [path for path, text in files.items() if "acme" in text.replace("ACME_METADATA", "").lower()] == []
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "E,F,B,UP", "--line-length", "120", "--isolated", project],
        check=True,
    )
    install(project, tmp_path / "site")
    tests = "free or repr or launch_rents or lost_reply or refusal or pool_lives or interruption or does_not_end"
    said = run(project, tmp_path / "site", [sys.executable, "-m", "pytest", "-q", "-k", tests])
    assert re.search(r"^1[0-9] passed", said, re.MULTILINE), said
    code = "from skypool.drivers.registry import driver; print(driver('big-cloud'))"
    assert run(project, tmp_path / "site", [sys.executable, "-c", code]) == "BigCloud(url=None)\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Big Cloud"], "'Big Cloud' is no name of a driver: it is like acme or big-cloud"),
        (["big-"], "is no name of a driver"),
        (["local"], "a provider called 'local' is installed already (skypool_local:Local)"),
        (["acme", "--folder", "full"], "full is there already; choose another place with --folder"),
    ],
)
def test_a_driver_that_cannot_be_written_is_refused_with_a_reason(tmp_path: Path, words: list[str], why: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    done = new_driver(tmp_path, *words)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())
    assert texts(tmp_path) == {"full/mine": "kept"}
