"""`Device`, `Stats`, and `Family`, the base class of all kinds of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from skypool.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator


def cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine, as its vendor's tool names it.

    Attributes:
        kind: the family: "cuda", "rocm", "neuron", "tpu", "hpu", "mps" or "cpu".
        index: the vendor's number for it.
        name: the vendor's name; memory_mib: all of its memory, None if the tool does not say.
        pin: what the family's environment variable takes to mean this device: an index, a UUID, core numbers.
        uuid, pci_id: "" if unknown; pci_id as "0x2330".
        profile: the MIG profile, "" for a whole card.
    """

    kind: str
    index: int
    name: str
    memory_mib: int | None = None
    pin: str = ""
    uuid: str = ""
    pci_id: str = ""
    profile: str = ""

    @property
    def accelerator(self) -> Accelerator | None:
        """The catalogue's value for it, None if the catalogue does not know it."""
        from skypool.devices.identity import identify  # only who asks needs the catalogue

        return identify(self)


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of a device now; None for what its tool does not tell."""

    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Family:
    """One kind of device. Subclass it for hardware of your own; `detect` is all that must be written.

    Every method answers on any machine: where there is no such device, or no tool to ask, there are none.
    """

    kind: str = ""

    def detect(self) -> tuple[Device, ...]:
        """Every device of this kind that this process may use."""
        raise NotImplementedError

    def is_available(self) -> bool:
        """Whether there is at least one."""
        return bool(self.detect())

    def auto_device_count(self) -> int:
        """How many there are."""
        return len(self.detect())

    def parse_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[int]:
        """Indices, out of the ways people write them.

        Args:
            devices: "auto", -1 or None for all; a number for the first so many; "0,2" or [0, 2] for these.
        Raises:
            UsageError: unreadable, or more or others than there are.
        """
        have = [device.index for device in self.detect()]
        if devices is None or devices in ("auto", -1, "-1"):
            return have
        if isinstance(devices, int):
            wanted = have[:devices] if 0 < devices <= len(have) else None
        else:
            wanted = _listed(devices)
        if wanted is None or not set(wanted) <= set(have):
            raise UsageError(f"no such {self.kind} devices: {devices!r}; this machine has {have or 'none'}")
        return wanted

    def get_parallel_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[Device]:
        """The devices themselves, in the order asked for."""
        by_index = {device.index: device for device in self.detect()}
        return [by_index[index] for index in self.parse_devices(devices)]

    def get_device_stats(self, device: Device | int) -> Stats:
        """Memory used, utilization, temperature and power now, as far as the tool tells."""
        return Stats()

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        """The environment that shows a new process only the devices with these pins; none if empty."""
        return {}


def _listed(devices: str | Sequence[int]) -> list[int] | None:
    if not isinstance(devices, str):
        return list(devices)
    words = [word.strip() for word in devices.split(",") if word.strip()]
    return [int(word) for word in words] if words and all(word.isdecimal() for word in words) else None


def index_of(device: Device | int) -> int:
    """The vendor's number of a device given either way."""
    return device if isinstance(device, int) else device.index
