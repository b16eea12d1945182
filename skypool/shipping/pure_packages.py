"""Libraries that skypool's client code needs and nodes lack, as a zip that is made here and imported elsewhere.

They are written in Python alone, so that one zip is right for every machine.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

RUNNER = ("platformdirs", "rich", "tenacity")
"""What a runner needs, the process on a machine that owns a run there."""


def packed(names: Sequence[str] = RUNNER) -> bytes:
    """Return a zip of the modules of these packages, and of what is known of skypool's own version.

    Raises ImportError if one of them is not installed here.
    """
    from importlib.metadata import distribution  # imported here because it takes long

    me = distribution("skypool")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"skypool-{me.version}.dist-info/METADATA"), me.read_text("METADATA") or "")
        for name in names:
            spec = importlib.util.find_spec(name)
            if spec is None or not spec.submodule_search_locations:
                raise ImportError(
                    f"{name} cannot be sent to nodes, because it is not installed here; reinstall skypool"
                )
            root = Path(spec.submodule_search_locations[0])
            for file in sorted(root.rglob("*.py")):
                entry = zipfile.ZipInfo(f"{name}/{file.relative_to(root)}")
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def admit(packages: bytes) -> None:
    """Let this process import the modules of a zip, before any others of their names. No file is written to disk."""
    file = os.memfd_create("skypool-packages")  # it is open until this process ends
    with os.fdopen(os.dup(file), "wb") as out:
        out.write(packages)
    sys.path.insert(0, f"/proc/self/fd/{file}")
