"""Finds the user's own modules and packages, and the files of them that are sent to nodes which import them.

A module is the user's own if its file is outside the standard library and outside every folder site-packages or
dist-packages, also those of other environments. A package is sent whole: with its data files, and with the metadata of
its installation if that is editable.

Files are read once. Modules that the program has loaded are sent as they were when the program first sent a call. A
module that is reloaded later is read again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import json
import os
import site
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlparse
from zipimport import zipimporter

from skypool.errors import ProtocolError, protocol_violation
from skypool.tracebacks import SITE_FOLDERS
from skypool.wire.pickling import SCRIPT

METADATA = "~metadata"
"""The name of the unit with the metadata of editable installations. It is no name of a module."""
LARGEST_FILE = 10 << 20
"""The most bytes of a file of a package that is sent."""
_MOST = 50 << 20
"""The most bytes of all files of a package that are sent, besides its modules."""
_MOST_FILES = 20_000
_MOST_ENTRIES = 100_000
"""The most files and folders that are looked at to find the files of a package."""
_MOST_TAKEN = 256 << 20
"""The most bytes of packages that nodes get although the program itself has not loaded them. Others are refused."""
_CODE = (".py", ".pyc", ".so", ".pyi", "py.typed")
_SKIPPED = frozenset(("__pycache__", "node_modules"))
_SAVING = 2.0
"""Seconds for which an editor may still be saving a file after the file's last change."""
_MOST_NAMES = 500
"""The most names of modules in the user's own folders that are sent to nodes."""
_MOST_VERSIONS = 20
"""The number of earlier versions of a package that are kept for calls that need them."""
_LONGEST_NAME = 500
"""The most characters of a module's name that is searched. A module with a longer name counts as not found."""
_MISSING_FOR = 5.0
"""Seconds for which skypool does not search again for a module that it did not find."""
_MOST_MISSING = 500
"""The number of missing modules, each a search on the disk, that a node may ask for within `_MISSING_FOR` seconds."""
_MOST_ANSWERS = 2000
"""The number of times that a node may ask for the same module in a burst. Each of its workers may ask."""
_ANSWERS_A_SECOND = 50
"""The number of times each second that a node may ask for the same module after a burst. New workers ask again."""
_MOST_AGAIN = 128 << 20
"""The most bytes that a node may get once more in a burst, as after a broken connection."""
_AGAIN_A_SECOND = 4 << 20
"""The bytes that a node may get once more each second after a burst."""
_INLINE = 4 << 20
"""The most bytes of files in one answer, unless it is a single file."""
_MOST_AT_ONCE = 1000
"""The most files in an answer to a node that lacks some of a package."""
_MOST_LEFT_OUT = 100
"""The most files of a package that are reported to a node as too large."""
_NEVER_SENT = SCRIPT | {"skypool", "skypool_images", "cloudpickle", "sitecustomize", "usercustomize"}
"""Names of modules of which each machine has its own. Debian's sitecustomize lies outside of the standard library."""

_OF_ENVIRONMENTS = tuple(f"{os.sep}{name}{os.sep}" for name in SITE_FOLDERS)
"""Parts of the paths of code that is installed in any environment, such as one that PYTHONPATH names."""


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of installed code, with a separator at the end and without symbolic links."""
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += site.getsitepackages()
    paths.append(site.getusersitepackages())
    return tuple({os.path.realpath(path) + os.sep for path in paths})


def is_users(path: str | None) -> bool:
    """Return True if the file of a module is the user's own: it is in no folder of installed code.

    Symbolic links are resolved first. The file need not exist. Returns False for None, "" and a relative path.
    """
    if not path or not os.path.isabs(path):
        return False
    if os.path.islink(path):
        real = os.path.realpath(path)
    else:
        folder, name = os.path.split(path)
        real = os.path.join(_real_folder(folder), name)
    return not (real.startswith(_installed()) or any(each in real for each in _OF_ENVIRONMENTS))


_real_folder = cache(os.path.realpath)


_is_users_file = cache(is_users)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Module or package of the user's own with all its files, which are sent together.

    Attributes:
        name: the name of the top-level module, without a dot.
        version: a hash of the files.
        files: the contents of the files, by their path, which begins with the name of the module.
        left_out: the paths of files that were not sent: they are too large, or may hold secrets.
        hashes: the hashes of the files, by their path. They are computed once, as nodes may ask often.
    """

    name: str
    version: str
    files: dict[str, bytes]
    left_out: tuple[str, ...]
    hashes: dict[str, str]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(map(len, self.files.values()))

    def listing(self) -> list[tuple[str, str, int]]:
        """Return (path, hash, size) of each file."""
        return [(path, self.hashes[path], len(data)) for path, data in self.files.items()]


def hash_of(data: bytes) -> str:
    """Return a hash of the contents of a file, 16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _unit(name: str, files: dict[str, bytes], left_out: Sequence[str]) -> Unit:
    digest = hashlib.sha256()
    hashes = {path: hash_of(data) for path, data in files.items()}
    for path in sorted(files):
        digest.update(f"{path}\0{hashes[path]}\0".encode("utf-8", "surrogateescape"))
    return Unit(name, digest.hexdigest()[:16], files, tuple(left_out), hashes)


# --- what the program has loaded ---------------------------------------------------------------------------------


class _Watcher:
    """Import finder that finds nothing. It only notes, in `is_dirty`, that some module was imported or reloaded."""

    def __init__(self) -> None:
        self.is_dirty = True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        self.is_dirty = True


_watcher = _Watcher()
_lock = threading.RLock()
_specs: dict[str, Any] = {}
_loaded: dict[str, Unit] = {}
_versions: dict[tuple[str, str], Unit] = {}
_generation = 0


def generation() -> int:
    """Return a counter that grows whenever modules of the user's own were loaded, reloaded or removed."""
    if _watcher.is_dirty or _watcher not in sys.meta_path:
        manifest()
    return _generation


def manifest() -> dict[str, str]:
    """Return the user's own modules and packages that are loaded, as a dict from their name to their version.

    Left out are the user's script, skypool, cloudpickle, and modules whose files cannot be read. The metadata of
    editable installations has the name `METADATA` in the dict.
    """
    global _generation
    with _lock:
        if _watcher not in sys.meta_path:
            sys.meta_path.insert(0, _watcher)
            _watcher.is_dirty = True
        if not _watcher.is_dirty:
            return {name: unit.version for name, unit in _loaded.items()}
        _watcher.is_dirty = False
        before = dict(_specs)
        _specs.clear()
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if name.partition(".")[0] not in _NEVER_SENT and isinstance(path, str) and _is_users_file(path):
                _specs[name] = getattr(module, "__spec__", None)
        if any(before.get(name, _Watcher) is not spec for name, spec in _specs.items()) or len(before) != len(_specs):
            _take(before)
            _generation += 1
        return {name: unit.version for name, unit in _loaded.items()}


def _take(before: dict[str, Any]) -> None:
    """Read the packages of which a module was loaded or reloaded since `before`, the specs of modules at that time."""
    tops: dict[str, list[str]] = {}
    for name in _specs:
        tops.setdefault(name.partition(".")[0], []).append(name)
    for gone in _loaded.keys() - tops.keys() - {METADATA}:
        del _loaded[gone]
    for top, names in tops.items():
        old = _loaded.get(top)
        if old is not None and all(before.get(name, _Watcher) is _specs[name] for name in names):
            continue
        kept = {}  # modules that were not loaded again stay as they were read
        for name in names:
            path = _path_of(name)
            if old is not None and before.get(name, _Watcher) is _specs[name] and path in old.files:
                kept[path] = old.files[path]
        unit = _read(top, kept, names)
        if unit.files:
            _remember(unit)
    metadata = _metadata()
    if metadata.files:
        _remember(metadata)


def _remember(unit: Unit) -> None:
    _loaded[unit.name] = unit
    _versions.pop((unit.name, unit.version), None)
    _versions[unit.name, unit.version] = unit
    mine = [key for key in _versions if key[0] == unit.name]
    for key in mine[:-_MOST_VERSIONS]:
        del _versions[key]


def _path_of(name: str) -> str:
    """Return the path, in its unit, of the file of a loaded module, such as "mypkg/tools.py"."""
    module = sys.modules[name]
    place = name.replace(".", "/")
    suffix = os.path.splitext(str(module.__file__))[1]
    return f"{place}/__init__{suffix}" if hasattr(module, "__path__") else f"{place}{suffix}"


# --- files -------------------------------------------------------------------------------------------------------


def _read(top: str, kept: dict[str, bytes], names: Sequence[str] = ()) -> Unit:
    """Read the files of a module or package, and of its loaded modules `names`. Files in `kept` are not read again."""
    found: dict[str, Path | bytes] = dict(kept)
    origin, places, loader = _locate(top)
    if isinstance(loader, zipimporter):
        found = {**_in_zip(loader, top), **found}
    else:
        for place in places:
            if is_users(place):
                for path, file in _walk(place, top, has_code=origin is not None):
                    found.setdefault(path, file)
        if not places and origin is not None:
            found.setdefault(f"{top}{os.path.splitext(origin)[1]}", Path(origin))
    for name in names:  # also those whose file is elsewhere, or has another name
        module = sys.modules.get(name)
        if module is not None and not isinstance(getattr(module, "__loader__", None), zipimporter):
            found.setdefault(_path_of(name), Path(str(module.__file__)))
    return _unit(top, *_contents(found, is_package=origin is not None))


def _contents(found: MutableMapping[str, Path | bytes], is_package: bool = True) -> tuple[dict[str, bytes], list[str]]:
    """Return the contents of the files `found`, by their path in the unit, and the paths of those that are not sent.

    These are too large, or may hold secrets.
    """
    # imported here because its patterns take long to compile, and many programs have no modules of their own
    from skypool.safety.never_sent import READ, why_secret, why_secret_inside

    files: dict[str, bytes] = {}
    left_out: list[str] = []
    room = _MOST
    for path, file in found.items():
        is_code = path.endswith(_CODE)
        if not is_code and any(map(why_secret, path.split("/")[1:])):
            left_out.append(path)
            continue
        # a folder that is no package may have anything: its modules, too, count towards the limit
        is_free = isinstance(file, bytes) or (is_code and is_package)
        size = 0
        if isinstance(file, bytes):
            data = file
        else:
            try:
                size = os.stat(file).st_size
                if size > LARGEST_FILE or (not is_free and size > room):
                    left_out.append(path)
                    continue
                data = _saved(file) if path.endswith(".py") else file.read_bytes()
            except OSError:
                continue
        if not is_code and why_secret_inside(data[:READ]):
            left_out.append(path)
            continue
        files[path] = data
        room -= 0 if is_free else size
    return files, left_out


def _saved(file: Path) -> bytes:
    """Return the contents of a module. If it is incomplete, because an editor is saving it now, wait a moment."""
    until = time.monotonic() + _SAVING
    while True:
        data = file.read_bytes()
        if time.time() - os.stat(file).st_mtime > _SAVING or time.monotonic() > until:
            return data
        try:
            compile(data, str(file), "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            time.sleep(0.05)
        else:
            if data:
                return data
            time.sleep(0.05)


def _walk(place: str, top: str, has_code: bool) -> Iterator[tuple[str, Path]]:
    """Yield (path in the unit, file) of a package, without hidden folders, virtual environments and linked folders."""
    count = seen = 0
    for folder, folders, names in os.walk(place):
        seen += len(folders) + len(names)
        if seen > _MOST_ENTRIES:
            return
        folders[:] = sorted(
            each
            for each in folders
            if each not in _SKIPPED
            and not each.startswith(".")
            and not os.path.exists(os.path.join(folder, each, "pyvenv.cfg"))
        )
        inside = f"{top}{folder.removeprefix(place.rstrip(os.sep))}"
        # a folder without `__init__.py` may be no package: then only its modules are yielded
        with_code = has_code or "__init__.py" in names
        for name in sorted(names):
            if with_code or name.endswith(_CODE):
                yield f"{inside}/{name}", Path(folder, name)
                count += 1
                if count >= _MOST_FILES:
                    return


def _in_zip(loader: zipimporter, top: str) -> dict[str, Path | bytes]:
    """Return the files of a module or package in a zip."""
    import zipfile  # imported here, as it is seldom needed

    with zipfile.ZipFile(loader.archive) as archive:
        prefix = loader.prefix.replace(os.sep, "/")
        found: dict[str, Path | bytes] = {}
        for name in archive.namelist():
            inside = name.removeprefix(prefix)
            if name.startswith(prefix) and not name.endswith("/") and inside.split("/")[0].partition(".")[0] == top:
                found[inside] = archive.read(name)
        return found


def _locate(name: str) -> tuple[str | None, list[str], Any]:
    """Return (file, folders of submodules, loader) of a module, without executing it; (None, [], None) if missing."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType):
        return getattr(module, "__file__", None), list(getattr(module, "__path__", [])), module.__loader__
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None, [], None
    if spec is None:
        return None, [], None
    return spec.origin if spec.has_location else None, list(spec.submodule_search_locations or []), spec.loader


# --- metadata of editable installations --------------------------------------------------------------------------


def _metadata() -> Unit:
    """Return the metadata of the user's own distributions: installed as editable, or in a folder on `sys.path`."""
    files: dict[str, Path | bytes] = {}
    for place in sys.path:
        is_own = is_users(os.path.abspath(place or "."))
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in sorted(each for each in names if each.endswith((".dist-info", ".egg-info"))):
            folder = os.path.join(place or ".", name)
            if name.startswith(("skypool-", "skypool.")):
                continue
            if name.endswith(".egg-info"):
                each = ("PKG-INFO", "entry_points.txt", "top_level.txt") if is_own else ()
            else:
                each = ("METADATA", "entry_points.txt", "top_level.txt") if is_own or _is_editable(folder) else ()
            for file in each:
                if os.path.isfile(os.path.join(folder, file)):
                    files[f"{name}/{file}"] = Path(folder, file)
    return _unit(METADATA, *_contents(files))


def _is_editable(folder: str) -> bool:
    path = os.path.join(folder, "direct_url.json")
    if not os.path.exists(path):  # as for most
        return False
    try:
        about = json.loads(Path(path).read_bytes())
        return bool(about["dir_info"]["editable"]) and is_users(unquote(urlparse(about["url"]).path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- names that come first ---------------------------------------------------------------------------------------


def first_names() -> list[str]:
    """Return the names of modules in the user's own folders that come before installed modules on `sys.path`.

    A node imports these modules of the user, and not installed ones of the same name, even if only the node uses them.
    """
    found: set[str] = set()
    for place in sys.path:
        folder = os.path.abspath(place or ".")
        if not is_users(os.path.join(folder, "module.py")):
            break
        found |= _names_in(folder)
    return sorted(found - _NEVER_SENT)[:_MOST_NAMES]


def _names_in(folder: str) -> set[str]:
    try:
        changed = os.stat(folder).st_mtime_ns
    except OSError:
        return set()
    return _names_at(folder, changed)


@cache
def _names_at(folder: str, _changed: int) -> set[str]:
    found = set()
    try:
        for entry in os.scandir(folder):
            name, suffix = os.path.splitext(entry.name)
            if (suffix == ".py" and entry.is_file()) or (
                not suffix and os.path.exists(os.path.join(entry.path, "__init__.py"))
            ):
                found.add(name)
    except OSError:
        return set()
    return {name for name in found if name.isidentifier()}


def own_units(texts: Iterable[bytes]) -> list[Unit]:
    """Return the user's own modules and packages that a call may import when nobody can be asked for them any more.

    These are the loaded ones, and those that they or the scripts import by a statement. `texts` are the texts of the
    scripts, compressed by zlib.
    """
    manifest()
    with _lock:
        found = dict(_loaded)
    lender = Lender()
    todo = {each for text in texts for each in _imported(zlib.decompress(text))}
    todo |= {each for unit in found.values() for each in _imported_by(unit)}
    seen = set(found)
    while todo:
        name = todo.pop()
        if name in seen or name in sys.stdlib_module_names:
            continue
        seen.add(name)
        unit = lender._unit(name, "")
        if unit is not None:
            found[name] = unit
            todo |= _imported_by(unit)
    return [*found.values()]


def _imported_by(unit: Unit) -> set[str]:
    return {name for path, data in unit.files.items() if path.endswith(".py") for name in _imported(data)}


def _imported(text: bytes) -> set[str]:
    """Return the names of the top-level modules that a module imports by a statement."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (RecursionError, SyntaxError, ValueError):  # such as a cell of a notebook with magic
        return set()
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {each.partition(".")[0] for each in names} - {""}


# --- answers to nodes --------------------------------------------------------------------------------------------


class Lender:
    """Source of the user's own modules for one node. It limits how often the node may ask.

    `taken` has the packages, by name, that nodes have imported and the program has not. The lenders of all nodes of a
    pool share it, so that all nodes get the same files. With `loaded_only`, nodes get only what the program has loaded.
    """

    def __init__(self, taken: MutableMapping[str, Unit] | None = None, loaded_only: bool = False) -> None:
        self._loaded_only = loaded_only
        self._taken = {} if taken is None else taken
        self._missing: dict[str, float] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        self._sent: set[str] = set()
        self._again = 0.0, 0.0

    def find(self, name: str, version: str = "", has: Sequence[str] = ()) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a node that asks for a module or package: the header of the frame, and its body.

        The body is a JSON list of (path, hash, size) of the files, a newline, and the contents of the first files. If
        the user has no such module, the body is empty, and the header's "found" is False. Its "why" then says why, such
        as "installed numpy==2.1.0", "much" (the limit of 256 MiB is reached), or "".

        Args:
            name: the name of the module or package, without a dot.
            version: the hash of its files; "" for any version.
            has: the versions that the node has. The body is empty if the answer is one of them.

        Raises:
            ProtocolError: the node asks too often, or for too many modules that do not exist.
        """
        now = time.monotonic()
        header = {"name": name, "version": version}
        if len(name) > _LONGEST_NAME or "." in name:
            return {**header, "found": False, "why": ""}, b""
        if now < self._missing.get(name, 0.0):
            self._count(name, now)
            return {**header, "found": False, "why": "much" if self.is_full else why_not(name)}, b""
        unit = self._unit(name, version)
        if unit is not None:
            self._count(name, now)
            body, inline = (b"", 0) if unit.version in has else _body(unit)
            self._count_again(f"{name} {unit.version}", len(body), now)
            left_out = unit.left_out[:_MOST_LEFT_OUT]
            answer = {"found": True, "hash": unit.version, "inline": inline, "left_out": left_out}
            return {**header, **answer}, body
        self._missing = {each: until for each, until in self._missing.items() if until > now}
        self._asked = {  # without those that count as if they had never been asked for
            each: (since, count)
            for each, (since, count) in self._asked.items()
            if count > (now - since) * _ANSWERS_A_SECOND
        }
        if len(self._missing) >= _MOST_MISSING:
            raise ProtocolError(
                f"the node asked within {_MISSING_FOR:g} s for {len(self._missing)} modules that do not exist on the "
                "client; import fewer optional modules in your functions, or report a bug of skypool if they import "
                "none"
            )
        self._missing[name] = now + _MISSING_FOR
        return {**header, "found": False, "why": "much" if self.is_full else why_not(name)}, b""

    @property
    def is_full(self) -> bool:
        """True if nodes have got 256 MiB or more of packages that the program has not loaded. They get no more then."""
        return sum(unit.size for unit in self._taken.values()) >= _MOST_TAKEN

    def file(self, name: str, version: str, path: str) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a node that lacks a file of a package that `find` has returned: header and body.

        The body has the contents of this file, and of those that follow it in the package, up to 4 MiB. The header's
        "files" has their paths.

        Raises ProtocolError if the package has no such file, or if the node asks too often.
        """
        unit = _versions.get((name, version)) or self._taken.get(name)
        if unit is None or unit.version != version or path not in unit.files:
            raise protocol_violation(f"the node asked for a file of {name!r:.100} that was not offered to it")
        now = time.monotonic()
        self._count(f"{name}/{path}", now)
        files = [path]
        size = len(unit.files[path])
        paths = list(unit.files)
        first = paths.index(path)
        for each in paths[first + 1 : first + _MOST_AT_ONCE]:
            size += len(unit.files[each])
            if size > _INLINE:
                break
            files.append(each)
        for each in files:
            self._count_again(f"{name} {version}/{each}", len(unit.files[each]), now)
        return {"name": name, "hash": version, "file": path, "files": files}, b"".join(
            unit.files[each] for each in files
        )

    def _unit(self, name: str, version: str) -> Unit | None:
        """Return this version of a package if it is kept, else its present version; None if there is none to send."""
        if (name, version) in _versions:
            return _versions[name, version]
        with _lock:
            if name in _loaded and (name in sys.modules or name == METADATA):
                return _loaded[name]
            if self._loaded_only:
                return None
            if name not in self._taken and name not in _NEVER_SENT and name != METADATA:
                if self.is_full:
                    return None
                origin, places, _ = _locate(name)
                if is_users(origin) or (origin is None and any(is_users(place) for place in places)):
                    unit = _read(name, {})
                    if unit.files or places:
                        self._taken[name] = unit
            return self._taken.get(name)

    def _count(self, name: str, now: float) -> None:
        """Count one more answer about a module. Raise ProtocolError if the node asks for it too often."""
        since, count = self._asked.get(name, (now, 0.0))
        count = max(0.0, count - (now - since) * _ANSWERS_A_SECOND) + 1
        self._asked[name] = now, count
        if count > _MOST_ANSWERS:
            raise protocol_violation(
                f"the node asked for the module {name!r} more than {_MOST_ANSWERS} times in a short time"
            )

    def _count_again(self, what: str, size: int, now: float) -> None:
        """Count the bytes of an answer that the node has got before. Raise ProtocolError if these are too many."""
        if what not in self._sent:
            self._sent.add(what)
            return
        since, count = self._again
        count = max(0.0, count - (now - since) * _AGAIN_A_SECOND) + size
        self._again = now, count
        if count > _MOST_AGAIN:
            raise protocol_violation(
                f"the node asked again for modules that it has got: for more than {_MOST_AGAIN >> 20} MiB in a short "
                f"time, at last for {what!r:.200}"
            )


def _body(unit: Unit) -> tuple[bytes, int]:
    """Return the body of an answer about a package, and how many of the files it has with their contents."""
    out = io.BytesIO()
    out.write(json.dumps(unit.listing()).encode() + b"\n")
    count = 0
    for data in unit.files.values():
        if out.tell() + len(data) > _INLINE:
            break
        out.write(data)
        count += 1
    return out.getvalue(), count


def why_not(name: str) -> str:
    """Return why a module that a node lacks is not sent to it: it is not the user's own. Return "" if nothing is known.

    "made" means that the program made it in memory, without a file. "installed NAME==VERSION" names the distribution
    that contains it.
    """
    if name in _NEVER_SENT:
        return ""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and getattr(module, "__file__", None) is None:
        spec: ModuleSpec | None = getattr(module, "__spec__", None)
        if name not in sys.stdlib_module_names and (spec is None or spec.loader is None) and not _is_folder(module):
            return "made"
    origin, places, _ = _locate(name)
    if origin is None and not places:
        return ""
    import importlib.metadata  # imported here, as it takes long

    for distribution in _distributions().get(name, ()):
        return f"installed {distribution}=={importlib.metadata.version(distribution)}"
    return ""


def _is_folder(module: ModuleType) -> bool:
    return bool(list(getattr(module, "__path__", ())))


@cache
def _distributions() -> Any:
    import importlib.metadata

    return importlib.metadata.packages_distributions()
