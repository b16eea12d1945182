"""`Device` (one accelerator), `Stats` (its current state), and `Family`, the base class of all kinds of devices."""

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

    On systems without CPU affinity, such as macOS, these are all cores of the machine.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine, described with the values that its vendor's tool reports.

    Attributes:
        kind: the family: "cuda", "rocm", "neuron", "tpu", "hpu", "mps", "cpu" or a registered name.
        index: the number that the vendor's tool gives the device. The MIG partitions of one card share the card's
            number.
        name: the vendor's name for the model.
        memory_mib: the whole memory of the device in MiB; None if the tool does not report it.
        pin: the text that selects this device in the family's environment variable: an index, a UUID or core numbers.
        uuid: the vendor's unique id; "" if unknown.
        pci_id: the PCI device id, such as "0x2330"; "" if unknown.
        profile: the profile of a MIG partition, such as "1g.10gb"; "" for a whole card.
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
        """Return the catalogue's accelerator for this device, with count 1.

        Returns None if the catalogue does not know the device.
        """
        from skypool.devices.identity import identify  # imported here because few callers need the catalogue

        return identify(self)


@dataclass(frozen=True, slots=True)
class Stats:
    """The current state of a device. A field is None if the vendor's tool does not report it.

    Attributes:
        memory_used_mib: used memory in MiB.
        memory_total_mib: whole memory in MiB.
        utilization_percent: load from 0 to 100.
        temperature_celsius: temperature in degrees Celsius.
        power_watts: power draw in watts.
    """

    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Family:
    """One kind of device, such as all NVIDIA GPUs. Subclass it for your own hardware; only `detect` must be written.

    No method fails on a machine without such devices or without the vendor's tool: the result is then that of no
    devices. The base class itself has no devices: its `detect` raises NotImplementedError.
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
            devices: "auto", -1, "-1" or None select all devices. A positive int selects that many, from the first.
                "0,2" or [0, 2] select devices by index, so "2" is the device with index 2. An empty list selects none.

        Raises:
            UsageError: the setting cannot be read, is 0, or selects more devices or other devices than there are.
        """
        have = [device.index for device in self.detect()]
        if devices is None or devices in ("auto", -1, "-1"):
            return have
        if isinstance(devices, int):
            wanted = have[:devices] if 0 < devices <= len(have) else None
        else:
            wanted = _listed(devices)
        if wanted is None or not set(wanted) <= set(have):
            raise UsageError(
                f"devices={devices!r} asks for {self.kind} devices that do not exist here; this machine has "
                f"{have or 'none'}"
            )
        return wanted

    def get_parallel_devices(self, devices: int | str | Sequence[int] | None = "auto") -> list[Device]:
        """Return the devices that a setting selects, in the order of the setting.

        Args:
            devices: as `parse_devices` takes it.

        Raises:
            UsageError: the setting cannot be read, or selects devices that do not exist.
        """
        by_index = {device.index: device for device in self.detect()}
        return [by_index[index] for index in self.parse_devices(devices)]

    def get_device_stats(self, device: Device | int) -> Stats:
        """Return the current memory, utilization, temperature and power of a device.

        Values that the vendor's tool does not report are None. The base class reports none, so all are None.

        Args:
            device: the device, or its index.
        """
        return Stats()

    def visible_env(self, pins: Sequence[str]) -> dict[str, str]:
        """Return environment variables that show a new process only the devices with these pins (`Device.pin`).

        With an empty list, they hide all devices of this kind. The base class returns an empty dict, which hides
        nothing.
        """
        return {}


def _listed(devices: str | Sequence[int]) -> list[int] | None:
    """Return the indices in a list, or in a text such as "0,2", in the same order.

    Returns None if the text is empty or contains anything but whole numbers from 0. A list is not checked.
    """
    if not isinstance(devices, str):
        return list(devices)
    words = [word.strip() for word in devices.split(",") if word.strip()]
    return [int(word) for word in words] if words and all(word.isdecimal() for word in words) else None


def index_of(device: Device | int) -> int:
    """Return the vendor's number of a device, which is given as a `Device` or as that number.

    A number is returned as it is, even if no such device exists.
    """
    return device if isinstance(device, int) else device.index
