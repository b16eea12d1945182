"""A tenth of `make soak` for checkpoints: 30 faults, two of each kind, in parts that can run side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import stores

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def soaked(*kinds: str) -> None:
    if why := stores.missing_s3():
        pytest.skip(why)
    words = ["--seed", "7", "--times", str(2 * len(kinds)), "--kinds", ",".join(kinds)]
    argv = [sys.executable, "-m", "tests.soak.checkpoints", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize(
    "kinds",
    [("rank", "ranks", "mover"), ("agent", "client", "late"), ("403", "500", "503"), ("slow", "hang", "cut")],
    ids="-".join,
)
def test_a_gang_goes_on_from_whole_checkpoints_that_are_not_older_than_what_was_safe(kinds: tuple[str, ...]) -> None:
    soaked(*kinds)


@pytest.mark.lab
@pytest.mark.parametrize("kinds", [("power", "link"), ("frozen", "disk")], ids="-".join)
def test_so_it_does_after_faults_of_machines(kinds: tuple[str, ...]) -> None:
    soaked(*kinds)
