"""An NVML library of our own for tests, with a script that says what it reports."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


class FakeNvml:
    """`libnvidia-ml.so.1` built from `nvml.c`, and its script.

    Args:
        library: the folder of the library.
        folder: an empty folder for the script.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.script = folder / "script"
        self._values: dict[tuple[int, str], int] = {}
        self.say(0)

    def say(self, device: int, **values: int) -> None:
        """Change what a device reports. Readers see all of the change, or nothing."""
        self._values |= {(device, name): value for name, value in values.items()}
        lines = [f"{device} {name} {value}\n" for (device, name), value in self._values.items()]
        part = self.script.with_suffix(".part")
        part.write_text("".join(lines))
        os.replace(part, self.script)

    def xid(self, device: int, code: int) -> None:
        """Report an error of the driver on a device."""
        self.say(device, xid=code, xids=self._values.get((device, "xids"), 0) + 1)

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables with which a process finds the library and its script."""
        return {"LD_LIBRARY_PATH": str(self.library), "NVML_SCRIPT": str(self.script)}


def build(folder: Path) -> None:
    """Compile the library into a folder. Skip the test if there is no compiler, or no nvidia-ml-py to load it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build a libnvidia-ml.so.1 with")
    source = Path(__file__).with_name("nvml.c")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source], check=True, timeout=120)
