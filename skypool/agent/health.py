"""Report of a node at its start: devices, driver version, address, free disk, clock. The client checks it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from skypool.devices.device import Device
from skypool.devices.tools import ask
from skypool.wire.handshake import NodeHealth


def describe(devices: Sequence[Device]) -> NodeHealth:
    """Return what this machine is, without what changes (see `refreshed`)."""
    driver = ""
    if any(device.kind == "cuda" for device in devices):
        said = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        driver = said.strip().partition("\n")[0]
    return NodeHealth(tuple(devices), driver, address=own_address())


def own_address() -> str:
    """This node's own address in the network it is in: that of the interface its packets leave by, "" without one."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # nobody's; nothing is sent
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def refreshed(health: NodeHealth, folder: str) -> NodeHealth:
    """Return it with what changes as it is now: bytes free where calls run, and the clock."""
    return replace(health, disk_free=shutil.disk_usage(folder).free, time=time.time())
