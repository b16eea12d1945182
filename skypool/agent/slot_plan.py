"""Plans a node: splits its devices among slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from skypool.agent.processes import usable_cpus
from skypool.devices import pinned
from skypool.devices.device import Device
from skypool.wire.agent_config import AgentConfig, NodeHealth, SlotPlan

GANG_PROCESSES = 128
"""The most processes of gangs that a node runs at once."""
GANG_ROWS = 2 * GANG_PROCESSES
"""The most slots that gangs and services have at once. A process may still be ending when the next one needs a slot."""


_CHOSEN_BY_INDEX = {"cuda", "rocm"}
"""The kinds of devices of which a program chooses one by its index among the devices that it sees."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Configuration and slots of one node, from which its agent starts.

    Attributes:
        config: what the client has configured.
        health: the state of the machine as the keeper found it, without free disk and clock.
        slots: the slots that share out the devices; on a node without devices, all slots.
        cpu_slots: the number of additional slots without devices; 0 on a node without devices.
        env: variables that are added to the environment of the agent and its workers.
        umask: the umask of calls. The agent itself has a stricter umask, which keeps other users from its files.
    """

    config: AgentConfig
    health: NodeHealth
    slots: tuple[SlotPlan, ...]
    cpu_slots: int
    env: Mapping[str, str] = field(repr=False)
    umask: int = 0o022

    @property
    def rows(self) -> int:
        """The number of slots of all kinds, including those that may be made for processes of gangs and services."""
        return len(self.slots) + self.cpu_slots + GANG_ROWS

    def shares(self, count: int) -> tuple[SlotPlan, ...]:
        """Return the shares of this node's devices that `count` processes of a gang get, in the order of the processes.

        The devices are split as among `count` slots. Without devices, each share is empty. Returns () if `count` is 0.
        """
        return plan_slots(count, self.health.devices, self.config.slice.hosts) if count else ()

    def index_among_all(self, share: SlotPlan, count: int) -> int | None:
        """Return the index of a process's device among all devices of this node, if the process is to see them all.

        Programs for torchrun choose the device with the index LOCAL_RANK themselves. So if each of the gang's `count`
        processes on this node has one GPU of its own, all of them see all GPUs. Returns None in all other cases: the
        process then sees only its own devices, those in `share`.
        """
        found = self.health.devices
        if len(found) != count or {each.kind for each in found} - _CHOSEN_BY_INDEX:
            return None
        return [_named(each) for each in found].index(share.devices[0])


def plan_slots(
    given: int | Literal["per-device"] | tuple[SlotPlan, ...] | None, devices: Sequence[Device], hosts: int = 1
) -> tuple[SlotPlan, ...]:
    """Return the slots that share out the devices of this node. Without devices, return all slots of the node.

    A TPU slice is one accelerator that spans several machines (hosts). If this node is a host of such a slice and its
    devices are not split, the result is one slot with all devices. Its variables do not select devices.

    Args:
        given: a tuple of slots is returned as it is. Otherwise the number of slots; "per-device" for one slot for each
            device; None for one slot with all devices. Without devices, "per-device" and None mean one slot for each
            CPU.
        hosts: how many hosts the TPU slice of this node has; 1 if it is not part of a larger slice.
    """
    if isinstance(given, tuple):
        return given
    if hosts > 1 and given in (None, 1):
        return (SlotPlan({}, tuple(_named(each) for each in devices)),)
    return share(devices, given)


def share(devices: Sequence[Device], slots: int | Literal["per-device"] | None) -> tuple[SlotPlan, ...]:
    """Split devices among slots, and return the slots.

    Each slot gets the same number of neighbouring devices. If the devices cannot be divided evenly, the first slots get
    one more. If there are more slots than devices, slot `i` uses device `i` modulo the number of devices.

    Args:
        slots: the number of slots; "per-device" for one slot for each device; None or 0 for one slot with all devices.
            Without devices, "per-device" and None both mean one slot for each CPU, and 0 means no slots.
    """
    if not devices:
        count = slots if isinstance(slots, int) else usable_cpus()
        return (SlotPlan(),) * count
    count = len(devices) if slots == "per-device" else slots or 1
    if count > len(devices):
        parts = [[devices[i % len(devices)]] for i in range(count)]
    else:
        each, more = divmod(len(devices), count)
        ends = [(i + 1) * each + min(i + 1, more) for i in range(count)]
        parts = [list(devices[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(SlotPlan(pinned(part), tuple(_named(device) for device in part)) for part in parts)


def _named(device: Device) -> str:
    """Return a device's name on its node, such as "cuda 0"."""
    return f"{device.kind} {device.pin}"
