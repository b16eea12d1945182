"""Finds the user's own modules and their source, which nodes ask for when they import them.

A module is the user's own when it was imported from outside the standard library and outside site-packages.
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

from skypool.errors import ProtocolError
from skypool.wire.pickling import SCRIPT

_LONGEST_NAME = 500
"""Characters of the name of a module. No file has a longer one, and finding it takes a call for each dot in it."""
_MISSING_FOR = 5.0
"""Seconds for which a module that was not found is not looked for again."""
_MOST_MISSING = 500
"""Names without a module that a node may ask for within `_MISSING_FOR` seconds. Each costs a look at the disk."""
_MOST_ANSWERS = 2000
"""Answers with the same module at once: each worker of a node may ask by itself."""
_ANSWERS_A_SECOND = 50
"""Answers with the same module every second, beside those: workers that died ask again."""
_NEVER_SENT = SCRIPT | {"skypool", "skypool_images", "cloudpickle"}


@cache
def _installed() -> tuple[str, ...]:
    """The folders of everything that is installed and so found on a node too, or installed there."""
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += site.getsitepackages()
    paths.append(site.getusersitepackages())
    return tuple({os.path.realpath(path) + os.sep for path in paths})


def is_users(path: str | None) -> bool:
    """Whether a module's file is the user's own."""
    if not path or not os.path.isabs(path):
        return False
    return not os.path.realpath(path).startswith(_installed())


_is_users_file = cache(is_users)


def stamp(module: ModuleType) -> tuple[int, int] | None:
    """What changes when the file of a module of the user's own does; None for every other module."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not _is_users_file(path):
        return None
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def manifest() -> dict[str, str]:
    """Every module of the user's own that is loaded now: name -> content hash."""
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
    try:
        stat = os.stat(getattr(loader, "archive", path))
        stamp = (stat.st_mtime_ns, stat.st_size)
        if _digests.get(path, (None, ""))[0] != stamp:
            _digests[path] = (stamp, hashlib.sha256(_source(path, loader)).hexdigest()[:16])
    except OSError:
        return ""
    return _digests[path][1]


def _source(path: str, loader: Any) -> bytes:
    """What is in a module's file, which may be in a zip.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(loader, zipimporter):
        return loader.get_data(path)
    with open(path, "rb") as file:
        return file.read()


class Lender:
    """Modules of the user's own as one node asks for them. It may ask often, but not all the time.

    Every name is looked up once, and again when its file has changed. A name that was not found is looked up again
    after `_MISSING_FOR` seconds.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, int] | None, dict[str, Any], bytes]] = {}
        self._missing: dict[str, float] = {}
        self._asked: dict[str, tuple[float, float]] = {}

    def find(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return the header of the answer to a node that asks for a module, and the source.

        Raises:
            ProtocolError: it asks for the same module again and again, or for too many that do not exist.
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
        if len(self._missing) >= _MOST_MISSING:
            raise ProtocolError(f"it asked for {len(self._missing)} modules in a moment that do not exist here")
        self._missing[name] = now + _MISSING_FOR
        return header, source

    def _count(self, name: str, now: float) -> None:
        """Count one more answer of the same: many workers may ask at once, and a few more every second."""
        since, count = self._asked.get(name, (now, 0.0))
        count = max(0.0, count - (now - since) * _ANSWERS_A_SECOND) + 1
        self._asked[name] = now, count
        if count > _MOST_ANSWERS:
            raise ProtocolError(f"it asks for the module {name!r} again and again")


def _stamp_of(name: str) -> tuple[int, int] | None:
    """What changes when the file of a module does, whether it is loaded here or not."""
    origin, _, loader = _locate(name)
    try:
        stat = os.stat(getattr(loader, "archive", None) or origin or "")
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def find(name: str) -> tuple[dict[str, Any], bytes]:
    """What a node gets that asks for a module: the header of the answer, and the source.

    Looks, but runs nothing: a module that is not loaded here is found by its spec, without importing its parents.
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
    """(file, where its submodules are, its loader). A namespace package has no file; what is no package has no such
    places.
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
