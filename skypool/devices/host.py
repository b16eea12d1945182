"""This machine's CPU and the GPU of Apple silicon as devices: the families `Cpu` and `Mps`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from skypool.devices.device import Device, Family, Stats
from skypool.devices.device import cores as cores
from skypool.devices.tools import ask, whole


class Cpu(Family):
    """CPU of this machine as one device.

    No environment variable hides the CPU, so `visible_env` returns {}. The utilization in `Stats` is an estimate from
    the system's load average of the last minute.
    """

    kind = "cpu"

    def parse_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[int]:
        """Return a list with the device index 0 for each process that a setting asks for. The CPU is one device.

        Args:
            devices: a positive int is a number of processes, which all use device 0: so 3 gives [0, 0, 0]. "auto", -1,
                "-1" and None give [0]. "0" or [0] is a list of device indices, and gives [0]. An empty list gives [].

        Raises:
            UsageError: the setting has another form, is 0, or selects another device than 0.
        """
        if isinstance(devices, int) and devices > 0:
            return [0] * devices
        return super().parse_devices(devices)

    def detect(self) -> tuple[Device, ...]:
        return (Device("cpu", 0, "CPU", _memory_mib(), pin="0"),)

    def get_device_stats(self, device: Device | int) -> Stats:
        total = _memory_mib()
        free = _meminfo("MemAvailable")
        used = total - free if total is not None and free is not None else None
        busy = 100 * os.getloadavg()[0] / cores() if hasattr(os, "getloadavg") else None
        return Stats(used, total, None if busy is None else min(100.0, busy))

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        return {}


def _memory_mib() -> int | None:
    """Return the machine's whole memory in MiB; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError, AttributeError):
        return None


def _meminfo(key: str) -> int | None:
    """Return a value of /proc/meminfo, such as "MemAvailable", in MiB; None if it cannot be read."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[key].split()[0]) >> 10
    except (OSError, KeyError, ValueError):
        return None


class Mps(Family):
    """GPU of Apple silicon as one device, whose memory is the memory of the whole machine.

    On a machine without Apple silicon, `detect` returns an empty tuple. No environment variable hides the device.
    """

    kind = "mps"

    def detect(self) -> tuple[Device, ...]:
        if sys.platform != "darwin" or os.uname().machine != "arm64":
            return ()
        name = (ask(["sysctl", "-n", "machdep.cpu.brand_string"]) or "Apple").strip()
        memory = whole(ask(["sysctl", "-n", "hw.memsize"]) or "")
        return (Device("mps", 0, name, None if memory is None else memory >> 20, pin="0"),)
