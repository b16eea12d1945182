"""`Project`: the folder that a script belongs to, what it needs, and which of its files are sent to nodes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from skypool.errors import UsageError
from skypool.files.entries import walk
from skypool.files.ignored import Ignored
from skypool.files.never_sent import READ, is_cache, why_secret, why_secret_inside
from skypool.safety import user_folders

Source = Literal["script", "uv.lock", "pyproject.toml", "requirements.txt", ""]
_MARKS = ("pyproject.toml", "uv.lock", "requirements.txt", ".git")
"""What the root of a project has at least one of."""
_HEADER = re.compile(r"(?m)^# /// script\s*$\s(?P<text>(?:^#(?:| .*)$\s)+)^# ///\s*$")
"""The metadata in a script, as https://packaging.python.org/en/latest/specifications/inline-script-metadata/ has it."""
_VERSIONED = {
    "setuptools-scm": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "hatch-vcs": "SETUPTOOLS_SCM_PRETEND_VERSION",
    "pdm-backend": "PDM_BUILD_SCM_VERSION",
    "poetry-dynamic-versioning": "POETRY_DYNAMIC_VERSIONING_BYPASS",
    "uv-dynamic-versioning": "UV_DYNAMIC_VERSIONING_BYPASS",
    "versioningit": "VERSIONINGIT_FOR_PACKAGE_VERSION",
}
"""By build requirement that asks git for a version, the variable that tells it instead."""


@dataclass(frozen=True)
class Project:
    """A project on this computer.

    Attributes:
        root: its folder, an absolute path.
        source: what names its packages; "" if nothing does.
        python: the versions of Python that it works with, such as ">=3.11"; "" if it does not say.
        packages: the packages that the header of a script names.
    """

    root: Path
    source: Source
    python: str
    packages: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str | os.PathLike[str] = ".") -> Project:
        """Return the project of a script or folder.

        Its root is the nearest folder above with a pyproject.toml, uv.lock, requirements.txt or .git, below the user's
        home folder; without one, the folder of the script. Raises UsageError if a file of the project is not valid.
        """
        path = Path(os.path.abspath(os.path.expanduser(target)))
        script = path if path.is_file() else None
        start = path.parent if script else path
        if not start.is_dir():
            raise UsageError(f"{start} does not exist; name a script or a folder of this computer")
        root = _root(start)
        header = _header(script) if script is not None and script.suffix == ".py" else None
        if header is not None:
            packages = tuple(each for each in header.get("dependencies", ()) if isinstance(each, str))
            return cls(root, "script", _text(header, "requires-python"), packages)
        said = _pyproject(root)
        pinned = _pinned(root)
        python = pinned or _text(said.get("project", {}), "requires-python")
        source: Source = ""
        if (root / "uv.lock").is_file():
            source = "uv.lock"
        elif "project" in said:
            source = "pyproject.toml"
        elif (root / "requirements.txt").is_file():
            source = "requirements.txt"
        return cls(root, source, python)

    @property
    def key(self) -> str:
        """A hash of the root's path, which tells projects of one name apart."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The variables that tell build tools the version which they would ask git for, as nodes get no .git."""
        said = _pyproject(self.root)
        required = [
            re.split(r"[^\w.-]", each.strip().lower(), maxsplit=1)[0].replace("_", "-") for each in _required(said)
        ]
        names = {_VERSIONED[each] for each in required if each in _VERSIONED}
        if not names or "version" in said.get("project", {}):
            return {}
        version = _described(self.root)
        return dict.fromkeys(sorted(names), version) if version else {}


class Unsent:
    """Tells which files of a project are not sent, as `entries.walk` asks.

    These are secrets, caches, and what git ignores: in a checkout git itself is asked, so that a tracked file is sent
    though a pattern matches it. Elsewhere, or without git, `.gitignore` and `.skypoolignore` decide.

    Args:
        root: the root of the project.
        include: paths below the root that are sent in any case.
        state: folders of skypool itself, which are never sent.

    Attributes:
        told: why each file or folder was left out, by its path: those that hold secrets, and those that are ignored.
    """

    def __init__(self, root: Path, include: Collection[str] = (), state: Sequence[Path] = ()) -> None:
        self._root = root
        self._include = {os.path.normpath(each).replace(os.sep, "/") for each in include}
        self._above = {path.rpartition("/")[0] for path in self._with_parents(self._include)}
        self._state = [os.path.realpath(each) for each in state]
        self._listed = listed_by_git(root)
        self._ignored = Ignored(str(root))
        self.told: dict[str, str] = {}
        for each in self._include:
            if not os.path.lexists(root / each):
                raise UsageError(f"there is no {each!r} in the project {root}; correct or remove this --include")

    @staticmethod
    def _with_parents(paths: Collection[str]) -> set[str]:
        return {"/".join(path.split("/")[: n + 1]) for path in paths for n in range(path.count("/") + 1)}

    def __call__(self, path: str, is_folder: bool) -> bool:
        """Return True if a path below the root is not sent."""
        if path in self._include or (is_folder and path in self._above) or self._is_inside(path):
            return False
        name = path.rpartition("/")[2]
        whole = os.path.join(self._root, path)
        if is_cache(name) or (is_folder and os.path.exists(os.path.join(whole, "pyvenv.cfg"))):
            return True
        if is_folder and os.path.realpath(whole) in self._state:
            return True
        why = why_secret(name) or ("" if is_folder else _secret_inside(whole))
        if not why and self._left_out(path, is_folder):
            why = "it is ignored"
        if why:
            self.told[path] = why
        return bool(why)

    def _is_inside(self, path: str) -> bool:
        """Return True if a path is below a folder that is sent in any case."""
        parts = path.split("/")
        return any("/".join(parts[: n + 1]) in self._include for n in range(len(parts) - 1))

    def _left_out(self, path: str, is_folder: bool) -> bool:
        if self._listed is None:
            return self._ignored(path, is_folder)
        return path not in self._listed


@dataclass(frozen=True)
class Survey:
    """What would be sent of a project.

    Attributes:
        files, bytes: how much it is.
        largest: the folders below the root with most bytes, as (path, bytes).
        unsent: why files and folders are not sent, by path.
    """

    files: int
    bytes: int
    largest: Sequence[tuple[str, int]]
    unsent: Mapping[str, str]


def surveyed(project: Project, include: Collection[str] = ()) -> Survey:
    """Look at what would be sent of a project. Raises UsageError if `include` names what is not there."""
    unsent = unsent_of(project, include)
    sizes: Counter[str] = Counter()
    files = 0
    for each in walk(str(project.root), unsent):
        if each.kind == "f":
            files += 1
            sizes[each.path.partition("/")[0] if "/" in each.path else ""] += each.size
    return Survey(files, sizes.total(), sizes.most_common(5), unsent.told)


def unsent_of(project: Project, include: Collection[str] = ()) -> Unsent:
    """Return what tells which files of a project are not sent."""
    return Unsent(project.root, include, [user_folders.state(), user_folders.cache()])


def listed_by_git(root: Path) -> set[str] | None:
    """Return the paths below a folder that git tracks or would track, and their folders; None without git or checkout.

    Raises UsageError if git fails for another reason.
    """
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        if b"not a git repository" in done.stderr:
            return None
        raise UsageError(f"git cannot list the files of {root}: {os.fsdecode(done.stderr).strip()}")
    found: set[str] = set()
    for each in filter(None, done.stdout.split(b"\0")):
        path = os.fsdecode(each).rstrip("/")
        inner = root / path
        if inner.is_dir() and not inner.is_symlink():  # a submodule, or a checkout in this one
            found.update(f"{path}/{below}" for below in listed_by_git(inner) or ())
        found.add(path)
    for path in [*found]:
        while path := path.rpartition("/")[0]:
            if path in found:
                break
            found.add(path)
    return found


def _secret_inside(path: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return why_secret_inside(file.read(READ))
    except OSError:
        return ""  # a link, which is sent as a link, or what the transfer will tell of


def _root(start: Path) -> Path:
    """Return the nearest folder with one of `_MARKS`, or `start`."""
    home = Path(os.path.expanduser("~"))
    for folder in (start, *start.parents):
        if folder in (home, *home.parents) and folder != start:
            return start
        if any((folder / each).exists() for each in _MARKS):
            return folder
    return start


def _header(script: Path) -> dict[str, Any] | None:
    """Return the metadata of a script; None if it has none."""
    found = list(_HEADER.finditer(script.read_text("utf-8", "surrogateescape")))
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(f"{script} has {len(found)} blocks `# /// script`; leave one")
    lines = found[0]["text"].splitlines()
    return _toml("\n".join(each[2:] if each.startswith("# ") else each[1:] for each in lines), script)


def _pyproject(root: Path) -> dict[str, Any]:
    path = root / "pyproject.toml"
    return _toml(path.read_text("utf-8", "surrogateescape"), path) if path.is_file() else {}


def _toml(text: str, where: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{where} is not valid: {e}") from e


def _text(said: object, key: str) -> str:
    value = said.get(key, "") if isinstance(said, dict) else ""
    return value if isinstance(value, str) else ""


def _pinned(root: Path) -> str:
    """Return the version that .python-version names, as uv and pyenv read it; "" for none."""
    path = root / ".python-version"
    lines = path.read_text("utf-8", "replace").split() if path.is_file() else []
    return f"=={lines[0]}.*" if lines and re.fullmatch(r"\d+\.\d+", lines[0]) else f"=={lines[0]}" if lines else ""


def _required(said: Mapping[str, Any]) -> list[str]:
    """Return what the build of a project requires."""
    required = said.get("build-system", {}).get("requires", [])
    return [each for each in required if isinstance(each, str)]


def _described(root: Path) -> str:
    """Return the version of a checkout, as setuptools-scm would guess it; "" if git cannot tell."""
    argv = ["git", "-C", str(root), "describe", "--tags", "--long", "--dirty", "--match", "*[0-9]*"]
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
    found = re.fullmatch(r"(?:.*[^\d.])??v?(\d+(?:\.\d+)*)\S*?-(\d+)-g([0-9a-f]+)(-dirty)?", said)
    if found is None:
        return ""
    release, distance, commit, dirty = found.groups()
    if distance == "0" and not dirty:
        return release
    *front, last = release.split(".")
    following = ".".join([*front, str(int(last) + 1)])
    return f"{following}.dev{distance}+g{commit}"
