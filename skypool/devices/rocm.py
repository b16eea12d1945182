"""AMD GPUs: the family `Rocm`, and parsers for the tools' output.

The devices are detected with `amd-smi`, or with the older `rocm-smi` if `amd-smi` reports no cards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from skypool.devices.device import Device, Family, Stats, index_of
from skypool.devices.tools import allowed, ask, document, number, whole

_PLACE = "/opt/rocm/bin"
_FACTS = ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json"]
_STATE = ["--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--json"]


class Rocm(Family):
    """The family of AMD GPUs. ROCm counts an MI250X as two devices, one for each of its dies.

    Devices that `ROCR_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` hides are not reported.
    """

    kind = "rocm"

    def detect(self) -> tuple[Device, ...]:
        found = read_amd_static(ask(["amd-smi", "static", "--asic", "--vram", "--json"], _PLACE))
        found = found or read_rocm(ask(["rocm-smi", *_FACTS], _PLACE))
        return tuple(device for device in found if _shown(device))

    def get_device_stats(self, device: Device | int) -> Stats:
        index = index_of(device)
        told = ask(["amd-smi", "metric", "--gpu", str(index), "--json"], _PLACE)
        stats = read_amd_metric(told)
        return stats if told else read_rocm_state(ask(["rocm-smi", *_STATE], _PLACE), index)

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        # ROCR hides cards first, and HIP numbers the rest from 0. So an inherited list for HIP would hide more cards.
        left = ",".join(str(index) for index in range(len(pins)))
        return {"ROCR_VISIBLE_DEVICES": ",".join(pins), "HIP_VISIBLE_DEVICES": left}


def _shown(device: Device) -> bool:
    """Return True if a device is visible to this process.

    The variable `ROCR_VISIBLE_DEVICES` decides, or `HIP_VISIBLE_DEVICES` if that is not set. If neither is set, every
    device is visible.
    """
    lowest = "ROCR_VISIBLE_DEVICES" if "ROCR_VISIBLE_DEVICES" in os.environ else "HIP_VISIBLE_DEVICES"
    return allowed(lowest, (str(device.index), device.uuid))


def _cards(told: Any) -> list[dict[str, Any]]:
    """Return the list of cards in a parsed JSON document of `amd-smi`; [] for any other document, such as None.

    The tool of ROCm 7 wraps this list in an object.
    """
    if isinstance(told, dict):
        told = told.get("gpu_data")
    return [card for card in told if isinstance(card, dict)] if isinstance(told, list) else []


def _value(card: dict[str, Any], *path: str) -> object:
    """Return a value at a path of keys in a card's JSON; None if a step is missing.

    `amd-smi` writes a measure as {"value": 42, "unit": "%"}, of which 42 is returned, or as "N/A", which is returned as
    it is.
    """
    at: Any = card
    for step in path:
        at = at.get(step) if isinstance(at, dict) else None
    return at.get("value") if isinstance(at, dict) else at


def read_amd_static(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `amd-smi static --asic --vram --json`, in the order of the output.

    Returns an empty tuple for None and for text that is not such JSON. Cards without a number are left out.
    """
    found = []
    for card in _cards(document(text)):
        index = whole(card.get("gpu"))
        if index is None:
            continue
        name = _value(card, "asic", "market_name")
        pci = _value(card, "asic", "device_id")
        memory = whole(_value(card, "vram", "size"))
        found.append(_device(index, str(name or ""), memory, str(pci or "")))
    return tuple(found)


def _device(index: int, name: str, memory_mib: int | None, pci: str, uuid: str = "") -> Device:
    """Return the `Device` of an AMD card. Its pin is its index.

    Args:
        index: the card's number.
        name: its name.
        memory_mib: its memory in MiB; None if unknown.
        pci: its PCI id. Anything but "0x" and four characters is dropped.
        uuid: its unique id; "" if unknown.
    """
    pci_id = "0x" + pci[2:].upper() if pci.startswith("0x") and len(pci) == 6 else ""
    return Device("rocm", index, name, memory_mib, pin=str(index), uuid=uuid, pci_id=pci_id)


def read_amd_metric(text: str | None) -> Stats:
    """Return the state of the first card in the output of `amd-smi metric --json`.

    All fields are None if the output is missing or has no card. The temperature is that of the hottest spot if the tool
    reports it, otherwise that of the edge.
    """
    for card in _cards(document(text)):
        spots = (number(_value(card, "temperature", spot)) for spot in ("hotspot", "edge"))
        return Stats(
            memory_used_mib=number(_value(card, "mem_usage", "used_vram")),
            memory_total_mib=number(_value(card, "mem_usage", "total_vram")),
            utilization_percent=number(_value(card, "usage", "gfx_activity")),
            temperature_celsius=next((spot for spot in spots if spot is not None), None),
            power_watts=number(_value(card, "power", "socket_power")),
        )
    return Stats()


def _by_index(text: str | None) -> dict[int, dict[str, str]]:
    """Return the cards in a JSON document of `rocm-smi`, by index, with the keys of each in lower case.

    The tool changed the case of its keys between releases. Returns {} for None and for text that is not such JSON.
    """
    told = document(text)
    found = {}
    for key, card in told.items() if isinstance(told, dict) else ():
        if key.startswith("card") and key[4:].isdecimal() and isinstance(card, dict):
            found[int(key[4:])] = {str(name).lower(): str(value) for name, value in card.items()}
    return found


def read_rocm(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `rocm-smi --showproductname --showmeminfo vram --showuniqueid --json`.

    None (for a tool that is missing) and text that is not such JSON yield an empty tuple.
    """
    found = []
    for index, card in _by_index(text).items():
        memory = number(card.get("vram total memory (b)", ""))
        names = (card.get("card series"), card.get("device name"), card.get("card model"))
        name = next((name for name in names if name and name != "N/A"), "")
        pci = card.get("card model", "") or card.get("device id", "")
        unique = card.get("unique id", "")
        uuid = "GPU-" + unique[2:] if unique.startswith("0x") else ""
        found.append(_device(index, name, None if memory is None else int(memory) >> 20, pci, uuid))
    return tuple(found)


def read_rocm_state(text: str | None, index: int) -> Stats:
    """Return the state of one card from `rocm-smi --showuse --showmeminfo vram --showtemp --showpower --json`.

    All fields are None if the output is missing or has no card with this index.

    Args:
        text: the output; None if the tool is missing.
        index: the card's number.
    """
    card = _by_index(text).get(index, {})

    def first(*keys: str) -> float | None:
        return next((found for key in keys if (found := number(card.get(key, ""))) is not None), None)

    used = first("vram total used memory (b)")
    total = first("vram total memory (b)")
    return Stats(
        memory_used_mib=None if used is None else used / 2**20,
        memory_total_mib=None if total is None else total / 2**20,
        utilization_percent=first("gpu use (%)"),
        temperature_celsius=first("temperature (sensor junction) (c)", "temperature (sensor edge) (c)"),
        power_watts=first("current socket graphics package power (w)", "average graphics package power (w)"),
    )
