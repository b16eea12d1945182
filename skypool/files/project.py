"""`Project`: the folder that a script belongs to, what it needs, and which of its files are sent to nodes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from skypool.errors import UsageError
from skypool.files.entries import Entry, walk
from skypool.files.ignored import NAMES, OURS, Ignored
from skypool.files.project_files import local_packages, pyproject, table, toml, uv_table
from skypool.processes import host_name
from skypool.safety import user_folders
from skypool.safety.never_sent import READ, is_cache, why_secret, why_secret_inside

Source = Literal["script", "uv.lock", "pyproject.toml", "requirements.txt", "setup.py", ""]
_MARKS = ("pyproject.toml", "uv.lock", "requirements.txt", "setup.py", ".git")
"""What the root of a project has at least one of."""
_NEEDED = ("pyproject.toml", "uv.lock", "requirements.txt", "setup.py")
"""The files that name packages."""
_MOST_BYTES = 10**9
_MOST_FILES = 10_000
_REQUIRED_PATH = re.compile(r"(?m)^\s*(?:-[erc]\s*|--(?:editable|requirement|constraint)[ =]\s*)?(\.\.?/[^\s;#\[]*)")
"""The paths that begin with a dot in a file of requirements."""
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

        Its root is the nearest folder above with one of `_MARKS`, such as pyproject.toml or .git, below the user's home
        folder; without one, the folder of the script. Raises UsageError if a file of the project is not valid.
        """
        path = Path(os.path.abspath(os.path.expanduser(target)))
        script = path if path.is_file() else None
        start = path.parent if script else path
        if not start.is_dir():
            raise UsageError(f"{start} does not exist; name a script or a folder of this computer")
        root = _root(start)
        home = Path(os.path.realpath(os.path.expanduser("~")))
        if Path(os.path.realpath(root)) in (home, *home.parents, Path(os.path.realpath(tempfile.gettempdir()))):
            raise UsageError(
                f"all of {root} would be sent; put what you run into a folder of its own, and start it there"
            )
        header = _header(script) if script is not None and script.suffix == ".py" else None
        if header is not None:
            if uv_table(header):
                raise UsageError(
                    f"{script}: [tool.uv] in the header of a script is not read here, and packages of other origins "
                    "would be taken from PyPI; name its packages in a pyproject.toml instead"
                )
            return cls(root, "script", _text(header, "requires-python"), tuple(_texts(header, "dependencies", script)))
        said = pyproject(root)
        pinned = _pinned(root)
        python = pinned or _text(said.get("project", {}), "requires-python")
        source: Source = ""
        if (root / "uv.lock").is_file():
            source = "uv.lock"
        elif said.keys() & {"project", "build-system"}:
            source = "pyproject.toml"
        elif (root / "requirements.txt").is_file():
            source = "requirements.txt"
        elif (root / "setup.py").is_file():
            source = "setup.py"
        return cls(root, source, python)

    def check_paths(self) -> None:
        """Raise UsageError if a package of the project comes from a folder or file outside of it, which is not sent."""
        places = [(each.name, each.place) for each in local_packages(self.root, self.source)]
        if self.source == "requirements.txt":
            text = (self.root / self.source).read_text("utf-8", "replace")
            places = [(each, each) for each in _REQUIRED_PATH.findall(text)]
        for name, place in places:
            if not Path(os.path.realpath(self.root / place)).is_relative_to(os.path.realpath(self.root)):
                away = os.path.normpath(self.root / place)
                raise UsageError(
                    f"{self.root / self.source} takes {name} from {away}, which is not in the project {self.root} and "
                    "thus not sent; put it there, or make a uv workspace of both"
                )

    @property
    def key(self) -> str:
        """A hash of this computer, its user and the root's path, which tells projects of one name apart."""
        place = f"{host_name()}\0{os.getuid()}\0".encode() + os.fsencode(self.root)
        return hashlib.sha256(place).hexdigest()[:8]

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The variables that tell build tools the version which they would ask git for, as nodes get no .git."""
        said = pyproject(self.root)
        required = [
            re.split(r"[^\w.-]", each.strip().lower(), maxsplit=1)[0].replace("_", "-") for each in _required(said)
        ]
        names = {_VERSIONED[each] for each in required if each in _VERSIONED}
        named = re.sub(r"[-_.]+", "_", _text(said.get("project", {}), "name")).upper()
        if named and "setuptools-scm" in required:  # a dependency may ask git for its version, too
            names.remove(_VERSIONED["setuptools-scm"])
            names.add(f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{named}")
        project = said.get("project", {})
        if not names or not isinstance(project, dict) or "version" in project:
            return {}
        version = _described(self.root)
        return dict.fromkeys(sorted(names), version) if version else {}


class Unsent:
    """Tells which files of a project are not sent, as `entries.walk` asks.

    These are secrets, caches, and what git ignores: in a checkout git itself is asked, so that a tracked file is sent
    though a pattern of `.gitignore` matches it. Elsewhere, or without git, that file decides. What `.skypoolignore`
    names is never sent.

    Args:
        root: the root of the project.
        include: paths below the root that are sent in any case. Of a folder, what may hold secrets is not sent.
        state: folders of skypool itself, which are never sent.

    Attributes:
        told: why each file or folder was left out, by its path: those that hold secrets, and those that are ignored.
    """

    def __init__(self, root: Path, include: Collection[str] = (), state: Sequence[Path] = ()) -> None:
        self._folder = str(root)
        self._include = {os.path.normpath(each).replace(os.sep, "/") for each in include}
        for each in self._include:
            if each == "." or each.startswith(("/", "../")) or each == "..":
                raise UsageError(f"a path that is included must lie below {root}, not {each!r}")
        self._above = {path.rpartition("/")[0] for path in self._with_parents(self._include)}
        self._state = [os.path.realpath(each) for each in state]
        self._listed = None if _is_ignored_by_git(root) else listed_by_git(root)
        self._ignored = Ignored(str(root), NAMES if self._listed is None else (OURS,))
        self.told: dict[str, str] = {}
        for each in self._include:
            if not os.path.lexists(root / each):
                raise UsageError(f"there is no {each!r} in the project {root}; correct what is included")

    @staticmethod
    def _with_parents(paths: Collection[str]) -> set[str]:
        return {"/".join(path.split("/")[: n + 1]) for path in paths for n in range(path.count("/") + 1)}

    def __call__(self, path: str, is_folder: bool) -> bool:
        """Return True if a path below the root is not sent."""
        if path in self._include:
            return False
        asked = self._included_above(path)  # inside, what is ignored is sent; secrets are if the folder is one of these
        below = path[len(asked) + 1 :] if asked else path
        whole = f"{self._folder}/{path}"
        if is_folder and os.path.realpath(whole) in self._state:
            return True
        names = below.split("/")
        is_on_the_way = is_folder and path in self._above
        if not is_on_the_way and (
            any(map(is_cache, names)) or (is_folder and os.path.exists(os.path.join(whole, "pyvenv.cfg")))
        ):
            return True
        secret, unreadable = _looked_into(whole)
        if asked and any(map(why_secret, asked.split("/"))):
            secret = ""
        else:
            secret = next(filter(None, map(why_secret, names)), "") or secret
        ignored = not secret and not asked and self._left_out(path, is_folder)
        why = secret or ("it is ignored" if ignored else unreadable)
        if why and is_on_the_way:
            return False
        if why:
            self.told[path] = why
        return bool(why)

    def _included_above(self, path: str) -> str:
        """Return the folder that is sent in any case and that a path is in; "" if there is none."""
        if not self._include:
            return ""
        parts = path.split("/")
        above = ("/".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        return next((each for each in above if each in self._include), "")

    def _left_out(self, path: str, is_folder: bool) -> bool:
        return self._ignored(path, is_folder) or (self._listed is not None and path not in self._listed)


@dataclass(frozen=True)
class Survey:
    """A look at a project: what would be sent of it.

    Attributes:
        at: when the look ended, by `time.monotonic`.
        entries: what is sent, as `walk` yields it.
        paths: the files and links among it.
        bytes: the size of the files.
        largest: the folders below the root with most bytes, as (path, bytes).
        unsent: why files and folders are not sent, by path.
        links_out: the targets of links that lead out of the project or are absolute, by path. They are sent as links.
    """

    at: float
    entries: Sequence[Entry]
    paths: frozenset[str]
    bytes: int
    largest: Sequence[tuple[str, int]]
    unsent: Mapping[str, str]
    links_out: Mapping[str, str]

    @property
    def excess(self) -> str:
        """Tell how large the project is if it is too large to be sent unasked; "" if it is not."""
        if self.bytes <= _MOST_BYTES and len(self.paths) <= _MOST_FILES:
            return ""
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        largest = ", ".join(f"{each or '.'} ({decimal(size)})" for each, size in self.largest)
        return f"the project has {len(self.paths):,} files, {decimal(self.bytes)}; the largest folders: {largest}"


def surveyed(project: Project, include: Collection[str] = ()) -> Survey:
    """Look at what would be sent of a project. Raises UsageError if `include` names what is not there."""
    unsent = unsent_of(project, include)
    sizes: Counter[str] = Counter()
    links_out: dict[str, str] = {}
    root = os.path.realpath(project.root)
    entries = [*walk(str(project.root), unsent)]
    for each in entries:
        if each.kind == "l":
            leads_to = Path(os.path.realpath(os.path.join(root, each.path)))
            if os.path.isabs(each.text) or not leads_to.is_relative_to(root):
                links_out[each.path] = each.text
        if each.kind == "f":
            sizes[each.path.partition("/")[0] if "/" in each.path else ""] += each.size
    paths = frozenset(each.path for each in entries if each.kind != "d")
    return Survey(time.monotonic(), entries, paths, sizes.total(), sizes.most_common(5), unsent.told, links_out)


def unsent_of(project: Project, include: Collection[str] = ()) -> Unsent:
    """Return what tells which files of a project are not sent."""
    # git may ignore them, and yet the environment is made from them
    needed = [each for each in _NEEDED if project.source in _NEEDED and (project.root / each).is_file()]
    return Unsent(project.root, [*include, *needed], [user_folders.state(), user_folders.cache()])


def listed_by_git(root: Path) -> set[str] | None:
    """Return the paths below a folder that git tracks or would track, and their folders; None without git or checkout.

    Raises UsageError if git fails for another reason.
    """
    done = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if done is None:
        return None
    if done.returncode:
        if b"not a git repository" in done.stderr:
            return None
        raise UsageError(f"git cannot list the files of {root}: {os.fsdecode(done.stderr).strip()}")
    found: set[str] = set()
    for each in filter(None, done.stdout.split(b"\0")):
        path = os.fsdecode(each).rstrip("/")
        inner = root / path
        if (inner / ".git").exists() and not inner.is_symlink():  # a submodule, or a checkout in this one
            found.update(f"{path}/{below}" for below in listed_by_git(inner) or ())
        found.add(path)
    for path in [*found]:
        while path := path.rpartition("/")[0]:
            if path in found:
                break
            found.add(path)
    return found


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    """Run git, and return what it said; None without git. It starts no program that the checkout names."""
    argv = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    try:
        return subprocess.run(argv, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except OSError:
        return None


def _is_ignored_by_git(root: Path) -> bool:
    """Return True if a folder is in a checkout that leaves it out, so that git lists nothing of it."""
    done = _git(root, "check-ignore", "--quiet", ".")
    return done is not None and done.returncode == 0


def _looked_into(path: str) -> tuple[str, str]:
    """Return why the contents of a file may hold secrets, and why a file or folder cannot be sent; "" for neither."""
    try:
        about = os.lstat(path)
    except OSError:
        return "", "it is gone again"
    if stat.S_ISREG(about.st_mode):
        return _read_of(path, about.st_size, about.st_ino, about.st_ctime_ns)
    if stat.S_ISDIR(about.st_mode):
        return "", "" if os.access(path, os.R_OK | os.X_OK) else "it cannot be read"
    return "", "" if stat.S_ISLNK(about.st_mode) else "it is no file, folder or link"


@lru_cache(maxsize=20_000)  # a run may look at its project twice
def _read_of(path: str, size: int, *state: int) -> tuple[str, str]:
    """Return what `_looked_into` does, of a file of this size that is in this state."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            begin = os.read(file, READ)
            while len(begin) < min(size, READ) and (more := os.read(file, READ - len(begin))):
                begin += more
            return why_secret_inside(begin), ""
        finally:
            os.close(file)
    except PermissionError:
        return "", "it cannot be read"
    except OSError:
        return "", ""  # it is gone again, as the transfer will tell


def _root(start: Path) -> Path:
    """Return the nearest folder with one of `_MARKS`, or `start`. A member of a workspace has the workspace's root."""
    home = Path(os.path.realpath(os.path.expanduser("~")))
    found = None
    for folder in (start, *start.parents):
        if Path(os.path.realpath(folder)) in (home, *home.parents) and folder != start:
            break
        if found is None and any((folder / each).exists() for each in _MARKS):
            found = folder
        if found is not None and found != folder and _is_member(found, folder):
            return folder
    return found or start


def _is_member(folder: Path, root: Path) -> bool:
    """Return True if a folder is a member of the uv workspace at a root."""
    workspace = table(uv_table(pyproject(root)).get("workspace"))

    def names(key: str) -> bool:
        said = workspace.get(key, [])
        patterns = [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
        return any(folder in root.glob(each) for each in patterns if each and not each.startswith("/"))

    return (folder / "pyproject.toml").is_file() and names("members") and not names("exclude")


def _header(script: Path) -> dict[str, Any] | None:
    """Return the metadata of a script; None if it has none."""
    found = list(_HEADER.finditer(script.read_text("utf-8", "surrogateescape")))
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(f"{script} has {len(found)} blocks `# /// script`; leave one")
    lines = found[0]["text"].splitlines()
    return toml("\n".join(each[2:] if each.startswith("# ") else each[1:] for each in lines), script)


def _texts(said: object, key: str, where: object) -> list[str]:
    """Return a list of texts. Raises UsageError if it is something else."""
    value = said.get(key, []) if isinstance(said, dict) else []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{where}: {key} must be a list of texts, not {value!r}")
    return value


def _text(said: object, key: str) -> str:
    value = said.get(key, "") if isinstance(said, dict) else ""
    return value if isinstance(value, str) else ""


def _pinned(root: Path) -> str:
    """Return the version that .python-version names, as uv and pyenv read it; "" for none."""
    path = root / ".python-version"
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    first = next((each.strip() for each in lines if each.strip() and not each.startswith("#")), "")
    found = re.fullmatch(r"(?:cpython-?)?(3\.\d+)(\.\d+)?", first)  # other names are those of environments here
    if found is None:
        return ""
    return f"=={found[1]}{found[2]}" if found[2] else f"=={found[1]}.*"


def _required(said: Mapping[str, Any]) -> list[str]:
    """Return what the build of a project requires."""
    return _texts(said.get("build-system", {}), "requires", "pyproject.toml")


def _described(root: Path) -> str:
    """Return the version of a checkout, as setuptools-scm would guess it; "" if git cannot tell."""
    # to compare files, git would start the filters that the checkout names
    listed = _git(root, "config", "--local", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
    filters = [] if listed is None else listed.stdout.decode(errors="surrogateescape").split("\n")[:-1]
    without = [word for each in filters for word in ("-c", f"{each}=")]
    done = _git(root, *without, "describe", "--tags", "--long", "--dirty", "--match", "*[0-9]*")
    said = "" if done is None else done.stdout.decode(errors="replace").strip()
    found = re.fullmatch(r"(?:.*[^\d.])??v?(\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?)\S*?-(\d+)-g([0-9a-f]+)(-dirty)?", said)
    if found is None:
        return _undescribed(root)
    release, distance, commit, dirty = found.groups()
    if distance == "0" and not dirty:
        return release
    last = re.search(r"\d+$", release)
    assert last is not None
    return f"{release[: last.start()]}{int(last[0]) + 1}.dev{distance}+g{commit}"


def _undescribed(root: Path) -> str:
    """Return the version of a checkout without tags; "" if there is no commit."""
    said = [_git(root, *words) for words in (("rev-list", "--count", "HEAD"), ("rev-parse", "--short", "HEAD"))]
    texts = [each.stdout.decode(errors="replace").strip() for each in said if each is not None and not each.returncode]
    return f"0.1.dev{texts[0]}+g{texts[1]}" if len(texts) == 2 else ""
