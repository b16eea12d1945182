"""Collects facts about a node at its start: devices, driver version, address, free disk space and clock.

The client checks these facts before it uses the node.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from skypool.devices.device import Device
from skypool.devices.tools import ask
from skypool.wire.agent_config import NodeHealth

SWITCH = "SKYPOOL_SAMPLES"
"""The environment variable that switches measurements off on a machine, by the value "off".

By default, the invented devices of SKYPOOL_DEVICES are not measured. With the value "on" they are, for tests that put a
library of their own in the driver's place.
"""


def describe(devices: Sequence[Device]) -> NodeHealth:
    """Return the state of this machine, which has these devices: the version of their driver, and its address.

    Free disk space and clock are missing; `refreshed` adds them. The driver's version is "" unless nvidia-smi reports
    it for NVIDIA GPUs.
    """
    driver = ""
    if any(device.kind == "cuda" for device in devices):
        said = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        driver = said.strip().partition("\n")[0]
    # devices of a rehearsal (`skypool.devices.detect`) do not exist, so they are measured only where a test says so
    said = os.environ.get(SWITCH, "off" if "SKYPOOL_DEVICES" in os.environ else "on")
    monitored = said != "off" and any(device.kind not in ("cpu", "mps") for device in devices)
    return NodeHealth(
        tuple(devices),
        driver,
        address=own_address(),
        monitored=monitored,
        host=socket.gethostname(),
        machine=os.uname().machine,
    )


def own_address() -> str:
    """Return the IP address of this machine's network interface for outgoing traffic, as text.

    IPv4 is preferred. Returns "" if there is no such interface. No packet is sent.
    """
    # reserved addresses; no packet is sent
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def refreshed(health: NodeHealth, folder: str) -> NodeHealth:
    """Return a copy of `health` with the current time, and the free bytes of the disk that `folder` is on."""
    return replace(health, disk_free=shutil.disk_usage(folder).free, time=time.time())
