"""Compares the versions of packages on a pool's nodes with those of this process.

Objects of a library often cannot be unpickled, or behave differently, with another version of that library.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import skypool as sky

_PIN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*===?\s*([^\s,;*]+)\s*(?:$|[;#\s])")
"""A requirement that allows one version only, such as "joblib==1.5.2"."""
_MODULES = {"cloudpickle": "cloudpickle"}
"""The module of a package that skypool brings to nodes itself, so that nodes have no metadata of it."""


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed for this process, by their names on PyPI."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            module = _MODULES.get(package)
            found[package] = importlib.import_module(module).__version__ if module else metadata.version(package)
        except (ImportError, metadata.PackageNotFoundError):
            continue  # a package that is not installed has no entry
    return found


def check_image(image: sky.Image, packages: Sequence[str]) -> None:
    """Raise a UsageError if an image pins a package to another version than this process has.

    The fields `pip` and `requirements` are read. Packages that are not installed here are not compared.
    """
    here = versions(packages)
    lines = list(image.spec.pip)
    if image.spec.requirements is not None:
        file = Path(image.spec.folder) / image.spec.requirements
        lines += file.read_text().splitlines() if file.is_file() else []
    for line in lines:
        pin = _PIN.match(line)
        name = re.sub(r"[-_.]+", "-", pin[1]).lower() if pin else ""
        if pin and name in here and pin[2] != here[name]:
            raise sky.UsageError(
                f"the image of the pool has {name} {pin[2]}, but this process has {here[name]}; the versions must be "
                f'equal: change the image to "{name}=={here[name]}", or install {name} {pin[2]} here'
            )


def check_nodes(pool: sky.ComputePool, packages: Sequence[str], nodes: Sequence[int]) -> None:
    """Call nodes of a pool, and raise a UsageError if a package has another version there than here.

    The first package must be installed on all nodes. The others are compared if they are installed on both sides.
    """
    here = versions(packages)
    report = sky.compute(versions).with_options(devices=0)
    reports = {node: pool.send(report(packages), node=node) for node in nodes}
    for node, future in reports.items():
        there = future.result()
        for name, version in here.items():
            found = there.get(name)
            if found is None and name == packages[0]:
                raise sky.UsageError(
                    f"node {node} of pool {pool.name!r} has no {name}: add it to the image, "
                    f'Image(pip=["{name}=={version}"])'
                )
            if found is not None and found != version:
                raise sky.UsageError(
                    f"node {node} of pool {pool.name!r} has {name} {found}, but this process has {version}; the "
                    f'versions must be equal: Image(pip=["{name}=={version}"])'
                )
