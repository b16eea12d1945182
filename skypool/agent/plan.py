"""The plan of a node: its configuration, what its machine is, and how its devices are split among slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from skypool.agent.processes import usable_cpus
from skypool.devices import pinned
from skypool.devices.device import Device
from skypool.wire.handshake import AgentConfig, NodeHealth, SlotPlan


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What an agent works by.

    Attributes:
        config: what its client sent.
        health: what the keeper found on the machine, without disk and clock.
        slots: those that have the node's devices; without devices, all.
        cpu_slots: how many slots without devices there are beside them.
        env: environment of the agent and its workers.
    """

    config: AgentConfig
    health: NodeHealth
    slots: tuple[SlotPlan, ...]
    cpu_slots: int
    env: Mapping[str, str] = field(repr=False)


def plan_slots(
    given: int | Literal["per-device"] | tuple[SlotPlan, ...] | None, devices: Sequence[Device], hosts: int = 1
) -> tuple[SlotPlan, ...]:
    """Return the slots of this node that calls run on unless they ask for no device.

    A host of a slice whose devices are not split sees the slice as the machine knows it: chips that are pinned would
    form a slice of their own.
    """
    if isinstance(given, tuple):
        return given
    if hosts > 1 and given in (None, 1):
        return (SlotPlan({}, tuple(_named(each) for each in devices)),)
    return share(devices, given)


def share(devices: Sequence[Device], slots: int | Literal["per-device"] | None) -> tuple[SlotPlan, ...]:
    """Deal devices out among slots.

    Each slot gets neighbouring devices, the same number each. Where that does not come out even, the first slots get
    one more. With more slots than devices, slot `i` shares device `i` modulo their number.

    Args:
        slots: how many; "per-device" for one for each device; None for one with all devices. Without devices, both
            mean one for each CPU.
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
    """Return a device's name among those of its node."""
    return f"{device.kind} {device.pin}"
