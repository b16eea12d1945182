"""A tenth of `make soak` for what is saved before machines end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import stores

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def soaked(*words: str) -> subprocess.CompletedProcess[str]:
    if why := stores.missing_s3():
        pytest.skip(why)
    argv = [sys.executable, "-m", "tests.soak.drains", "--seed", "7", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_all_is_saved_for_which_there_is_time_and_machines_end_in_time() -> None:
    done = soaked("--times", "20", "--beside", "5")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_it_is_found_if_nothing_is_saved_at_the_end() -> None:
    done = soaked("--times", "3", "--beside", "3", "--kinds", "stop,client,agent", "--never-drains")
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr[-5000:]
    assert "files are saved nowhere, and nobody is told" in done.stdout
