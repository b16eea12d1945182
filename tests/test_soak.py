"""A tenth of `make soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pools_under_random_kills_stops_and_cuts_lose_nothing_and_leave_nothing() -> None:
    argv = [sys.executable, "-m", "tests.soak.pools", "--seed", "7", "--minutes", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_call_fails_when_connections_are_cut_and_descriptors_are_exhausted() -> None:
    argv = [sys.executable, "-m", "tests.soak.links", "--seed", "7", "--operations", "100000", "--cuts", "2000"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(900)
def test_the_rank_that_began_is_named_whatever_ends_it() -> None:
    argv = [sys.executable, "-m", "tests.soak.ranks", "--seed", "7", "--runs", "2"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_services_that_are_killed_cut_off_or_orphaned_leave_nothing() -> None:
    argv = [sys.executable, "-m", "tests.soak.services", "--seed", "7", "--runs", "5"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(900)
def test_hostile_nodes_cost_their_client_little() -> None:
    argv = [sys.executable, "-m", "tests.soak.hostile", "--runs", "21", "--seed", "7"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_see_what_a_script_defined_when_they_were_sent() -> None:
    argv = [sys.executable, "-m", "tests.soak.travel", "--seed", "7", "--worlds", "20"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
