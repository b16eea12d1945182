"""What is skipped for want of something on this machine, and made up for by another run (tests/needs.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest

def test_plain() -> None: ...

@pytest.mark.needs("busybox")
def test_with_a_program() -> None: ...

@pytest.mark.parametrize("of", ["a b", "c::d"])
@pytest.mark.needs("busybox")
def test_with_another(of: str) -> None: ...
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "test_whole.py").write_text(
        "import pytest, shutil\n"
        "if not shutil.which('busybox'): pytest.skip('no busybox: install it', allow_module_level=True)\n"
        "def test_one(): ...\n"
    )
    (tmp_path / "bin").mkdir()
    return tmp_path


def ran(suite: Path, *words: str, **env: str) -> tuple[int, str]:
    """Run the suite on a machine whose only programs are in its folder bin."""
    argv = [sys.executable, "-m", "pytest", "-p", "tests.needs", f"--rootdir={suite}", "-q", "-n2", *words, str(suite)]
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    env = {**plain, "PYTHONPATH": str(ROOT), "PATH": str(suite / "bin"), **env}
    done = subprocess.run(argv, cwd=suite, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_one_line_says_what_was_skipped_and_another_run_takes_only_that(suite: Path) -> None:
    listed = suite / "build" / "skipped.txt"
    status, text = ran(suite, "--skipped-to", str(listed))
    assert status == 0, text
    assert "skipped: 3 busybox is not installed; 1 no busybox\n" in text
    assert "1 passed, 4 skipped" in text
    assert sorted(listed.read_text().splitlines()) == [
        "test_it.py::test_with_a_program",
        "test_it.py::test_with_another[a b]",
        "test_it.py::test_with_another[c::d]",
        "test_whole.py",
    ]
    program = suite / "bin" / "busybox"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    status, text = ran(suite, "--only-skipped", str(listed), CI="true")
    assert status == 0, text
    assert "4 passed" in text
    assert "skipped" not in text


def test_in_ci_what_is_missing_is_a_failure(suite: Path) -> None:
    status, text = ran(suite, CI="true")
    assert status == 1
    assert "busybox is not installed, and CI must not skip what needs it" in text


@pytest.mark.parametrize("name", ["none.txt", "empty.txt"])
def test_a_run_of_what_was_skipped_needs_the_list(suite: Path, name: str) -> None:
    (suite / "empty.txt").touch()
    status, text = ran(suite, "--only-skipped", str(suite / name))
    assert status == 4
    assert f"{name} lists no test: run `make test` first" in text
