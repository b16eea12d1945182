"""AMD GPUs: the family `Rocm`, and parsers for the output of AMD's tools.

The devices are detected with the tool `amd-smi`, or with the older tool `rocm-smi` if `amd-smi` reports no cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skypool.devices.device import Device, Family, Stats, index_of
from skypool.devices.tools import ask, document, number, shown, whole

_PLACE = "/opt/rocm/bin"
_FACTS = ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json"]
_STATE = ["--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--json"]


class Rocm(Family):
    """AMD GPUs of this machine: detection, state, and variables that make chosen GPUs visible to new processes.

    An MI250X counts as two devices, one for each of its dies (chips in one package). `detect` leaves out devices that
    the environment variables `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` hide. The other devices come in the order
    that these variables give.
    """

    kind = "rocm"

    def detect(self) -> tuple[Device, ...]:
        found = read_amd_static(ask(["amd-smi", "static", "--asic", "--vram", "--json"], _PLACE))
        found = found or read_rocm(ask(["rocm-smi", *_FACTS], _PLACE))
        return shown_of(found)

    def get_device_stats(self, device: Device | int) -> Stats:
        index = index_of(device)
        told = ask(["amd-smi", "metric", "--gpu", str(index), "--json"], _PLACE)
        stats = read_amd_metric(told)
        return stats if told else read_rocm_state(ask(["rocm-smi", *_STATE], _PLACE), index)

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        # ROCR_VISIBLE_DEVICES is applied first, and HIP numbers the visible cards from 0. So a HIP_VISIBLE_DEVICES
        # that the process inherits would hide more cards, and is replaced.
        left = ",".join(str(index) for index in range(len(pins)))
        return {"ROCR_VISIBLE_DEVICES": ",".join(pins), "HIP_VISIBLE_DEVICES": left}


def shown_of(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return those of the given devices that no environment variable hides from this process.

    The numbers in `HIP_VISIBLE_DEVICES` count only the devices that `ROCR_VISIBLE_DEVICES` does not hide.
    https://github.com/pytorch/pytorch/pull/142292 read 2026-11-26
    """
    left = shown("ROCR_VISIBLE_DEVICES", devices, lambda device: (str(device.index), device.uuid))
    return shown("HIP_VISIBLE_DEVICES", left, lambda device: (str(left.index(device)), device.uuid))


def _cards(told: Any) -> list[dict[str, Any]]:
    """Return the list of cards in the parsed JSON output of `amd-smi`; [] for any other value."""
    if isinstance(told, dict):
        # since ROCm 7
        told = told.get("gpu_data")
    return [card for card in told if isinstance(card, dict)] if isinstance(told, list) else []


def _value(card: dict[str, Any], *path: str) -> object:
    """Return the value at a path of keys in a card's JSON; None if a key is missing."""
    at: Any = card
    for step in path:
        at = at.get(step) if isinstance(at, dict) else None
    # a measured value is an object such as {"value": 42, "unit": "%"}, and an unknown one is "N/A"
    return at.get("value") if isinstance(at, dict) else at


def read_amd_static(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `amd-smi static --asic --vram --json`, in the order of the output.

    The tuple is empty if the text is None or is not such JSON. Cards without an index are left out.
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
    """Return the `Device` of an AMD card. Its pin is its index. A `pci` that is no PCI device id counts as unknown."""
    pci_id = "0x" + pci[2:].upper() if pci.startswith("0x") and len(pci) == 6 else ""
    return Device("rocm", index, name, memory_mib, pin=str(index), uuid=uuid, pci_id=pci_id)


def read_amd_metric(text: str | None) -> Stats:
    """Return the state of the first card in the output of `amd-smi metric --json`. Without a card, all fields are None.

    The temperature is that of the card's hottest spot, or of the chip's edge if the tool does not report that.
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
    """Return a dict from the index of a card to its values by name, in lower case, from JSON of `rocm-smi`; else {}."""
    told = document(text)
    found = {}
    for key, card in told.items() if isinstance(told, dict) else ():
        if key.startswith("card") and key[4:].isdecimal() and isinstance(card, dict):
            found[int(key[4:])] = {str(name).lower(): str(value) for name, value in card.items()}
    return found


def read_rocm(text: str | None) -> tuple[Device, ...]:
    """Return the devices in the output of `rocm-smi --showproductname --showmeminfo vram --showuniqueid --json`.

    The tuple is empty if the text is None or is not such JSON.
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

    All fields are None if the text is None or has no card with this index.
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
