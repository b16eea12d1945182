"""What `skypool new-driver` writes, and what docs/driver-tutorial.md says to write, keeps the contract of drivers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skypool.testing import HttpCloud

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "driver-tutorial.md").read_text()
KEY = "sesame"


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


@pytest.mark.slow
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
        (["Big Cloud"], "'Big Cloud' is not a valid name of a driver: use a-z, 0-9 and single hyphens"),
        (["big-"], "is not a valid name of a driver"),
        (["local"], "a provider called 'local' is already installed (skypool_local:Local)"),
        (
            ["acme", "--folder", "full"],
            "full already exists and is not an empty folder; choose another one with --folder",
        ),
    ],
)
def test_a_driver_that_cannot_be_written_is_refused_with_a_reason(tmp_path: Path, words: list[str], why: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    done = new_driver(tmp_path, *words)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())
    assert texts(tmp_path) == {"full/mine": "kept"}


# --- docs/driver-tutorial.md ---------------------------------------------------------------------------------

_STEP = re.compile(
    r"(?P<verb>Write|Add to|Add below the first import of)\s`(?P<path>[^`]+)`[^`]*?:\n\n"
    r"(?P<fence>```+)\w*\n(?P<text>.*?)(?P=fence)\n"
    r"|```console\n(?P<commands>.*?)```\n",
    re.DOTALL,
)
_BY_HAND = ("python3 -m venv", ". .venv", "pip install", "python -m skypool.testing.http_cloud")
"""What a reader's own terminal needs, and the test does by other means."""


def steps() -> Iterator[tuple[str, str, str]]:
    """All that the page tells to do, in order: a verb, a path, a text; or "run", "" and a command."""
    for found in _STEP.finditer(PAGE):
        if found["verb"]:
            yield found["verb"], found["path"], found["text"]
            continue
        for line in (found["commands"] or "").splitlines():
            if line.startswith("$ ") and not line[2:].startswith(_BY_HAND):
                yield "run", "", line[2:]


def write(verb: str, file: Path, text: str) -> None:
    """Do with a file what the page says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if verb == "Write":
        assert not file.exists(), f"{file} is written twice"
        file.write_text(text)
    elif verb == "Add to":
        above = file.read_text()
        file.write_text(above + ("\n" if text.startswith(" ") else "\n\n") + text)
    else:
        first = "from __future__ import annotations\n"
        assert first in file.read_text()
        file.write_text(file.read_text().replace(first, f"{first}\n{text}", 1))


@pytest.mark.slow
def test_the_tutorial_followed_to_the_letter_is_the_template_and_then_a_whole_driver(tmp_path: Path) -> None:
    project, site = tmp_path / "skypool-acme", tmp_path / "site"
    project.mkdir()
    programs = {"python": [sys.executable], "skypool": [sys.executable, "-m", "skypool"]}
    said: dict[str, list[str]] = {}
    written: dict[str, str] = {}
    with HttpCloud(tmp_path / "cloud", key=KEY) as cloud:
        env = {"ACME_URL": cloud.url, "ACME_API_KEY": KEY}
        for verb, path, text in steps():
            if verb == "run":
                program, *words = shlex.split(text)
                if not site.exists():
                    install(project, site)
                said.setdefault(text, []).append(run(project, site, [*programs[program], *words], **env))
                continue
            write(verb, project / path, text)
            if path == "README.md":
                written = texts(project)
        assert cloud.control.count() == 0
    assert new_driver(tmp_path, "acme", "--folder", "template").returncode == 0
    assert written == texts(tmp_path / "template"), "steps 1 to 6 write what `skypool new-driver acme` writes"
    first, last = said["python -m pytest -q"]
    assert "37 passed, 10 skipped" in first
    assert "40 passed, 7 skipped" in last
    assert last.count("slice_need returns None") == 4, "only slices are skipped"
    assert "hello world" in said["python hello.py"][0].splitlines()
    assert "{'limits': {}}" in PAGE
    assert "{'limits': {}}\n" in next(iter(said.values()))


# --- providers/README.md -------------------------------------------------------------------------------------


def replaced(file: Path, was: str, now: str) -> None:
    text = file.read_text()
    assert text.count(was) == 1, f"{file} has {was!r} {text.count(was)} times"
    file.write_text(text.replace(was, now))


@pytest.mark.slow
def test_a_driver_in_the_repository_touches_the_places_that_the_guide_names_and_no_others(tmp_path: Path) -> None:
    house, site = tmp_path / "house", tmp_path / "site"
    for folder in ("skypool", "providers", "images"):
        shutil.copytree(ROOT / folder, house / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", house)
    template = house / "skypool" / "testing" / "template"
    (house / "tests" / "providers").mkdir(parents=True)
    shutil.copytree(template / "skypool_acme", house / "providers" / "skypool_acme")
    shutil.copy(template / "tests" / "test_acme.py", house / "tests" / "providers")
    point = 'aws = "skypool_aws:AWS"\n'
    replaced(house / "pyproject.toml", point, f'acme = "skypool_acme:Acme"\n{point}')
    front = house / "skypool" / "__init__.py"
    replaced(
        front,
        "    from skypool_aws import AWS as AWS\n",
        "    from skypool_acme import Acme as Acme\n    from skypool_aws import AWS as AWS\n",
    )
    install(house, site)
    paths = os.pathsep.join(map(str, (site, house, house / "providers", house / "images")))
    code = (
        "import skypool; from skypool.drivers.registry import driver; "
        "print(skypool.__file__, skypool.Acme() == driver('acme'), 'Acme' in dir(skypool))"
    )
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == f"{front} True True\n", done.stderr
    words = ["-m", "pytest", "-q", "--import-mode=importlib", "-k", "launch_rents or pool_lives or free"]
    argv = [sys.executable, *words, "tests/providers/test_acme.py"]
    done = subprocess.run(argv, cwd=house, env=env, capture_output=True, text=True)
    assert "3 passed" in done.stdout, done.stdout
