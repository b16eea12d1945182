"""Finds the user's own modules and their source, for nodes (rented machines) that import them.

A module is the user's own if its file is outside the standard library and outside site-packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any
from zipimport import zipimporter

from skypool.errors import ProtocolError, protocol_violation
from skypool.wire.pickling import SCRIPT

_LONGEST_NAME = 500
"""The greatest length in characters of a module's name that is searched.

A module with a longer name counts as not found.
"""
_MISSING_FOR = 5.0
"""Seconds for which skypool does not search again for a module that it did not find."""
_MOST_MISSING = 500
"""The number of missing modules that a node may ask for within `_MISSING_FOR` seconds.

Each of them costs a search on the disk.
"""
_MOST_ANSWERS = 2000
"""The number of times that a node may ask for the same module in a burst. Each worker of the node may ask separately.
"""
_ANSWERS_A_SECOND = 50
"""The number of times each second that a node may ask for the same module after a burst.

New workers ask for a module again when old workers have died.
"""
_NEVER_SENT = SCRIPT | {"skypool", "skypool_images", "cloudpickle"}


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of installed code, with a separator at the end: the standard library and all site-packages.

    Symbolic links are resolved. Nodes have their own copies of these modules. The result is computed once in a process.
    """
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += site.getsitepackages()
    paths.append(site.getusersitepackages())
    return tuple({os.path.realpath(path) + os.sep for path in paths})


def is_users(path: str | None) -> bool:
    """Return True if the file of a module is the user's own: it is in none of the folders of installed code.

    Symbolic links in the path are resolved first. Returns False for a path that is not absolute, for None and for "".
    The file need not exist.
    """
    if not path or not os.path.isabs(path):
        return False
    return not os.path.realpath(path).startswith(_installed())


_is_users_file = cache(is_users)


def stamp(module: ModuleType) -> tuple[int, int] | None:
    """Return (time of change in nanoseconds, size in bytes) of the file of a loaded module.

    If the result differs from an earlier one, the file has changed. Returns None if the module is not the user's own,
    or if its file no longer exists.
    """
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not _is_users_file(path):
        return None
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def manifest() -> dict[str, str]:
    """Return all modules of the user's own that are loaded now, as a dict from a module's name to a hash of its source.

    Each hash has 16 hexadecimal digits. Left out are the user's script, skypool, cloudpickle, and modules whose source
    cannot be read.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _NEVER_SENT:
            continue
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and is_users(path) and (digest := _digest(path, getattr(module, "__loader__", None))):
            found[name] = digest
    return found


_digests: dict[str, tuple[tuple[int, int], str]] = {}


def _digest(path: str, loader: Any) -> str:
    """Return a hash of a module's source, 16 hexadecimal digits; "" if the source cannot be read.

    The hash is cached until the file's time or size changes.

    Args:
        path: the module's file, which may be inside a zip.
        loader: the module's loader. A `zipimporter` reads the source from the zip.
    """
    try:
        stat = os.stat(getattr(loader, "archive", path))
        stamp = (stat.st_mtime_ns, stat.st_size)
        if _digests.get(path, (None, ""))[0] != stamp:
            _digests[path] = (stamp, hashlib.sha256(_source(path, loader)).hexdigest()[:16])
    except OSError:
        return ""
    return _digests[path][1]


def _source(path: str, loader: Any) -> bytes:
    """Return the contents of a module's file, which may be inside a zip.

    Args:
        path: the module's file.
        loader: the module's loader. A `zipimporter` reads the file from the zip.

    Raises:
        OSError: the file cannot be read.
    """
    if isinstance(loader, zipimporter):
        return loader.get_data(path)
    with open(path, "rb") as file:
        return file.read()


class Lender:
    """A finder of the user's own modules for one node that asks for them. The finder limits how often the node may ask.

    A module is searched once, and again when its file has changed. A name that was not found is searched again after
    `_MISSING_FOR` (5) seconds.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, int] | None, dict[str, Any], bytes]] = {}
        self._missing: dict[str, float] = {}
        self._asked: dict[str, tuple[float, float]] = {}

    def find(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a node that asks for a module: the header of the message, and the module's source.

        If the user has no such module, the header's "found" is False and the source is b"". A name of more than
        `_LONGEST_NAME` (500) characters is never found.

        Raises:
            ProtocolError: the node asks for the same module too often, or for too many that do not exist.
        """
        now = time.monotonic()
        if len(name) > _LONGEST_NAME:
            return {"name": name, "found": False}, b""
        if name in self._found:
            self._count(name, now)
            stamp, header, source = self._found[name]
            if stamp == _stamp_of(name):
                return header, source
        elif now < self._missing.get(name, 0.0):
            self._count(name, now)
            return {"name": name, "found": False}, b""
        header, source = find(name)
        if header["found"]:
            self._found[name] = _stamp_of(name), header, source
            return header, source
        self._found.pop(name, None)
        self._missing = {each: until for each, until in self._missing.items() if until > now}
        self._asked = {each: when for each, when in self._asked.items() if each in self._found or each in self._missing}
        if len(self._missing) >= _MOST_MISSING:
            raise ProtocolError(
                f"the node asked within {_MISSING_FOR:g} s for {len(self._missing)} modules that do not exist on the "
                "client; import fewer optional modules in your functions, or report a bug of skypool if they import "
                "none"
            )
        self._missing[name] = now + _MISSING_FOR
        return header, source

    def _count(self, name: str, now: float) -> None:
        """Count one more answer about a module, and check that the node does not ask for this module too often.

        The node may get `_MOST_ANSWERS` (2000) answers at once, and `_ANSWERS_A_SECOND` (50) more each second. The
        answers about each module are counted separately.

        Args:
            name: the module's name.
            now: the time by `time.monotonic()`.

        Raises:
            ProtocolError: the node has asked more often.
        """
        since, count = self._asked.get(name, (now, 0.0))
        count = max(0.0, count - (now - since) * _ANSWERS_A_SECOND) + 1
        self._asked[name] = now, count
        if count > _MOST_ANSWERS:
            raise protocol_violation(
                f"the node asked for the module {name!r} more than {_MOST_ANSWERS} times in a short time"
            )


def _stamp_of(name: str) -> tuple[int, int] | None:
    """Return (time of change in nanoseconds, size in bytes) of the file of the module with this name.

    For a module in a zip, the values are those of the zip. The module need not be loaded. Returns None if there is no
    such module or file.
    """
    origin, _, loader = _locate(name)
    try:
        stat = os.stat(getattr(loader, "archive", None) or origin or "")
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def find(name: str) -> tuple[dict[str, Any], bytes]:
    """Return the answer to a node that asks for a module: the header of the message, and the module's source.

    If the user has no such module, the header's "found" is False and the source is b"". For a namespace package (a
    folder without `__init__.py`), "found" is True and the source is b"". No module is executed or imported.

    Args:
        name: the module's full name.
    """
    missing = {"name": name, "found": False}
    if name.partition(".")[0] in _NEVER_SENT:
        return missing, b""
    origin, places, loader = _locate(name)
    if origin is None and any(is_users(place) for place in places):
        return {**missing, "found": True, "package": True, "hash": "namespace"}, b""
    if origin is None or not is_users(origin):
        return missing, b""
    try:
        source = _source(origin, loader)
    except OSError:
        return missing, b""
    digest = hashlib.sha256(source).hexdigest()[:16]
    return {
        "name": name,
        "found": True,
        "package": bool(places),
        "file": os.path.basename(origin),
        "hash": digest,
    }, source


def _locate(name: str) -> tuple[str | None, list[str], Any]:
    """Return (file, folders of its submodules, loader) of a module, without executing it.

    The file is None for a module without a file, such as a namespace package (a folder without `__init__.py`). The list
    of folders is empty for a module that is not a package. If there is no such module, the result is (None, [], None).
    """
    module = sys.modules.get(name)
    if isinstance(module, ModuleType):
        return getattr(module, "__file__", None), list(getattr(module, "__path__", [])), module.__loader__
    parent, _, last = name.rpartition(".")
    try:
        spec = PathFinder.find_spec(last, _locate(parent)[1]) if parent else importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None, [], None
    if spec is None:
        return None, [], None
    return spec.origin if spec.has_location else None, list(spec.submodule_search_locations or []), spec.loader
