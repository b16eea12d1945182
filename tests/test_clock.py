"""Clocks."""

from __future__ import annotations

import sys
import time
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


def test_the_clock_of_files_has_passed_a_moment_between_changes() -> None:
    """Kernels since 6.13 give files finer times than this clock, if somebody has looked at the files in between."""
    for _ in range(30):
        moment = clock.moment_between_changes()
        assert time.clock_gettime_ns(5) > moment
