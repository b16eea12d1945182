"""Compares what a node reports with what was rented: devices, their driver, slots, free disk space and clock.

No function here does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from math import ceil

from skypool.accelerators import Accelerator
from skypool.devices.device import Device
from skypool.wire.agent_config import NodeHealth

CLOCK_SKEW = 30.0
"""Seconds that a node's clock may differ from the client's. Beyond that, certificates and signed requests may fail."""


_PARTS = 8
"""The most devices into which a GPU is divided."""
_MOST_CPUS = 1024
"""The most CPUs of a machine whose offer does not tell them."""


def faults(bought: Accelerator | None, report: NodeHealth, now: float, disk_gib: float = 1.0) -> list[str]:
    """Return the reasons why a node must not be used, each as text. The list is empty if the node is good.

    The free disk space must be at least `disk_gib` GiB. The node's clock may differ by at most 30 seconds from `now`,
    the client's time when the report came. If an accelerator other than a CPU was rented (`bought`), the devices and
    the version of their driver are checked, too.
    """
    found: list[str] = []
    if bought is not None and bought.kind != "cpu":
        found += _devices(bought, report.devices)
        found += _driver(bought, report.driver)
    free = report.disk_free / 2**30
    if free < disk_gib:
        found.append(
            f"{free:.1f} GiB of its disk are free, and {disk_gib:g} GiB are needed (ask for a larger disk with disk=, "
            "or free space on a machine of your own)"
        )
    skew = report.time - now
    if abs(skew) > CLOCK_SKEW:
        found.append(
            f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this computer's, more than "
            f"{CLOCK_SKEW:g} s (check the time synchronisation of both)"
        )
    return found


def most_slots(
    asked: int | str | Sized | None, bought: Accelerator | None, vcpus: float | None, devices: int
) -> tuple[int, int]:
    """Return (the most slots that a node can have, the most CPU slots that it can have beside slots with devices).

    A slot is a place for one call at a time. A node that is not trusted may claim more slots, and would then get calls
    that other nodes could run.

    Args:
        asked: the slots that the node was asked to have: their number, "per-device", a sequence with the plan of each,
            or None for one slot with all devices.
        bought: accelerator that the offer promised; None if the offer promised none or is not known.
        vcpus: CPUs of the offer; None if they are not known. A node may have up to twice as many.
        devices: the number of devices that the node claims.
    """
    cpus = _MOST_CPUS if vcpus is None else max(1, ceil(2 * vcpus))
    if bought is not None and bought.kind != "cpu":
        devices = min(devices, _PARTS * (bought.slice.chips_per_vm if bought.slice else bought.count))
    cpu_slots = cpus if devices else 0
    if isinstance(asked, int):
        return max(1, asked), cpu_slots
    if isinstance(asked, Sized) and not isinstance(asked, str):
        return len(asked), cpu_slots
    if not devices:
        return cpus, 0
    return (devices if asked == "per-device" else 1), cpu_slots


def _devices(bought: Accelerator, seen: Sequence[Device]) -> list[str]:
    if bought.runtime == "none" and bought.origin != "custom":
        return []  # no tool that skypool knows reports FPGAs, transcoders and the like
    fit = [device for device in seen if _is(bought, device)]
    if len(fit) >= (bought.slice.chips_per_vm if bought.slice else bought.count):
        return []
    has = ", ".join(_named(device) for device in seen) or "no device at all"
    return [f"{bought} was bought, and it has {has} (a device or its driver may have failed; use another machine)"]


def _is(bought: Accelerator, device: Device) -> bool:
    known = device.accelerator
    if known is None:  # the user's own hardware is in no catalogue
        return bought.origin == "custom" and device.kind == bought.runtime
    return bought.could_be(known)


def _named(device: Device) -> str:
    memory = f" ({device.memory_mib} MiB)" if device.memory_mib else ""
    return f"{device.name}{' ' + device.profile if device.profile else ''}{memory}"


def _driver(bought: Accelerator, version: str) -> list[str]:
    floor = bought.metadata.driver_min
    branch = version.partition(".")[0]
    if floor is None or bought.runtime != "cuda" or not branch.isdecimal() or int(branch) >= floor:
        return []
    return [
        f"its NVIDIA driver is {version}, and {bought.label} needs {floor} or later (use a machine with such a driver)"
    ]
