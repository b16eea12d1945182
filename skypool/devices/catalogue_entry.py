"""Finds the accelerator of skypool's catalogue for a detected device, by the device's name, PCI id and memory.

The form factor of an accelerator is the kind of its connection, such as "SXM" or "PCIe".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from skypool.accelerators import tables
from skypool.accelerators.accelerator import Accelerator, as_reported, build
from skypool.accelerators.spelling import parse
from skypool.errors import UnknownAccelerator, UsageError

_BRACKETS = re.compile(r"\[(.+)\]")
_VGPU = re.compile(r"(?P<card>.+?)(?: DC)?(?:-\d+)?-(?P<gb>\d+)[ABCQ]")
"""Matches the name of a virtual GPU, such as "NVIDIA L4-3Q" or "NVIDIA RTX Pro 6000 Blackwell DC-1-12Q".

The last number is the memory in GB. The letter after it stands for the licence (NVIDIA vGPU User Guide, "Virtual GPU
Types").
"""


class Reported(Protocol):
    """Interface of a detected device: the fields that `identify` reads. `skypool.devices.Device` has them."""

    @property
    def name(self) -> str: ...
    @property
    def memory_mib(self) -> int | None: ...
    @property
    def pci_id(self) -> str: ...
    @property
    def profile(self) -> str: ...


def identify(device: Reported) -> Accelerator | None:
    """Return the catalogue's accelerator for a device, with count 1; None if the catalogue does not know the device.

    The device is looked up by its name, and if that is unknown, by its PCI id. The PCI id tells the form factor if the
    name does not. The reported memory decides between models of the same name that differ in memory. The result is also
    None if the device has clearly less memory than every model of its name.
    """
    if virtual := _VGPU.fullmatch(device.name):
        return _virtual(device, virtual["card"], int(virtual["gb"]))
    card = _card(device.name, device.pci_id, device.memory_mib)
    if card is None or device.profile:
        return card and _part(card, device.profile)
    return card if device.memory_mib is None else as_reported(card, device.memory_mib)


def _card(name: str, pci_id: str, memory_mib: int | None) -> Accelerator | None:
    """Return the accelerator of a whole card, found by its name or else by its PCI id; None if neither is known."""
    by_pci = _by_pci(pci_id, memory_mib)
    card = _by_name(name) or by_pci
    # if the name does not tell the form factor, the PCI id does
    if card and by_pci and (card.name, card.form_factor) == (by_pci.name, None) and by_pci.form_factor:
        try:
            return build(card.name, card.memory_gb, by_pci.form_factor)
        except UsageError:  # the catalogue has no such form factor with the memory that the name states
            return by_pci
    return card


def _virtual(device: Reported, name: str, gb: int) -> Accelerator | None:
    """Return the accelerator of a virtual GPU with `gb` GB of the card `name`; None if it is not known."""
    if (card := _card(name, device.pci_id, None)) is None:
        return None
    # a quarter of the card's memory gives the partition "1of4", and all of the memory gives the whole card
    shares = round(card.memory_gb / gb)
    return card if shares == 1 else _part(card, f"1of{shares}")


def _part(card: Accelerator, profile: str) -> Accelerator | None:
    """Return one partition of a card. `profile` is "1g.10gb" or "1of4", for example. None if the catalogue lacks it."""
    # the reported name has the profile, so the card is itself this partition
    if card.profile == profile:
        return card
    try:
        return card.partition(profile)
    except UsageError:
        return None


def _by_name(name: str) -> Accelerator | None:
    """Return the accelerator that a reported name means; None if the catalogue does not know the name."""
    inner = _BRACKETS.search(name)
    # the first six characters of a Gaudi name such as "HL-325L", or a name without "VF" (virtual function)
    short = name[:6] if name.startswith("HL-") else name.removesuffix(" VF")
    for spelling in (name, inner[1] if inner else "", short):
        try:
            if spelling:
                return parse(spelling)
        except UnknownAccelerator:
            continue
    return None


def _by_pci(pci_id: str, memory_mib: int | None) -> Accelerator | None:
    """Return the accelerator with a PCI device id; None if the catalogue does not have the id."""
    fit = [row for row in tables.rows("accelerators.csv") if pci_id and pci_id in row["pci_ids"].split()]
    if not fit:
        return None
    reported = (memory_mib or 0) / 1024
    # of several models with this id, the one with the nearest memory, or the first if the memory is unknown
    size = min((float(row["memory_gb"]) for row in fit), key=lambda gb: abs(gb - reported) if reported else 0)
    same = [row for row in fit if float(row["memory_gb"]) == size]
    forms = {row["form_factor"] for row in same}
    # models that differ in form factor give None for it
    return build(same[0]["name"], size, forms.pop() or None if len(forms) == 1 else None)


def summary(devices: Iterable[Reported]) -> tuple[Accelerator, ...]:
    """Return the catalogue's accelerators for some devices: each accelerator once, with the number of such devices.

    The accelerators are in the order in which their first devices come. Devices that the catalogue does not know are
    left out.
    """
    counts: dict[Accelerator, int] = {}
    for device in devices:
        if (found := identify(device)) is not None:
            counts[found] = counts.get(found, 0) + 1
    return tuple(replace(card, count=count) for card, count in counts.items())
