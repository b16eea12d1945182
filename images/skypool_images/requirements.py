"""What is to be installed, read from local files when a script is made."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from skypool_images import mirror
from skypool_images.errors import ImageError
from skypool_images.recipes import Packages
from skypool_images.spec import Spec, distribution, public, requirement

_BUILDS = re.compile(
    r"(PIP_|UV_|CMAKE).*|CC|CXX|.*FLAGS|.*_PROXY|MAX_JOBS|TORCH_CUDA_ARCH_LIST|CUDA_HOME", re.IGNORECASE
)
_NAME = re.compile(r"([A-Za-z0-9._-]*[A-Za-z0-9])\s*(\[)?")
_CLAUSE = re.compile(r"(>=|>|<=|<|==|~=|!=)\s*(\d+)\.(\d+)((?:\.[\d*]+)*)")
TORCH = "https://download.pytorch.org/whl/"
"""Where builds of PyTorch are, by accelerator: uv takes all of its parts from there, and nothing else."""

_OPTIONS = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--pre", "--no-binary", "--only-binary")
_MORE_OPTIONS = ("--prefer-binary", "--require-hashes", "--trusted-host", "--no-index")


@dataclass(frozen=True, slots=True)
class WantedPackages:
    """What an environment holds.

    Attributes:
        named: requirements by name, for a pyproject.toml of ours.
        lines: of a requirements.txt, with options of pip among them.
        constraints: lines that restrict versions and install nothing.
        sources: distribution -> index it is taken from only.
        project: the user's pyproject.toml; lock is its uv.lock.
        build_env: variables that builds and installers read.
        indexes: to look in beside PyPI; links: pages with wheels.
        torch: which builds of PyTorch fit the accelerator, as their index calls them, such as "rocm6.4".
        notes: what is left out and why.
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
        """Names the environment on a node by all that decides what is in it."""
        parts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "notes"}
        return hashlib.sha256(json.dumps([parts, more], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def dependencies(self) -> list[str]:
        """Of the user's project."""
        return list(tomllib.loads(self.project)["project"].get("dependencies", [])) if self.project else []

    @property
    def distributions(self) -> list[str]:
        """Names that must be there afterwards; what has a marker may rightly not be."""
        asked = [*self.named, *(each for each in self.lines if not each.startswith("-")), *self.dependencies]
        names = (distribution(each) for each in asked if ";" not in each)
        return sorted({name for name in names if name})


def wanted(spec: Spec, packages: Packages, minor: str) -> WantedPackages:
    """All that `spec` asks to be installed, for a minor version of Python, on an accelerator that needs `packages`.

    Raises:
        ImageError: a local file that is not there, or that says what no node can do.
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
    """A requirement without extras, as it is written where there is an accelerator: "jax==0.5" is "jax[tpu]==0.5"."""
    found = _NAME.match(line)
    instead = packages.instead.get(distribution(line))
    return line if not found or not instead or found[2] else instead + line[found.end() :]


def _is_url(line: str) -> bool:
    return distribution(line) == ""


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{field}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _project(spec: Spec, folder: Path, minor: str) -> tuple[str, str]:
    """The texts of pyproject.toml and, where there is one, uv.lock."""
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
        raise ImageError(f"pyproject: {path} has no [project] with a name, so nothing says what it depends on")
    if "dependencies" in project.get("dynamic", ()) and not lock:
        raise ImageError(
            f"pyproject: the dependencies of {path} are dynamic, so only its build could say them, and a node does not "
            f"build it: write them into [project], lock them with `uv lock`, or give requirements="
        )
    if not admits(str(project.get("requires-python", "")), minor):
        raise ImageError(
            f"pyproject: {path} requires Python {project['requires-python']}, and nodes have this client's, {minor}"
        )
    _elsewhere(path, project, listed.get("tool", {}).get("uv", {}).get("sources", {}))
    return text, lock


def _toml(text: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ImageError(f"{what} is no TOML: {error}") from error


def _elsewhere(path: Path, project: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
    """Refuse a dependency that only this machine has."""
    by_name = {distribution(name): source for name, source in sources.items()}
    for name in (distribution(each) for each in project.get("dependencies", ()) if ";" not in each):
        source = by_name.get(name, {})
        if isinstance(source, Mapping) and ("path" in source or source.get("workspace")):
            raise ImageError(
                f"pyproject: {path} takes {name} from this machine ([tool.uv.sources]), and only that file is sent; "
                f"list what it and {name} depend on in pip=: modules of your own are sent with the calls that use them"
            )


def _agree(sources: Mapping[str, str], lock: str) -> None:
    """Refuse an index for what uv.lock takes from another one."""
    for package in _toml(lock, "lock: uv.lock").get("package", []) if sources else []:
        url = sources.get(package["name"])
        locked = package.get("source", {}).get("registry")
        if url is not None and url.rstrip("/") != str(locked).rstrip("/"):
            raise ImageError(
                f"pip_indexes takes {package['name']} from {url}, and uv.lock from {locked or 'elsewhere'}: leave it "
                f"out of pip_indexes, or name its index in [tool.uv.sources] and run `uv lock`"
            )


def admits(asked: str, minor: str) -> bool:
    """Whether a `requires-python` may be met by some release of a minor version; what it cannot read, it admits."""
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
    """(kind, line) of a requirements file and of the files it names; kind is "requirement" or "constraint"."""
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
                raise ImageError(f"requirements: {path}, line {number} includes {other}, which includes it")
            for kind, inner in _read(other, within):
                yield "constraint" if option in ("-c", "--constraint") else kind, inner
        elif option in (*_OPTIONS, *_MORE_OPTIONS):
            yield "requirement", _option(line, option, value, f"requirements: {path}, line {number}")
        elif line.startswith("-"):
            raise ImageError(f"requirements: {path}, line {number}: {line!r} cannot be done on a node")
        else:
            yield "requirement", _line(line, f"requirements: {path}, line {number}")


def _option(line: str, option: str, value: str, where: str) -> str:
    """An option of pip that a node can follow."""
    if option in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links"):
        public(where, value)
        if "://" not in value or value.startswith("file:"):
            raise ImageError(f"{where}: {value!r} is on this machine only")
    return line


def _line(line: str, where: str) -> str:
    """A requirement, with the hashes that stand after it."""
    asked, dashes, options = line.partition(" --")
    return requirement(where, asked.strip()) + (f" --{options}" if dashes else "")
