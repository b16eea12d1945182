"""Match of detected devices with accelerators of the catalogue, by PCI id, name and memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from skypool.accelerators import tables
from skypool.accelerators._parse import parse
from skypool.accelerators.value import Accelerator, as_reported, build
from skypool.errors import UnknownAccelerator, UsageError

_BRACKETS = re.compile(r"\[(.+)\]")
_VGPU = re.compile(r"(?P<card>.+?)(?: DC)?(?:-\d+)?-(?P<gb>\d+)[ABCQ]")
"""A virtual GPU: "NVIDIA L4-3Q", "NVIDIA RTX Pro 6000 Blackwell DC-1-12Q". The number before the letter is its GB; the
letter is the licence (NVIDIA vGPU User Guide, "Virtual GPU Types")."""


class Reported(Protocol):
    """A device as a vendor's tool reports it; `devices.Device` is one."""

    @property
    def name(self) -> str: ...
    @property
    def memory_mib(self) -> int | None: ...
    @property
    def pci_id(self) -> str: ...
    @property
    def profile(self) -> str: ...


def identify(device: Reported) -> Accelerator | None:
    """Return the catalogue's value for a device, None if the catalogue does not know it.

    The name comes first, then the PCI id, which also settles a form factor that the name leaves open. The reported
    memory decides between sizes of a model. A device with clearly less memory than any size of its model is unknown.
    """
    if virtual := _VGPU.fullmatch(device.name):
        return _virtual(device, virtual["card"], int(virtual["gb"]))
    card = _card(device.name, device.pci_id, device.memory_mib)
    if card is None or device.profile:
        return card and _part(card, device.profile)
    return card if device.memory_mib is None else as_reported(card, device.memory_mib)


def _card(name: str, pci_id: str, memory_mib: int | None) -> Accelerator | None:
    by_pci = _by_pci(pci_id, memory_mib)
    card = _by_name(name) or by_pci
    if card and by_pci and (card.name, card.form_factor) == (by_pci.name, None) and by_pci.form_factor:
        try:
            return build(card.name, card.memory_gb, by_pci.form_factor)
        except UsageError:  # the memory that the name tells does not come in this form
            return by_pci
    return card


def _virtual(device: Reported, name: str, gb: int) -> Accelerator | None:
    """A share of a card, by its GB; with all of the memory it is the card."""
    if (card := _card(name, device.pci_id, None)) is None:
        return None
    shares = round(card.memory_gb / gb)
    return card if shares == 1 else _part(card, f"1of{shares}")


def _part(card: Accelerator, profile: str) -> Accelerator | None:
    try:
        return card.partition(profile)
    except UsageError:
        return None


def _by_name(name: str) -> Accelerator | None:
    """What a name means, or the name that AMD puts in brackets, or the first letters of Gaudi's ("HL-325L")."""
    inner = _BRACKETS.search(name)
    short = name[:6] if name.startswith("HL-") else name.removesuffix(" VF")
    for spelling in (name, inner[1] if inner else "", short):
        try:
            if spelling:
                return parse(spelling)
        except UnknownAccelerator:
            continue
    return None


def _by_pci(pci_id: str, memory_mib: int | None) -> Accelerator | None:
    """The model with this PCI id; where several rows have it, the one whose memory is nearest to the reported."""
    fit = [row for row in tables.rows("accelerators.csv") if pci_id and pci_id in row["pci_ids"].split()]
    if not fit:
        return None
    reported = (memory_mib or 0) / 1024
    size = min((float(row["memory_gb"]) for row in fit), key=lambda gb: abs(gb - reported) if reported else 0)
    same = [row for row in fit if float(row["memory_gb"]) == size]
    forms = {row["form_factor"] for row in same}
    return build(same[0]["name"], size, forms.pop() or None if len(forms) == 1 else None)


def summary(devices: Iterable[Reported]) -> tuple[Accelerator, ...]:
    """Count the devices that the catalogue knows: what a machine has, to compare with what was bought."""
    counts: dict[Accelerator, int] = {}
    for device in devices:
        if (found := identify(device)) is not None:
            counts[found] = counts.get(found, 0) + 1
    return tuple(replace(card, count=count) for card, count in counts.items())
