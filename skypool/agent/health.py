"""What a node says of itself when it begins: for the client to compare with what was bought."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skypool.devices.device import Device
from skypool.devices.tools import ask


def describe(devices: Sequence[Device]) -> dict[str, Any]:
    """The devices, and the version of their driver ("" if there is none to ask)."""
    driver = ""
    if any(device.kind == "cuda" for device in devices):
        said = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        driver = said.strip().partition("\n")[0]
    return {"devices": [asdict(device) for device in devices], "driver": driver}


def now(folder: str) -> dict[str, Any]:
    """What changes: bytes free where calls run, and the clock."""
    return {"disk_free": shutil.disk_usage(folder).free, "time": time.time()}
