"""Looks at the project that an image names: which files are sent, and how its packages are installed."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from skypool.errors import UsageError
from skypool.files.project import Project, surveyed
from skypool.files.project_files import from_elsewhere, local_packages, pip_arguments, pyproject, table, uv_table
from skypool_images import Image
from skypool_images.requirements import admits
from skypool_images.sent_project import SentProject

_NAMED = ("pyproject.toml", "uv.lock", "setup.py", "setup.cfg")
"""The files from which an environment is made, besides those with "requirements" in their names."""


def sent_project(image: Image) -> SentProject | None:
    """Return the project of an image; None if it names none. Its files are read, but for those that are only sent.

    Raises:
        UsageError: there is no such project, it is too large to be sent unasked, or it cannot be installed on nodes.
    """
    spec = image.spec
    if spec.project is None:
        return None
    project = Project.of(Path(spec.folder, os.path.expanduser(spec.project)))
    project.check_paths()
    said = pyproject(project.root)
    asked = project.python if project.source == "script" else table(said.get("project")).get("requires-python", "")
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not admits(str(asked), minor):
        raise UsageError(
            f"the project {project.root} requires Python {asked}, but functions run with the client's {minor}; run the "
            "client with such a Python, or the project's program with `skypool run`"
        )
    survey = surveyed(project)
    if survey.excess:
        raise UsageError(f"{survey.excess}; leave out what is not needed in .skypoolignore, or use `pool.push`")
    if not survey.paths:
        raise UsageError(f"the project {project.root} has no file to send")
    install, packages, only_uv = _installation(project)
    paths = tuple(sorted(survey.paths))
    return SentProject(
        project.root, paths, install, packages, only_uv, tuple(project.versions.items()), _content(project, paths)
    )


def _installation(project: Project) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the fields `install`, `packages` and `only_uv` of a project."""
    root, source = project.root, project.source
    if source in ("script", ""):
        return (), project.packages, ""
    if source == "uv.lock":
        members = ("--all-packages",) if "workspace" in uv_table(pyproject(root)) else ()
        return ("sync", "--frozen", *members), (), "uv.lock"
    words, told = pip_arguments(root, source), from_elsewhere(root) if source == "pyproject.toml" else []
    only_uv = f"[tool.uv] {', '.join(told)}" if told else ""
    if source == "pyproject.toml" and "-e" not in words:  # its requirements alone
        return (("pip", "install", "-r", source), (), only_uv) if told else ((), tuple(words), "")
    return ("pip", "install", *words), (), only_uv


def _content(project: Project, paths: Iterable[str]) -> str:
    """Return a hash of what the environment of a project is made from."""
    copied = [each.place for each in local_packages(project.root, project.source) if each.is_copied]
    folders = tuple(os.path.normpath(each) + os.sep for each in copied)  # the environment has a copy of these
    made = hashlib.sha256()
    for path in paths:
        name = os.path.basename(path)
        if name in _NAMED or "requirements" in name or path.startswith(folders):
            with open(project.root / path, "rb") as file:
                made.update(f"{path}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode(errors="replace"))
    return made.hexdigest()
