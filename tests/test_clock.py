"""Clocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skypool import clock

pytestmark = pytest.mark.skipif(hasattr(sys, "_skypool_as_darwin"), reason="nodes are Linux")


def test_changes_of_a_file_are_before_or_after_a_moment_between_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(30):
        path.write_text("before")
        before = path.stat().st_ctime_ns
        moment = clock.moment_between_changes()
        path.write_text("after")
        assert before <= moment < path.stat().st_ctime_ns
