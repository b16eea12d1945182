"""Reads devices of AMD, AWS, Google and Intel with the vendors' tools, which report less than NVML and are slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from skypool import devices
from skypool.devices.sample import DeviceSample


def read(wanted: Sequence[tuple[str, int, str]]) -> list[DeviceSample]:
    """Return a sample of each device. Blocks for up to 20 s for each run of a vendor's tool.

    `wanted` has a triple (kind, index, uuid) for each device to read.
    """
    return [_read(kind, index, uuid) for kind, index, uuid in wanted]


def _read(kind: str, index: int, uuid: str) -> DeviceSample:
    stats = devices.family(kind).get_device_stats(index)
    if not any(value is not None for value in astuple(stats)):
        return DeviceSample(kind, index, uuid, unknown="no tool on the node reports the state of this device")
    return DeviceSample(
        kind,
        index,
        uuid,
        utilization_percent=stats.utilization_percent,
        memory_used_mib=stats.memory_used_mib,
        memory_total_mib=stats.memory_total_mib,
        power_watts=stats.power_watts,
        temperature_celsius=stats.temperature_celsius,
    )
