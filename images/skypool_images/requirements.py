"""Determines the packages to install in a node's Python environment, from the image and from local files.

The local files are requirements.txt, pyproject.toml and uv.lock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from skypool_images import mirror
from skypool_images.errors import ImageError
from skypool_images.field_checks import Spec, distribution, public, requirement
from skypool_images.recipes import Packages

_BUILDS = re.compile(
    r"(PIP_|UV_|CMAKE).*|CC|CXX|.*FLAGS|.*_PROXY|MAX_JOBS|TORCH_CUDA_ARCH_LIST|CUDA_HOME", re.IGNORECASE
)
_NAME = re.compile(r"([A-Za-z0-9._-]*[A-Za-z0-9])\s*(\[)?")
_CLAUSE = re.compile(r"(>=|>|<=|<|==|~=|!=)\s*(\d+)\.(\d+)((?:\.[\d*]+)*)")
TORCH = "https://download.pytorch.org/whl/"
"""Index of PyTorch's builds for each accelerator. uv takes only PyTorch and its parts from this index."""

_OPTIONS = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--pre", "--no-binary", "--only-binary")
_MORE_OPTIONS = ("--prefer-binary", "--require-hashes", "--trusted-host", "--no-index")


@dataclass(frozen=True, slots=True)
class WantedPackages:
    """The packages to install in a node's Python environment. `bool()` is False if nothing is to be installed.

    Attributes:
        named: requirements with the name of a package, for a pyproject.toml that skypool generates.
        lines: lines as in a requirements.txt, including options of pip.
        constraints: lines that only restrict the versions of packages, as in a constraints file of pip.
        sources: pairs of a package's name and the URL of the only index from which it is taken.
        project: text of the user's pyproject.toml, "" if there is none.
        lock: text of the project's uv.lock, "" if there is none.
        build_env: pairs of name and value of the environment variables that builds and installers read.
        indexes: URLs of further package indexes beside PyPI.
        links: URLs of pages with wheels, for `--find-links`.
        torch: name of PyTorch's builds for the accelerator on PyTorch's index, such as "rocm6.4"; "" for the default.
        notes: texts about packages that are left out, with the reasons.
    """

    named: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    project: str = ""
    lock: str = ""
    build_env: tuple[tuple[str, str], ...] = ()
    indexes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    torch: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.named or self.lines or self.project)

    def key(self, *more: object) -> str:
        """Return the name of the folder of this environment on a node: 12 hexadecimal digits of a hash.

        The hash covers all fields except `notes`, and `more`: further JSON values on which the environment depends,
        such as the version of Python.
        """
        parts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "notes"}
        return hashlib.sha256(json.dumps([parts, more], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def dependencies(self) -> list[str]:
        """Return the dependencies that the user's pyproject.toml lists, in order, without optional ones."""
        if not self.project:
            return []
        return list(_toml(self.project, "pyproject: the file")["project"].get("dependencies", []))

    @property
    def distributions(self) -> list[str]:
        """Return the sorted names of the packages that must be installed in a complete environment.

        Requirements with a marker (a condition after ";") are left out, because they may not apply to the node. So are
        URLs without the name of a package.
        """
        asked = [*self.named, *(each for each in self.lines if not each.startswith("-")), *self.dependencies]
        names = (distribution(each) for each in asked if ";" not in each)
        return sorted({name for name in names if name})


def wanted(spec: Spec, packages: Packages, minor: str) -> WantedPackages:
    """Return everything that an image asks to install. Local files, such as requirements.txt, are read now.

    `packages` are pip's settings for the node's runtime. `minor` is the version of Python on the node, such as "3.11".

    Raises:
        ImageError: a local file cannot be read, or contains something that does not work on a node.
    """
    folder = Path(spec.folder)
    named = list(spec.pip)
    notes: list[str] = []
    if spec.mirror_local:
        mirrored, notes = mirror.here({distribution(each) for each in spec.pip})
        named += mirrored
    sources = {}
    for url, taken in spec.pip_indexes:
        for each in taken:
            sources[distribution(each)] = url
            if distribution(each) != each or each not in map(distribution, named):
                named.append(each)
    lines: list[str] = []
    constraints: list[str] = []
    if spec.requirements is not None:
        for kind, line in _read(folder / spec.requirements, ()):
            (constraints if kind == "constraint" else lines).append(line)
    project, lock = _project(spec, folder, minor)
    _agree(sources, lock)
    return WantedPackages(
        named=tuple(_fitting(each, packages) for each in named if not _is_url(each)),
        lines=(*lines, *(each for each in named if _is_url(each))),
        constraints=tuple(constraints),
        sources=tuple(sorted(sources.items())),
        project=project,
        lock=lock,
        build_env=tuple(pair for pair in spec.env if _BUILDS.fullmatch(pair[0])),
        indexes=tuple(url for url in packages.indexes if not url.startswith(TORCH)),
        links=packages.links,
        torch=""
        if "torch" in sources
        else next((u[len(TORCH) :] for u in packages.indexes if u.startswith(TORCH)), ""),
        notes=tuple(notes),
    )


def _fitting(line: str, packages: Packages) -> str:
    """Return a requirement, with the extra that the accelerator needs, if any: "jax[tpu]==0.5" for "jax==0.5"."""
    found = _NAME.match(line)
    instead = packages.instead.get(distribution(line))
    return line if not found or not instead or found[2] else instead + line[found.end() :]


def _is_url(line: str) -> bool:
    return distribution(line) == ""


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text("utf-8-sig")  # editors of Windows put a mark at the beginning
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{field}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _project(spec: Spec, folder: Path, minor: str) -> tuple[str, str]:
    """Return the texts of the user's pyproject.toml and uv.lock, "" if missing. Raise ImageError for unusable ones."""
    if spec.pyproject is None:
        return "", ""
    path = folder / spec.pyproject
    if path.suffix != ".toml":
        path /= "pyproject.toml"
    text = _text(path, "pyproject")
    lock_path = path.with_name("uv.lock") if spec.lock is None else folder / spec.lock
    lock = _text(lock_path, "lock") if spec.lock is not None or lock_path.exists() else ""
    listed = _toml(text, f"pyproject: {path}")
    project = listed.get("project", {})
    if not isinstance(project, dict) or "name" not in project:
        raise ImageError(
            f"pyproject: {path} has no table [project] with a name: add one that lists the dependencies, or use pip="
        )
    if "dependencies" in project.get("dynamic", ()) and not lock:
        raise ImageError(
            f"pyproject: the dependencies of {path} are dynamic, and a node does not build the project to find them; "
            f"list the dependencies in [project], lock them with `uv lock`, or use requirements="
        )
    if not admits(str(project.get("requires-python", "")), minor):
        raise ImageError(
            f"pyproject: {path} requires Python {project['requires-python']}, but nodes run the client's "
            f"Python {minor}; change requires-python, or run the client with another Python"
        )
    _elsewhere(path, project, listed.get("tool", {}).get("uv", {}).get("sources", {}))
    return text, lock


def _toml(text: str, what: str) -> dict[str, Any]:
    import tomllib  # imported here because most images have no pyproject.toml

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ImageError(f"{what} is not valid TOML: {error}") from error


def _elsewhere(path: Path, project: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
    """Raise ImageError if [tool.uv.sources] takes a dependency without a marker from a local path or workspace."""
    by_name = {distribution(name): source for name, source in sources.items()}
    for name in (distribution(each) for each in project.get("dependencies", ()) if ";" not in each):
        source = by_name.get(name, {})
        if isinstance(source, Mapping) and ("path" in source or source.get("workspace")):
            raise ImageError(
                f"pyproject: {path} takes {name} from this machine ([tool.uv.sources]), but the files of {name} "
                "are not sent. Instead of pyproject=, list the dependencies of both projects in pip=. Your own "
                "modules are sent with the calls that use them"
            )


def _agree(sources: Mapping[str, str], lock: str) -> None:
    """Raise ImageError if `pip_indexes` names another index for a package than the text of uv.lock does."""
    for package in _toml(lock, "lock: uv.lock").get("package", []) if sources else []:
        url = sources.get(package["name"])
        locked = package.get("source", {}).get("registry")
        if url is not None and url.rstrip("/") != str(locked).rstrip("/"):
            raise ImageError(
                f"pip_indexes takes {package['name']} from {url}, and uv.lock from {locked or 'no index'}: "
                f"either leave {package['name']} out of pip_indexes, or name its index in "
                "[tool.uv.sources] and run `uv lock`"
            )


def admits(asked: str, minor: str) -> bool:
    """Return True if some release of a minor version of Python satisfies a condition on Python's version.

    `asked` is the condition: the value of `requires-python` in pyproject.toml, such as ">=3.10,<3.13". "" admits every
    version. Parts that this function does not understand are ignored. `minor` is a version such as "3.11".
    """
    mine = tuple(map(int, minor.split(".")))
    for clause in asked.split(","):
        found = _CLAUSE.fullmatch(clause.strip())
        if found is None:
            continue
        bound = (int(found[2]), int(found[3]))
        rest = found[4]
        below = mine < bound or (mine == bound and bool(rest.strip(".0")))
        is_met = {
            ">=": mine >= bound,
            ">": mine >= bound,
            "<=": mine <= bound,
            "<": below,
            "==": mine == bound,
            "~=": mine == bound if rest else mine >= bound and mine[0] == bound[0],
            "!=": mine != bound or rest != ".*",
        }
        if not is_met[found[1]]:
            return False
    return True


def _read(path: Path, within: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield ("requirement" or "constraint", line) of a requirements file and of those it includes, in order."""
    within = (*within, path.resolve())
    joined = re.sub(r"\\\r?\n", " ", _text(path, "requirements"))
    for number, raw in enumerate(joined.splitlines(), 1):
        line = re.sub(r"(^|\s+)#.*$", "", raw).strip()
        if not line:
            continue
        option, _, value = line.replace("=", " ", 1).partition(" ") if line.startswith("--") else line.partition(" ")
        value = value.strip()
        if option in ("-r", "--requirement", "-c", "--constraint"):
            other = path.parent / value
            if other.resolve() in within:
                raise ImageError(
                    f"requirements: {path}, line {number} includes {other}, which in turn includes {path}: "
                    "remove one of the two lines"
                )
            for kind, inner in _read(other, within):
                # all lines of a file that is included with -c are constraints
                yield "constraint" if option in ("-c", "--constraint") else kind, inner
        elif option in (*_OPTIONS, *_MORE_OPTIONS):
            yield "requirement", _option(line, option, value, f"requirements: {path}, line {number}")
        elif line.startswith("-"):
            raise ImageError(
                f"requirements: {path}, line {number}: nodes do not support the option {line!r}; remove this line"
            )
        else:
            yield "requirement", _line(line, f"requirements: {path}, line {number}")


def _option(line: str, option: str, value: str, where: str) -> str:
    """Return the line of a pip option. Raise ImageError, naming `where`, if its URL is local or has a password."""
    if option in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links"):
        public(where, value)
        if "://" not in value or value.startswith("file:"):
            raise ImageError(f"{where}: {value!r} exists only on this machine; use an address that nodes can reach")
    return line


def _line(line: str, where: str) -> str:
    """Return a requirement, perhaps with hashes. Raise ImageError, naming `where`, if a node cannot install it."""
    asked, dashes, options = line.partition(" --")
    return requirement(where, asked.strip()) + (f" --{options}" if dashes else "")
