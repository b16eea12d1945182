"""NVIDIA GPUs and MIG partitions: the family `Cuda`, and parsers for the output of NVIDIA's tools.

A MIG partition is a part of a card that NVIDIA's Multi-Instance GPU (MIG) has divided. The devices are detected with
the package nvidia-ml-py, or with `nvidia-smi` if the package is not installed or reports no devices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from skypool.devices.device import Device, Family, Stats, index_of
from skypool.devices.tools import ask, number, shown, table, whole

_CARD = re.compile(r"GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)?")
_PART = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
_QUERY = "index,memory.total,pci.device_id"
_STATS = "memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw"


class Cuda(Family):
    """NVIDIA GPUs of this machine: detection, state, and variables that make chosen GPUs visible to new processes.

    For a card that MIG has divided, `detect` returns the partitions and not the card, because a program can use only
    these. Devices that `CUDA_VISIBLE_DEVICES` hides are left out, and the others come in its order.
    """

    kind = "cuda"

    def detect(self) -> tuple[Device, ...]:
        found = _from_nvml() or _from_smi()
        return shown("CUDA_VISIBLE_DEVICES", found, partial(names, found))

    def get_device_stats(self, device: Device | int) -> Stats:
        asked = f"--query-gpu={_STATS}", "--format=csv,noheader,nounits", f"--id={index_of(device)}"
        return read_stats(ask(["nvidia-smi", *asked]))

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        # without CUDA_DEVICE_ORDER, CUDA numbers cards by speed, but nvidia-smi numbers them by PCI address
        return {"CUDA_VISIBLE_DEVICES": ",".join(pins), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def names(found: Sequence[Device], device: Device) -> tuple[str, ...]:
    """Return the texts by which `CUDA_VISIBLE_DEVICES` may list `device`, which is one of the devices `found`.

    The texts are the device's pin, its UUID and its index. Of the partitions of a card, only the first has the card's
    index as a text, because CUDA uses this partition for the index.
    """
    is_first = next(each for each in found if each.index == device.index) == device
    return device.pin, device.uuid, str(device.index) if is_first else ""


def read_stats(text: str | None) -> Stats:
    """Return the state of one card from the first line of `text`, which is the output of `nvidia-smi --query-gpu`.

    The columns must be memory.used, memory.total, utilization.gpu, temperature.gpu and power.draw. A cell without a
    number, such as "[N/A]", gives None for its field. If there is no such line, or `text` is None, all fields are None.
    """
    rows = table(text)
    return Stats(*(number(cell) for cell in rows[0])) if rows and len(rows[0]) == 5 else Stats()


def _from_smi() -> tuple[Device, ...]:
    """Return the devices that `nvidia-smi` lists; () if the tool is missing or fails."""
    if (listing := ask(["nvidia-smi", "-L"])) is None:
        return ()
    return read_smi(listing, ask(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]))


def read_smi(listing: str, memory: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `nvidia-smi -L`. For a card that MIG has divided, return only its partitions.

    Lines of another form are ignored. The memory of a partition is None, because the tool does not print it.

    Args:
        listing: the output of `nvidia-smi -L`.
        memory: the output of `nvidia-smi --query-gpu` with the columns index, memory in MiB and PCI device id. None if
            the tool is missing or failed. The memory of the devices is then None, and their PCI device id is "".
    """
    facts = {row[0]: row for row in table(memory) if len(row) == 3}
    found: list[Device] = []
    cut: set[int] = set()
    for line in listing.splitlines():
        if card := _CARD.match(line):
            _, memory_mib, pci = facts.get(card[1], (card[1], "", ""))
            found.append(_card(int(card[1]), card[2], card[3], whole(memory_mib), pci))
        elif (part := _PART.match(line)) and found:
            whole_card = next(device for device in reversed(found) if not device.profile)
            cut.add(whole_card.index)
            found.append(_part(whole_card, part[1], part[2]))
    return tuple(device for device in found if device.profile or device.index not in cut)


def _card(index: int, name: str, uuid: str, memory_mib: int | None, pci: str) -> Device:
    """Return the `Device` of a whole card. `pci` is the PCI device id, then the vendor's id, such as "0x233010DE"."""
    pci_id = "0x" + pci[2:6].upper() if len(pci) == 10 else ""
    return Device("cuda", index, name, memory_mib, pin=str(index), uuid=uuid, pci_id=pci_id)


def _part(card: Device, profile: str, uuid: str, memory_mib: int | None = None) -> Device:
    """Return the `Device` of a MIG partition. `profile` is its size, such as "1g.10gb". Its pin is its UUID."""
    return Device("cuda", card.index, card.name, memory_mib, uuid, uuid, card.pci_id, profile)


def _from_nvml() -> tuple[Device, ...]:
    """Return the devices that NVML, NVIDIA's library for device management, reports; () if it is missing or fails."""
    import ctypes
    from importlib import import_module  # an optional dependency

    try:
        if "pynvml" not in sys.modules:
            ctypes.CDLL("libnvidia-ml.so.1")  # the package takes long to import, and is of no use without it
        nvml = import_module("pynvml")
    except (ImportError, OSError):
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return ()
    try:
        return read_nvml(nvml)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def read_nvml(nvml: Any) -> tuple[Device, ...]:
    """Return the devices that NVML reports. For a card that MIG has divided, return only its partitions.

    `nvml` is the module `pynvml`, after `nvmlInit`. Raises its NVMLError if a card could not be read.
    """
    found: list[Device] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
        pci = f"0x{nvml.nvmlDeviceGetPciInfo(handle).pciDeviceId:08X}"
        card = _card(index, _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle)),
                     memory_mib, pci)  # fmt: skip
        found += _nvml_parts(nvml, handle, card) or [card]
    return tuple(found)


def _nvml_parts(nvml: Any, handle: Any, card: Device) -> list[Device]:
    """Return the MIG partitions of a card; [] if it is not divided, or does not support MIG."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # a card without MIG
        return []
    found = []
    for slot in range(slots):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError:  # an empty slot
            continue
        profile = _text(nvml.nvmlDeviceGetName(part)).rpartition("MIG ")[2]
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(part).total >> 20
        found.append(_part(card, profile, _text(nvml.nvmlDeviceGetUUID(part)), memory_mib))
    return found


def _text(given: str | bytes) -> str:
    """Return a text from pynvml as a str. Older versions of pynvml return bytes."""
    return given.decode() if isinstance(given, bytes) else given
