"""`Target`: what is run, as words of a command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    """

    project: Project
    words: tuple[str, ...]
    folder: str
    name: str

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
            project = Project.of(folder)
            return cls(
                project, ("python", "-m", *rest), _below(project.root, folder) or ".", rest[0].rpartition(".")[2]
            )
        if not first.endswith(".py"):
            project = Project.of(folder)
            return cls(project, tuple(words), _below(project.root, folder) or ".", Path(first).name)
        script = folder / os.path.expanduser(first)
        if not script.is_file():
            close = nearest(first, [each.name for each in folder.glob("*.py")])
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(f"there is no script {first} in {folder}{hint}")
        project = Project.of(script)
        start = _below(project.root, folder) or _below(project.root, script.parent) or "."
        path = os.path.relpath(os.path.abspath(script), project.root / start)
        return cls(project, ("python", path, *rest), start, script.stem)


def _below(root: Path, folder: Path) -> str:
    """Return the path of a folder below a root; "" if it is not there."""
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else ""
