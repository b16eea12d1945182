"""`skypool run` runs programs of others as they are. They come from the package index, and none knows skypool."""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_run import project as project
from tests.test_run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
INDEX = "https://files.pythonhosted.org/packages"


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str, str], Path]:
    """A function that fetches a source distribution, and returns its folder."""

    def fetched(path: str, sha256: str) -> Path:
        archive = tmp_path / "source.tar.gz"
        try:
            with urllib.request.urlopen(f"{INDEX}/{path}", timeout=60) as answer:
                archive.write_bytes(answer.read())
        except (urllib.error.URLError, TimeoutError) as e:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the package index cannot be reached: {e}")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256
        with tarfile.open(archive) as file:
            file.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
            file.extractall(tmp_path / "source")
        (folder,) = (tmp_path / "source").iterdir()
        return folder

    return fetched


def test_an_example_of_a_project_whose_version_comes_from_git(
    unpacked: Callable[[str, str], Path], project: Path
) -> None:
    """SimPy 4.1.2: its package lies in `src`, and setuptools-scm asks for its version where there is no checkout."""
    folder = unpacked(
        "4a/38/fb393d1a5c2f35b65609e8d3c39d1508ada6a767c7e624ffa16ed3e84ffd/simpy-4.1.2.tar.gz",
        "76ef36b71e0436ba94e55febc001c78879e493a323f045bbcfbb0b216e9b1fbc",
    )
    os.chdir(folder)  # in docs, requirements.txt names what makes the pages
    for name in ("carwash", "machine_shop"):
        status, out, err = run(f"docs/examples/code/{name}.py", input=b"")
        assert status == 0, err
        assert out.decode() == Path(f"docs/examples/code/{name}.out").read_text()


def test_a_package_that_is_a_program(unpacked: Callable[[str, str], Path], project: Path) -> None:
    """Rich 15.0.0, which poetry builds, with the packages that it needs."""
    folder = unpacked(
        "c0/8f/0722ca900cc807c13a6a0c696dacf35430f72e0ec571c4275d2371fca3e9/rich-15.0.0.tar.gz",
        "edd07a4824c6b40189fb7ac9bc4c52536e9780fbbfbddf6f1e2502c31b068c36",
    )
    os.chdir(folder)
    status, out, err = run("-m", "rich", input=b"")
    assert status == 0, err
    assert "Rich features" in out.decode()


def test_a_command_of_the_project(unpacked: Callable[[str, str], Path], project: Path) -> None:
    """tabulate 0.10.0: the command that its package installs, with a file of the project as argument."""
    folder = unpacked(
        "46/58/8c37dea7bbf769b20d58e7ace7e5edfe65b849442b00ffcdd56be88697c6/tabulate-0.10.0.tar.gz",
        "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
    )
    os.chdir(folder)
    Path("planets.txt").write_text("Sun 696000\nEarth 6371\n")
    status, out, err = run("tabulate", "--format", "github", "planets.txt", input=b"")
    assert status == 0, err
    assert [line.replace(" ", "") for line in out.decode().splitlines()][1:] == ["|Sun|696000|", "|Earth|6371|"]
