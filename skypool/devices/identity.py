"""Which card of the catalogue a device is."""

from __future__ import annotations

import re
from dataclasses import replace

from skypool.accelerators import tables
from skypool.accelerators.partitions import memories
from skypool.accelerators.spelling import parse
from skypool.accelerators.value import Accelerator, build
from skypool.devices.device import Device
from skypool.errors import UnknownAccelerator, UsageError

_BRACKETS = re.compile(r"\[(.+)\]")


def identify(device: Device) -> Accelerator | None:
    """By its name, the name AMD puts in brackets, or its PCI id; its memory decides between variants."""
    card = _by_name(device.name) or _by_pci(device.pci_id)
    if card is None:
        return None
    if card.origin == "default" and device.memory_mib and not device.profile:
        sizes = memories(card.name)
        nearest = min(sizes, key=lambda size: abs(size - (device.memory_mib or 0) / 1024))
        card = build(card.name, nearest, card.form_factor)
    return _part(card, device.profile) if device.profile else card


def _part(card: Accelerator, profile: str) -> Accelerator | None:
    try:
        return card.partition(profile)
    except UsageError:
        return None


def _by_name(name: str) -> Accelerator | None:
    inner = _BRACKETS.search(name)
    short = name[:6] if name.startswith("HL-") else name.removesuffix(" VF")  # HL-325L, MI300X VF
    for spelling in (name, inner[1] if inner else "", short):
        try:
            if spelling:
                return parse(spelling)
        except UnknownAccelerator:
            continue
    return None


def _by_pci(pci_id: str) -> Accelerator | None:
    for row in tables.rows("accelerators.csv"):
        if pci_id and pci_id in row["pci_ids"].split():
            return build(row["name"], float(row["memory_gb"]), row["form_factor"] or None)
    return None


def summary(devices: tuple[Device, ...]) -> tuple[Accelerator, ...]:
    """The devices as accelerators with counts: what a machine has, to compare with what was bought."""
    counts: dict[Accelerator, int] = {}
    for device in devices:
        if (found := identify(device)) is not None:
            counts[found] = counts.get(found, 0) + 1
    return tuple(replace(card, count=count) for card, count in counts.items())
