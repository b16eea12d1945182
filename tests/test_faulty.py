"""Machines that failed are left out for a while, and whoever wants one back removes its file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from skypool.drivers import blocklist


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_machine_that_failed_is_known_with_why_and_only_at_its_provider() -> None:
    assert blocklist.known("acme") == {}
    blocklist.note("acme", 12, "no device\nat all")
    blocklist.note("acme", 12, "no device")
    blocklist.note("other", 13, "slow")
    assert blocklist.known("acme") == {12: "no device"}


def test_it_is_forgotten_after_a_day_or_when_its_file_is_removed() -> None:
    for machine in (1, 2, 3):
        blocklist.note("acme", machine, "x")
    old = time.time() - blocklist.REMEMBERED - 60
    os.utime(blocklist.place("acme") / "1", (old, old))
    (blocklist.place("acme") / "2").unlink()
    assert set(blocklist.known("acme")) == {3}
    assert [file.name for file in blocklist.place("acme").iterdir()] == ["3"]


def test_a_file_with_damaged_bytes_still_leaves_its_machine_out() -> None:
    blocklist.note("acme", 12, "no device")
    (blocklist.place("acme") / "12").write_bytes(b"\xff\xfe no")
    assert set(blocklist.known("acme")) == {12}
