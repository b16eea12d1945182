"""Reads what pyproject.toml and uv.lock of a project say. Client and nodes use it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from skypool.errors import UsageError

_FROM_ELSEWHERE = frozenset({"sources", "index", "index-url", "extra-index-url", "find-links", "no-index"})
"""What in `[tool.uv]` says that packages come from elsewhere than PyPI."""
_LOCAL = ("directory", "editable", "virtual", "path")
"""The keys in uv.lock that say where on this computer a package is."""


class LocalPackage(NamedTuple):
    """A package that a project takes from a folder or file, not from an index.

    Attributes:
        name: its name.
        place: the path, which begins at the project's root.
        is_copied: True if uv installs a copy of the folder. uv keeps what it has built of it, and does not see that its
            files have changed.
    """

    name: str
    place: str
    is_copied: bool


def toml(text: str, where: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises UsageError, with its path `where`, if it is not valid."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{where} is not valid: {e}") from e


def table(value: object) -> Mapping[str, Any]:
    """Return a table of a TOML file; {} for what is none, of which uv tells."""
    return value if isinstance(value, dict) else {}


def pyproject(root: Path) -> dict[str, Any]:
    """Return the contents of pyproject.toml; {} without it. Raises UsageError if it is not valid."""
    path = root / "pyproject.toml"
    try:
        return toml(path.read_text("utf-8"), path) if path.is_file() else {}
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8, as TOML must be: {e}; save it as UTF-8") from e


def uv_table(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `[tool.uv]` of the contents of pyproject.toml; {} without it."""
    return table(table(said.get("tool")).get("uv"))


def from_elsewhere(root: Path) -> list[str]:
    """Return the settings of `[tool.uv]` that say that packages come from elsewhere than PyPI."""
    return sorted(uv_table(pyproject(root)).keys() & _FROM_ELSEWHERE)


def pip_arguments(root: Path, source: str) -> list[str]:
    """Return the arguments by which pip installs the packages of a project, and the project if it is to be built."""
    has_setup = (root / "setup.py").exists()
    if source in ("requirements.txt", "setup.py"):
        return [*(["-r", source] if source == "requirements.txt" else []), *(["-e", "."] if has_setup else [])]
    if source != "pyproject.toml":
        return []
    said = pyproject(root)
    if "build-system" in said or has_setup:
        return ["-e", "."]
    return [each for each in table(said.get("project")).get("dependencies", ()) if isinstance(each, str)]


def local_packages(root: Path, source: str) -> Iterator[LocalPackage]:
    """Yield the packages from this computer that uv.lock names, if that is the source, or pyproject.toml."""
    if source == "uv.lock":
        listed = toml((root / source).read_text("utf-8", "replace"), root / source).get("package")
        for each in map(table, listed if isinstance(listed, list) else []):
            said = table(each.get("source"))
            for key in _LOCAL:
                if key in said:
                    yield LocalPackage(str(each.get("name")), str(said[key]), is_copied=key == "directory")
    elif source == "pyproject.toml":
        for name, entries in table(uv_table(pyproject(root)).get("sources")).items():
            for said in map(table, entries if isinstance(entries, list) else [entries]):
                if "path" in said:
                    place = str(said["path"])
                    yield LocalPackage(name, place, not said.get("editable") and os.path.isdir(root / place))
