"""README.md and the test modules agree about which clients there are."""

from __future__ import annotations

import importlib
import re

from tests.clients import table
from tests.clients.venvs import REQUIREMENTS


def abouts() -> list[table.About]:
    """Return the clients of all test modules."""
    files = sorted(table.README.parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.clients.{file.stem}") for file in files if file.stem != "test_table"]
    return [about for module in modules for about in (getattr(module, "ABOUTS", None) or [module.ABOUT])]


def test_the_readme_has_a_section_for_each_client_and_no_others() -> None:
    titles = re.findall(r"^### (.+)$", table.README.read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(about.title for about in abouts())


def test_every_package_of_a_client_has_a_version() -> None:
    for file in sorted(REQUIREMENTS.glob("*.txt")):
        first, *pins = file.read_text().splitlines()
        assert first.startswith("# ")
        assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.!+-]+", pin)] == []
    assert {about.requirements for about in abouts()} == {file.stem for file in REQUIREMENTS.glob("*.txt")}
