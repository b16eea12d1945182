"""Converts samples and health of a node into measurements. All functions are pure.

Arguments called `node` are the attributes that all measurements of a node have. `models` has the vendor's model name
of each device, by (kind, index).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skypool.devices.health import NodeHealth
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.metrics import names
from skypool.metrics.values import Attributes, Measurement, Metric

_MIB = float(1 << 20)
_MHZ = 1e6
_TYPE = {"hw.type": "gpu"}
"""The attribute `hw.type` of all devices. OpenTelemetry's conventions have no type for accelerators other than GPUs.

The attribute `skypool.device.kind` tells the kinds of devices apart.
"""
_STATES = {"ok": "ok", "degraded": "degraded", "unhealthy": "failed"}
"""The values of the metric `hw.status`, by the state of a device's health. The state "unknown" has none."""
_HEALTH = ("ok", "unknown", "degraded", "unhealthy")

Models = Mapping[tuple[str, int], str]
"""The vendor's name of the model of each device, by the kind and the index of the device."""


def node_measurements(sample: NodeSample, node: Attributes) -> Iterator[Measurement]:
    """Yield the measurements of a node itself, such as its CPUs and memory, without those of its devices.

    `node` has the attributes that all measurements of the node get.
    """
    values: list[tuple[Metric, float | None, float, Attributes]] = [
        (names.NODE_CPU_UTILIZATION, sample.cpu_percent, 0.01, {}),
        (names.NODE_MEMORY_USAGE, sample.memory_used_mib, _MIB, {}),
        (names.NODE_MEMORY_LIMIT, sample.memory_total_mib, _MIB, {}),
        (names.NODE_DISK_USAGE, sample.disk_used_mib, _MIB, {}),
        (names.NODE_DISK_LIMIT, sample.disk_total_mib, _MIB, {}),
        (names.NODE_DISK_TRAFFIC, sample.disk_read_mib, _MIB, {"disk.io.direction": "read"}),
        (names.NODE_DISK_TRAFFIC, sample.disk_written_mib, _MIB, {"disk.io.direction": "write"}),
        (names.NODE_NETWORK_TRAFFIC, sample.sent_mib, _MIB, {"network.io.direction": "transmit"}),
        (names.NODE_NETWORK_TRAFFIC, sample.received_mib, _MIB, {"network.io.direction": "receive"}),
    ]
    yield from _scaled(values, node)


def device_measurements(
    sample: NodeSample, health: NodeHealth | None, node: Attributes, models: Models
) -> Iterator[Measurement]:
    """Yield the measurements of a node's devices.

    `health` is None if it is not known. `node` has the attributes that all measurements of the node get. `models` has
    the vendor's model name of each device, by (kind, index).
    """
    judged = {(each.kind, each.index): each.state for each in health.devices} if health else {}
    for each in sample.devices:
        device = {**node, **_attributes(each.kind, each.index, each.uuid, models)}
        yield from _scaled(_values(each), device)
        for reason in each.throttled or ():
            yield Measurement(names.DEVICE_THROTTLED, 1, {**device, "skypool.reason": reason})
        found = judged.get((each.kind, each.index), "unknown")
        for state in _HEALTH:
            yield Measurement(names.DEVICE_HEALTH, int(state == found), {**device, "skypool.health": state})
        for state, word in _STATES.items():
            if found in _STATES:
                yield Measurement(names.STATUS, int(state == found), {**device, **_TYPE, "hw.state": word})


def _attributes(kind: str, index: int, uuid: str, models: Models) -> Attributes:
    """Return the attributes that tell a device from others: its kind, number, id and model. `uuid` is "" if unknown."""
    model = models.get((kind, index), "")
    return {
        "hw.id": uuid or f"{kind}-{index}",
        "hw.name": f"{kind} {index}",
        **({"hw.model": model} if model else {}),
        "skypool.device.kind": kind,
        "skypool.device.index": index,
    }


def _values(seen: DeviceSample) -> list[tuple[Metric, float | None, float, Attributes]]:
    """Return a device's values as tuples (metric, value, factor into the metric's unit, further attributes)."""
    used, total = seen.memory_used_mib, seen.memory_total_mib
    return [
        (names.GPU_UTILIZATION, seen.utilization_percent, 0.01, {"hw.gpu.task": "general"}),
        (names.GPU_MEMORY_USAGE, used, _MIB, {}),
        (names.GPU_MEMORY_LIMIT, total, _MIB, {}),
        (names.GPU_MEMORY_UTILIZATION, used / total if used is not None and total else None, 1, {}),
        (names.POWER, seen.power_watts, 1, _TYPE),
        (names.TEMPERATURE, seen.temperature_celsius, 1, _TYPE),
        (names.ERRORS, seen.ecc_corrected, 1, {**_TYPE, "error.type": "corrected"}),
        (names.ERRORS, seen.ecc_uncorrected, 1, {**_TYPE, "error.type": "uncorrected"}),
        (names.DEVICE_SM_ACTIVITY, seen.sm_activity_percent, 0.01, {}),
        (names.DEVICE_POWER_LIMIT, seen.power_limit_watts, 1, {}),
        (names.DEVICE_CLOCK, seen.sm_clock_mhz, _MHZ, {"skypool.clock": "sm"}),
        (names.DEVICE_CLOCK, seen.memory_clock_mhz, _MHZ, {"skypool.clock": "memory"}),
        (names.DEVICE_PCIE_TRAFFIC, seen.pcie_sent_mib, _MIB, {"network.io.direction": "transmit"}),
        (names.DEVICE_PCIE_TRAFFIC, seen.pcie_received_mib, _MIB, {"network.io.direction": "receive"}),
        (names.DEVICE_NVLINK_TRAFFIC, seen.nvlink_sent_mib, _MIB, {"network.io.direction": "transmit"}),
        (names.DEVICE_NVLINK_TRAFFIC, seen.nvlink_received_mib, _MIB, {"network.io.direction": "receive"}),
        (names.DEVICE_PCIE_LANES, seen.pcie_width, 1, {}),
        (names.DEVICE_PCIE_LANES_LIMIT, seen.pcie_width_max, 1, {}),
        (names.DEVICE_NVLINKS, seen.nvlinks, 1, {}),
        (names.DEVICE_NVLINKS_LIMIT, seen.nvlinks_all, 1, {}),
    ]


def _scaled(
    values: list[tuple[Metric, float | None, float, Attributes]], attributes: Attributes
) -> Iterator[Measurement]:
    """Yield a measurement of each value that was measured: the value times its factor, in the metric's unit."""
    for metric, value, factor, more in values:
        if value is not None:
            scaled = round(value / 100, 6) if factor == 0.01 else value * factor
            yield Measurement(metric, scaled, {**attributes, **more})


def xid_measurements(
    sample: NodeSample, xids: Mapping[tuple[str, int, str, int], int], node: Attributes, models: Models
) -> Iterator[Measurement]:
    """Yield the counts of NVIDIA's driver errors (XID codes) since the start of the pool.

    `xids` has the counts by (kind, index, uuid, code). Each device whose errors are watched also gets their sum. `node`
    has the attributes that all measurements of the node get. `models` has the vendor's model name of each device, by
    (kind, index).
    """
    sums = {(each.kind, each.index, each.uuid): 0 for each in sample.devices if each.xids_watched}
    for (kind, index, uuid, code), count in sorted(xids.items()):
        sums[kind, index, uuid] = sums.get((kind, index, uuid), 0) + count
        device = {**node, **_attributes(kind, index, uuid, models)}
        yield Measurement(names.DEVICE_XIDS, count, {**device, "skypool.xid": code})
    for (kind, index, uuid), count in sums.items():
        device = {**node, **_attributes(kind, index, uuid, models)}
        yield Measurement(names.ERRORS, count, {**device, **_TYPE, "error.type": "xid"})
