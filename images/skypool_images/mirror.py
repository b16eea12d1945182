"""What is installed here, as requirements for a node."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from importlib.metadata import Distribution, distributions

_OURS = {"skypool", "pip", "setuptools", "wheel", "uv"}
_PARTS_OF_TORCH = re.compile(r"nvidia-.*-cu\d+|triton|pytorch-triton(-rocm)?")


def here(but: Set[str]) -> tuple[list[str], list[str]]:
    """The requirements that make this environment again, and notes on what cannot be had elsewhere.

    The version of "torch 2.9.0+cpu" here is "torch 2.9.0" there: which build it is depends on the node's accelerator,
    and so do the parts of CUDA that come with it.

    Args:
        but: names that are asked for otherwise.
    """
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
    """How to ask for a distribution elsewhere, or why one cannot."""
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
