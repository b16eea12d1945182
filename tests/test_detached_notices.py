"""Runs that belong to a spot machine, which its provider takes back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skypool.head.states import Outcome
from skypool.runs import stored
from skypool.runs.run import _Printer
from skypool.runs.stored import RunStatus
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually

NOTICE = 24.0
"""Seconds from the notice until the machine is gone."""
BEGINS = "import os, signal, sys, time\nos.makedirs('out', exist_ok=True)\n"
CATCHES = """def save(*_):
    open('out/last', 'w').write('saved')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
STOPS = """open('out/began', 'w').write('1')
try:
    time.sleep(600)
finally:
    open('out/last', 'w').write('stopped')
"""
WAITS = "open('out/began', 'w').write('1')\ntime.sleep(600)\n"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0, market="spot")]) as made:
        yield made


def taken_back(
    cloud: FakeCloud, program: str, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunStatus, float]:
    """Hand a run over, have its machine taken back, and return the end that it stores, and after how many seconds."""
    project = bucket.parent / f"p{secrets.token_hex(3)}"
    project.mkdir()
    bucket.mkdir()
    (project / "train.py").write_text(program)
    monkeypatch.chdir(project)
    name = f"taken-{secrets.token_hex(3)}"
    rent = {"provider": cloud, "market": "spot"}
    asked = Asked(rent, name=name, budget=20.0, detach=True, buckets={"out": f"file://{bucket}"})
    whole = WholeRun(Target.of(["train.py"]), asked, _Printer())
    whole.check()
    assert whole.run() == 0
    eventually((bucket / "began").exists, 60, "the start of the program")
    [place] = bucket.parent.glob(f"cloud/machines/*/home/.skypool/heads/{name}-1")
    [machine] = cloud.instances(pool=name)
    begun = time.monotonic()
    cloud.control.interrupt(machine, NOTICE)
    eventually(lambda: stored.stored(place) is not None, NOTICE, "the end of the run, before its machine is gone")
    status = stored.stored(place)
    assert status is not None
    return status, time.monotonic() - begun


@pytest.mark.slow
def test_a_program_that_saves_when_its_machine_is_taken_back_has_all_saved_and_was_interrupted(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _ = taken_back(cloud, BEGINS + CATCHES + WAITS, tmp_path / "bucket", monkeypatch)
    assert (status.outcome, status.why, status.limit) == (
        Outcome.INTERRUPTED,
        "its provider has taken its machine back",
        "",
    )
    assert status.unsaved == ""
    assert (tmp_path / "bucket" / "last").read_text() == "saved"


@pytest.mark.slow
def test_a_program_that_hears_no_notice_is_stopped_before_its_machine_is_gone(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, after = taken_back(cloud, BEGINS + STOPS, tmp_path / "bucket", monkeypatch)
    assert (status.outcome, status.returncode, status.limit) == (Outcome.INTERRUPTED, 130, "")
    assert NOTICE / 2 - 3 <= after < NOTICE
    assert status.unsaved == ""
    assert (tmp_path / "bucket" / "last").read_text() == "stopped"
