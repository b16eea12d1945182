"""Machines that failed are left out for a while, and whoever wants one back removes its file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from skypool import faulty


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_machine_that_failed_is_known_with_why_and_only_at_its_provider() -> None:
    assert faulty.known("acme") == {}
    faulty.note("acme", 12, "no device\nat all")
    faulty.note("acme", 12, "no device")
    faulty.note("other", 13, "slow")
    assert faulty.known("acme") == {12: "no device"}


def test_it_is_forgotten_after_a_day_or_when_its_file_is_removed() -> None:
    for machine in (1, 2, 3):
        faulty.note("acme", machine, "x")
    old = time.time() - faulty.REMEMBERED - 60
    os.utime(faulty.place("acme") / "1", (old, old))
    (faulty.place("acme") / "2").unlink()
    assert set(faulty.known("acme")) == {3}
    assert [file.name for file in faulty.place("acme").iterdir()] == ["3"]


def test_a_file_with_damaged_bytes_still_leaves_its_machine_out() -> None:
    faulty.note("acme", 12, "no device")
    (faulty.place("acme") / "12").write_bytes(b"\xff\xfe no")
    assert set(faulty.known("acme")) == {12}
