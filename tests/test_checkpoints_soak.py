"""A tenth of `make soak` for checkpoints: 30 faults of all kinds; one of each kind that takes long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lab import stores
from tests.soak.checkpoints import KINDS, LAB

ROOT = Path(__file__).parent.parent
TWICE = (("rank", "ranks", "mover", "agent"), ("403", "500", "503"), ("slow", "hang", "cut"))
ONCE = (("client", "late"), ("notice120", "notice30", "notice10"), ("clock",))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def soaked(kinds: Sequence[str], each_world: int) -> None:
    if why := stores.missing_s3():
        pytest.skip(why)
    count = ["--times", str(each_world * len(kinds)), "--each-world", str(each_world)]
    argv = [sys.executable, "-m", "tests.soak.checkpoints", "--seed", "7", *count, "--kinds", ",".join(kinds)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize("kinds", TWICE, ids="-".join)
def test_a_gang_goes_on_from_whole_checkpoints_that_are_not_older_than_what_was_safe(kinds: tuple[str, ...]) -> None:
    soaked(kinds, 2)


@pytest.mark.parametrize("kinds", ONCE, ids="-".join)
def test_so_it_does_after_notices_a_killed_client_and_with_wrong_clocks(kinds: tuple[str, ...]) -> None:
    soaked(kinds, 1)


@pytest.mark.lab
def test_so_it_does_after_faults_of_machines() -> None:
    soaked(LAB, 1)


def test_every_kind_of_fault_is_tried() -> None:
    tried = [kind for kinds in (*TWICE, *ONCE, LAB) for kind in kinds]
    assert sorted(tried) == sorted(KINDS)
