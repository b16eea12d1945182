"""`here`, which lists the packages that are installed on this machine as requirements for a node."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_OURS = {"skypool", "pip", "setuptools", "wheel", "uv"}
_PARTS_OF_TORCH = re.compile(r"nvidia-.*-cu\d+|triton|pytorch-triton(-rocm)?")


def here(but: Set[str]) -> tuple[list[str], list[str]]:
    """Return the requirements that reproduce this Python environment, and notes on packages that exist only here.

    Both lists are sorted. An installed "torch 2.9.0+cpu" gives the requirement "torch==2.9.0", because the right build
    depends on the node's accelerator. Parts of CUDA that come with PyTorch, skypool itself and installers such as pip
    are left out. So are the packages that `but` names, in lower case with dashes.
    """
    from importlib.metadata import distributions  # imported here because it takes long, and few images need it

    asked = {}
    notes = []
    for each in distributions():
        name = re.sub(r"[-_.]+", "-", each.name or "").lower()
        if not name or name in _OURS or name in but or name in asked or _PARTS_OF_TORCH.fullmatch(name):
            continue
        requirement, note = _requirement(name, each)
        if note:
            notes.append(note)
        else:
            asked[name] = requirement
    return [asked[name] for name in sorted(asked)], sorted(notes)


def _requirement(name: str, each: Distribution) -> tuple[str, str]:
    """Return (requirement, "") for an installed package, or ("", note) if it comes from a path of this machine."""
    origin = json.loads(each.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}", ""
    url = origin.get("url", "")
    if url.startswith("file:"):
        kind = "editable" if origin.get("dir_info", {}).get("editable") else "local"
        return "", f"{name} {each.version} is {kind} here ({url}) and is left out"
    if url:
        return f"{name} @ {url}", ""
    return f"{name}=={each.version.partition('+')[0]}", ""
