"""Compares the hardware that a node reports with the hardware that was bought. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.accelerators import Accelerator
from skypool.devices.device import Device
from skypool.wire.handshake import NodeHealth

CLOCK_SKEW = 30.0
"""Seconds a node's clock may be off: certificates and signed requests fail soon after."""


def faults(bought: Accelerator | None, report: NodeHealth, now: float, disk_gib: float = 1.0) -> list[str]:
    """Return why a node must not be used, each reason in words; empty if it may.

    Args:
        bought: what the offer promised, None where nothing was.
        report: what the agent found.
        now: our own clock when the report came.
        disk_gib: what must be free there.
    """
    found: list[str] = []
    if bought is not None and bought.kind != "cpu":
        found += _devices(bought, report.devices)
        found += _driver(bought, report.driver)
    free = report.disk_free / 2**30
    if free < disk_gib:
        found.append(f"{free:.1f} GiB of its disk are free, and {disk_gib:g} are needed: ask for a larger disk")
    skew = report.time - now
    if abs(skew) > CLOCK_SKEW:
        found.append(f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}: time synchronisation is off")
    return found


def _devices(bought: Accelerator, seen: Sequence[Device]) -> list[str]:
    if bought.runtime == "none" and bought.origin != "custom":
        return []  # FPGAs, transcoders and the like: no tool known here reports them
    fit = [device for device in seen if _is(bought, device)]
    if len(fit) >= (bought.slice.chips_per_vm if bought.slice else bought.count):
        return []
    has = ", ".join(_named(device) for device in seen) or "no device at all"
    return [f"{bought} was bought, and it has {has}: the driver or a device failed there"]


def _is(bought: Accelerator, device: Device) -> bool:
    known = device.accelerator
    if known is None:  # hardware of the user's own, which no catalogue can compare
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
    return [f"its driver is {version}, and {bought.label} needs branch {floor} or later"]
