"""`Device` (one accelerator), `Stats` (the state of a device), and `Family`, the base class of all kinds of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from skypool.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skypool.accelerators import Accelerator


def cores() -> int:
    """Return the number of processor cores that this process may use, at least 1.

    On systems that cannot limit a process to some cores, such as macOS, this is the number of the machine's cores.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine, described with the values that its vendor's tool reports.

    Attributes:
        kind: one of `skypool.devices.KINDS`, such as "cuda", or the name of a device class that the user registered.
        index: the number that the vendor's tool gives the device. The MIG partitions (parts into which an NVIDIA card
            can be divided) of one card have the number of the card.
        name: the vendor's name of the model.
        memory_mib: the whole memory of the device in MiB; None if the tool does not report it.
        pin: the text that selects this device in the vendor's environment variable, such as `CUDA_VISIBLE_DEVICES`: an
            index, a UUID or core numbers. "" if no text selects the device.
        uuid: the vendor's unique id of the device; "" if unknown.
        pci_id: the PCI device id, such as "0x2330"; "" if unknown.
        profile: the profile (size) of a MIG partition, such as "1g.10gb"; "" for a whole card.
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
        """The accelerator in skypool's catalogue that this device is, with count 1; None if the catalogue lacks it."""
        from skypool.devices.catalogue_entry import identify  # imported here because few callers need the catalogue

        return identify(self)


@dataclass(frozen=True, slots=True)
class Stats:
    """Current state of a device. A field is None if the vendor's tool does not report its value.

    Attributes:
        memory_used_mib: used memory of the device in MiB.
        memory_total_mib: whole memory of the device in MiB.
        utilization_percent: load of the device in percent.
        temperature_celsius: temperature in degrees Celsius.
        power_watts: power draw in watts.
    """

    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Family:
    """Base class for objects that detect all devices of one kind (a family), such as the NVIDIA GPUs of this machine.

    For hardware that skypool does not know, write a subclass. It must implement `detect`; the other methods have
    defaults. On a machine without such devices or without the vendor's tool, `detect` returns an empty tuple, and
    `get_device_stats` returns None for each value; no error is raised.

    Attributes:
        kind: the kind of the devices, such as "cuda".
    """

    kind: str = ""

    def detect(self) -> tuple[Device, ...]:
        """Return every device of this kind that this process may use; an empty tuple if there is none.

        A subclass must implement this. The base class raises NotImplementedError.
        """
        raise NotImplementedError

    def is_available(self) -> bool:
        """Return True if this process may use at least one device of this kind.

        The devices are detected again at each call.
        """
        return bool(self.detect())

    def auto_device_count(self) -> int:
        """Return the number of devices of this kind that this process may use; 0 if there are none.

        The devices are detected again at each call.
        """
        return len(self.detect())

    def parse_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[int]:
        """Return the indices of the devices that a setting selects, in the order of the setting.

        Args:
            devices: the setting. "auto", -1, "-1" or None select all devices. A positive int is the number of devices
                to select, from the first on. "0,2" or [0, 2] select devices by index, so "2" selects the device with
                index 2. An empty list selects no device.

        Raises:
            UsageError: the setting has another form, is 0, or selects more devices or other devices than there are.
        """
        have = [device.index for device in self.detect()]
        if devices is None or devices in ("auto", -1, "-1"):
            return have
        if isinstance(devices, int):
            wanted = have[:devices] if 0 < devices <= len(have) else None
        else:
            wanted = _listed(devices)
        if wanted is None or not set(wanted) <= set(have):
            there = f"the {self.kind} devices with the indices {have}" if have else f"no {self.kind} devices"
            raise UsageError(
                f"devices={devices!r} cannot be selected: this machine has {there}; use 'auto', the number of devices "
                "or a list of indices"
            )
        return wanted

    def get_parallel_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[Device]:
        """Return the devices that a setting selects, in the order of the setting.

        Args:
            devices: the setting. "auto", -1, "-1" or None select all devices. A positive int is the number of devices
                to select, from the first on. "0,2" or [0, 2] select devices by index, so "2" selects the device with
                index 2. An empty list selects no device.

        Raises:
            UsageError: the setting has another form, is 0, or selects more devices or other devices than there are.
        """
        by_index = {device.index: device for device in self.detect()}
        return [by_index[index] for index in self.parse_devices(devices)]

    def get_device_stats(self, device: Device | int) -> Stats:
        """Return the current memory, utilization, temperature and power of a device.

        Values that the vendor's tool does not report are None. In the base class, all values are None.

        Args:
            device: the device, or the device's index.
        """
        return Stats()

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        """Return environment variables that make only some devices of this kind visible to a new process.

        In the base class, the result is {}, which hides no device.

        Args:
            pins: `Device.pin` of each device that is to be visible. Empty hides all devices of this kind.
        """
        return {}


def _listed(devices: str | Sequence[int]) -> list[int] | None:
    """Return the indices in a list, unchecked, or in a text such as "0,2". Return None for a text of another form."""
    if not isinstance(devices, str):
        return list(devices)
    words = [word.strip() for word in devices.split(",") if word.strip()]
    return [int(word) for word in words] if words and all(word.isdecimal() for word in words) else None


def index_of(device: Device | int) -> int:
    """Return the index of a device. An int is taken as the index and returned unchanged."""
    return device if isinstance(device, int) else device.index


def hardware(devices: Sequence[Device]) -> str:
    """Return the accelerators of a node as text, such as "8 NVIDIA H100 80GB HBM3"; "" if there are none."""
    names = [each.name or each.kind for each in devices if each.kind != "cpu"]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
