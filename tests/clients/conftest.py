"""Every test of a client is slow, and marked `clients`. It may be the one that installs the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.venvs import INSTALLING

HERE = Path(__file__).parent
FAST = {"test_table.py"}
"""Modules that need no environment of a client."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.parent == HERE and item.path.name not in FAST:
            item.add_marker("clients")
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(INSTALLING + 200))
