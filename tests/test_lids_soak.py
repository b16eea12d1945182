"""A tenth of `make soak` for runs that belong to their machine: killed clients, and each trouble that is short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.lids import LONG, TROUBLES, missing
from tests.soak.nobody import soak

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def soaked(times: int, *kinds: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.soak.lids", "--seed", "7", "--times", str(times), "--kinds", ",".join(kinds)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_client_that_is_killed_at_any_moment_leaves_a_run_that_completes_or_never_begins() -> None:
    done = soaked(12, "client")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "client, after the commit: ended 3" in done.stdout
    assert "client, before the commit" in done.stdout


def test_a_run_completes_once_or_says_why_not_whatever_befalls_its_machine() -> None:
    kinds = [each for each in TROUBLES if each not in LONG and not missing(each)]
    done = soaked(len(kinds), *kinds)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_a_run_to_which_nobody_comes_back_costs_at_most_its_worst_bill() -> None:
    ends, most, wrong = soak(20, 7)
    assert not wrong
    assert {"over", "dead", "until its end"} <= ends.keys()
    assert 0.9 < most <= 1.0, "the worst bill is not far too high"
