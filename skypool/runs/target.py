"""`Target`: what is run, as words of a command line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skypool.errors import UsageError, nearest
from skypool.files.project import Project


@dataclass(frozen=True)
class Target:
    """A program and its project.

    Attributes:
        project: the project.
        words: the program and its arguments. "python" stands for the Python of the project.
        folder: the folder below the project's root in which the program starts; "." for the root.
        name: a short name.
        script: the path of the script below the project's root; "" for a module or a command.
    """

    project: Project
    words: tuple[str, ...]
    folder: str
    name: str
    script: str = ""

    @classmethod
    def of(cls, words: Sequence[str], here: str | os.PathLike[str] = ".") -> Target:
        """Return the target that words of a command line name, as `uv run` reads them.

        A path that ends with ".py" is a script; "-m" and a module's name are a module; all else is a command. `here` is
        the current folder.

        Raises:
            UsageError: there is no word, no such script, or no name after "-m".
        """
        folder = Path(os.path.abspath(here))
        if not words or not words[0]:
            raise UsageError("name what to run: a script such as train.py, -m MODULE, or a command")
        first, *rest = words
        if first == "-m":
            if not rest:
                raise UsageError("-m takes the name of a module: -m package.train")
            if rest[0].endswith(".py"):
                module = rest[0][:-3].replace("/", ".").removeprefix("src.")
                raise UsageError(f"-m takes the name of a module: did you mean -m {module}, or the script {rest[0]}?")
            _check_module(rest[0], folder)
            project = Project.of(folder)
            return cls(
                project, ("python", "-m", *rest), _below(project.root, folder) or ".", rest[0].rpartition(".")[2]
            )
        if first.startswith("-"):
            raise UsageError(
                f"there is no option {first}; `skypool run --help` lists them. Those of the program follow it"
            )
        if not first.endswith(".py"):
            if shutil.which(first) is None and (folder / f"{first}.py").is_file():
                raise UsageError(f"there is no command {first} here; did you mean {first}.py?")
            if first.endswith(".sh") and not (folder / first).is_file():
                raise UsageError(f"there is no script {first} in {folder}")
            project = Project.of(folder)
            return cls(project, tuple(words), _below(project.root, folder) or ".", Path(first).name)
        script = folder / os.path.expanduser(first)
        if not script.is_file():
            close = nearest(first, [each.name for each in folder.glob("*.py")])
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(f"there is no script {first} in {folder}{hint}")
        project = Project.of(script)
        others = ("pyproject.toml", "setup.py", ".git")
        if project.source == "requirements.txt" and not any((project.root / each).exists() for each in others):
            # it is often that of the documentation, or of examples
            with suppress(UsageError):  # the current folder is no project, as the home folder
                outer = Project.of(folder)
                if outer.source and project.root.is_relative_to(outer.root):
                    project = outer
        start = _below(project.root, folder) or _below(project.root, script.parent) or "."
        path = os.path.relpath(os.path.abspath(script), project.root / start)
        path = f"./{path}" if path.startswith("-") else path  # which Python would take for an option
        below = os.path.relpath(os.path.abspath(script), project.root)
        return cls(project, ("python", path, *rest), start, script.stem, below)


def _check_module(name: str, folder: Path) -> None:
    """Raise UsageError if a package in this folder, or in `src` below, does not have the module."""
    *packages, last = parts = name.split(".")
    if not packages or not all(map(str.isidentifier, parts)):
        return
    if not (folder / packages[0]).exists() and (folder / "src" / packages[0]).is_dir():
        folder /= "src"
    init, place = folder / packages[0] / "__init__.py", folder.joinpath(*packages)
    if not init.is_file() or b"__path__" in init.read_bytes():  # what lies elsewhere may be in it, too
        return
    if (place / last).is_dir() or any(place.glob(f"{last}.*")):
        return
    close = [".".join([*packages, each]) for each in nearest(last, [each.stem for each in place.glob("*.py")])]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(f"there is no module {name} in {folder}{hint}")


def _below(root: Path, folder: Path) -> str:
    """Return the path of a folder below a root; "" if it is not there."""
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else ""
