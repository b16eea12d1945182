"""The values of one sample: of a node, its devices, and the calls that run there.

A value that could not be measured is None, never 0. So is a value that cannot be true, such as a negative one: some
drivers report -1, or the largest number, for what they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

_MOST = 1e15
"""The limit that every number of a sample must stay below."""
_PLAUSIBLE = {
    "percent": (0.0, 100.5),
    "celsius": (-100.0, 300.0),
    "mib": (0.0, 1e12),
    "watts": (0.0, 1e5),
    "mhz": (0.0, 1e5),
    "width": (0, 1 << 10),
    "max": (0, 1 << 10),
    "nvlinks": (0, 1 << 10),
    "all": (0, 1 << 10),
}
"""A dict from the last word of a field's name to the least and the largest number that can be true in such a field."""
_PARTS = (("memory_used_mib", "memory_total_mib"), ("disk_used_mib", "disk_total_mib"))
"""Pairs (field, limiting field). A value above 1.01 times (`_ROUNDED`) that of the limiting field counts as unknown."""
_ROUNDED = 1.01
_LONGEST = 256
"""The most characters of a text in a sample. Longer texts are cut."""
_MANY = 64
"""The most devices, and the most calls, in one sample, and the most entries of each list in a `DeviceSample`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Measurement of a device. A value is None if the device or its vendor's library does not report it.

    `pcie_sent_mib`, `pcie_received_mib`, `nvlink_sent_mib` and `nvlink_received_mib` are rates in MiB per second. Those
    of NVLink are the sum over all links.

    Attributes:
        kind: the kind of the device, such as "cuda".
        index: the number that the vendor's tool gives the device.
        uuid: the vendor's unique id of the device; "" if unknown.
        unknown: why no values could be read from the device, such as "the monitor hangs"; "" if they were read.
        lost: True if the driver reports that the device is no longer reachable.
        utilization_percent: the share of time in which at least one kernel (a program on the GPU) ran, however small.
        sm_activity_percent: the share of the streaming multiprocessors that were busy (NVIDIA H100 and later).
        power_limit_watts: the most power that the driver lets the device draw.
        throttled: why the clocks are lower than asked for, such as "power cap"; () if they are not.
        pcie_width: the number of PCIe lanes in use.
        pcie_width_max: the number of PCIe lanes that device and slot support.
        nvlinks: the number of active NVLinks; 0 for a device without NVLink.
        nvlinks_all: the number of NVLinks that the device has, active or not.
        ecc_corrected: the number of memory errors that were corrected since the driver was loaded.
        ecc_uncorrected: the number of memory errors since then that could not be corrected.
        remap_pending: True if a faulty row of memory will be replaced at the next reset.
        remap_failed: True if a faulty row of memory could not be replaced.
        recovery: the number of the action that the driver recommends, as NVML's `GPU_RECOVERY_ACTION` counts them: 0
            for none, 1 for a reset of the GPU.
        xids: the XID codes (errors that NVIDIA's driver reports) since the previous sample, in order.
        xids_watched: False if the driver does not report XID codes.
        memory_of: a dict from process id on the node to the device memory in MiB that the process uses.
    """

    kind: str
    index: int
    uuid: str = ""
    unknown: str = ""
    lost: bool = False
    utilization_percent: float | None = None
    sm_activity_percent: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttled: tuple[str, ...] | None = None
    pcie_sent_mib: float | None = None
    pcie_received_mib: float | None = None
    nvlink_sent_mib: float | None = None
    nvlink_received_mib: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    nvlinks_all: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery: int | None = None
    xids: tuple[int, ...] = ()
    xids_watched: bool = False
    memory_of: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class CallSample:
    """Measurement of a call of a function that is running on a node. A call that ends within a second may have none.

    Attributes:
        id: the id of the call on its node.
        name: the name of the call.
        slot: the number of the place on the node where the call runs. Each slot runs one call at a time.
        wall_seconds: how long the call has run.
        cpu_seconds: CPU time of the call's process since the call's first sample; None in the first sample. The time of
            a child process counts after the child has ended.
        rss_mib: main memory that the call's process uses.
        peak_rss_mib: the largest `rss_mib` so far.
        device_memory_mib: device memory of the call's process; None if the vendor's library does not tell the memory of
            single processes.
    """

    id: int
    name: str
    slot: int
    wall_seconds: float
    cpu_seconds: float | None = None
    rss_mib: float | None = None
    peak_rss_mib: float | None = None
    device_memory_mib: float | None = None


@dataclass(frozen=True, slots=True)
class NodeSample:
    """Measurement of a node with its devices and the calls that run there.

    Rates are in MiB per second: averages since the previous sample, and None in the first one. Disk rates are of all
    disks, and network rates of all interfaces but loopback.

    Attributes:
        node: the number of the node in its pool.
        time: the time of the measurement by the node's clock, in seconds since 1970.
        claimed: True if the node is not trusted (`trust="data"`), so that its owner may have invented the values.
        cpu_percent: used CPU time of the whole machine, 100 if all CPUs are busy.
        disk_used_mib: used space on the disk of the folder in which calls run.
        disk_total_mib: size of that disk.
        disk_read_mib: read rate of all disks of the machine, as in `/proc/diskstats`. Other containers on the machine
            are included. None if unknown, or if the machine has no disks of its own, as some virtual machines.
        disk_written_mib: write rate of all disks of the machine, with the same exceptions.
        sent_mib: rate at which the machine sends on the network.
        received_mib: rate at which the machine receives from the network.
        devices: samples of the node's devices, at most 64.
        calls: calls that run on the node, at most 64.
    """

    node: int = 0
    time: float = 0.0
    claimed: bool = False
    cpu_percent: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    disk_used_mib: float | None = None
    disk_total_mib: float | None = None
    disk_read_mib: float | None = None
    disk_written_mib: float | None = None
    sent_mib: float | None = None
    received_mib: float | None = None
    devices: tuple[DeviceSample, ...] = ()
    calls: tuple[CallSample, ...] = ()


def to_json(sample: NodeSample | DeviceSample | CallSample) -> dict[str, Any]:
    """Return a sample as a dict for JSON. Fields that have their default value are left out."""
    said: dict[str, Any] = {}
    for name, default in _DEFAULTS[type(sample)]:
        value = getattr(sample, name)
        if value is default or value == default:
            continue
        if type(value) is float:
            value = round(value, 3)
        elif type(value) is tuple:
            value = [to_json(one) for one in value] if name in _NESTED else list(value)
        said[name] = value
    return said


def node_sample(said: object, printable: Callable[[str], str] = str) -> NodeSample:
    """Return the sample in a JSON value that comes from an untrusted node. Check each field, and ignore unknown ones.

    A measured number that cannot be true becomes None.

    Args:
        said: the value, in the form that `to_json` returns.
        printable: removes control characters from a text.

    Raises:
        ValueError: a field is missing or has another type, or a list or another number is out of bounds.
    """
    return _read(NodeSample, said, printable)


def _read(kind: type[T], said: object, printable: Callable[[str], str]) -> T:
    if type(said) is not dict:
        raise ValueError(f"a {kind.__name__} must be a JSON object, not {type(said).__name__}")
    checks = _CHECKS_OF[kind]
    given: dict[str, Any] = {}
    for name, value in said.items():
        if value is not None and (check := checks.get(name)):
            given[name] = check(name, value, printable)
    for part, whole in _PARTS_OF[kind]:
        if (most := given.get(whole)) is not None and (used := given.get(part)) is not None and used > most * _ROUNDED:
            given[part] = None
    try:
        return kind(**given)
    except TypeError as e:
        raise ValueError(f"a {kind.__name__} lacks a field: {e}") from e


def _listed(name: str, value: object) -> list[Any]:
    if type(value) is not list or len(value) > _MANY:
        raise ValueError(f"the field {name!r} must be a list of at most {_MANY} entries")
    return value


def _devices(name: str, value: object, printable: Callable[[str], str]) -> tuple[DeviceSample, ...]:
    return tuple(_read(DeviceSample, one, printable) for one in _listed(name, value))


def _calls(name: str, value: object, printable: Callable[[str], str]) -> tuple[CallSample, ...]:
    return tuple(_read(CallSample, one, printable) for one in _listed(name, value))


def _memory_of(name: str, value: object, printable: Callable[[str], str]) -> dict[str, float]:
    if type(value) is not dict or len(value) > _MANY:
        raise ValueError(f"the field {name!r} must be an object of at most {_MANY} entries")
    if not all(len(pid) < 20 and pid.isdecimal() for pid in value):
        raise ValueError(f"the field {name!r} must be an object with process ids")
    read = {pid: _measured("memory_used_mib", mib, printable) for pid, mib in value.items()}
    return {pid: mib for pid, mib in read.items() if mib is not None}


def _number(name: str, value: object, _: Callable[[str], str]) -> float:
    if (type(value) is not float and type(value) is not int) or not 0 <= value < _MOST:  # also refuses NaN
        raise ValueError(f"the field {name!r} is no number from 0 to {_MOST:g}")
    return float(value)


def _measured(name: str, value: object, _: Callable[[str], str]) -> float | None:
    """Return a measured number of the field `name`; None if `_LIMITS` says that it cannot be true."""
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"the field {name!r} is no number")
    least, most = _LIMITS[name]
    return float(value) if least <= value <= most else None  # NaN is neither


def _counted(name: str, value: object, _: Callable[[str], str]) -> int | None:
    """Return a whole number of the field `name`; None if `_LIMITS` says that it cannot be true."""
    if type(value) is not int:
        raise ValueError(f"the field {name!r} is no whole number")
    least, most = _LIMITS[name]
    return value if least <= value <= most else None


def _whole(name: str, value: object, _: Callable[[str], str]) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"the field {name!r} is no whole number within bounds")
    return value


def _flag(name: str, value: object, _: Callable[[str], str]) -> bool:
    if type(value) is not bool:
        raise ValueError(f"the field {name!r} is neither true nor false")
    return value


def _text(name: str, value: object, printable: Callable[[str], str]) -> str:
    if type(value) is not str:
        raise ValueError(f"the field {name!r} is no text")
    text = printable(value[:_LONGEST])
    return text if text.isprintable() else " ".join(text.split())  # one line, so that it cannot look like others


def _texts(name: str, value: object, printable: Callable[[str], str]) -> tuple[str, ...]:
    return tuple(_text(name, each, printable) for each in _listed(name, value))


def _wholes(name: str, value: object, printable: Callable[[str], str]) -> tuple[int, ...]:
    listed = _listed(name, value)
    if {*map(type, listed)} <= {int} and min(listed, default=0) >= 0 and max(listed, default=0) < 1 << 63:
        return tuple(listed)
    return tuple(_whole(name, each, printable) for each in listed)  # raises


_Check = Callable[[str, object, Callable[[str], str]], Any]
"""A function that checks a field and returns its value. It raises ValueError for a wrong value.

Its arguments are the field's name, the JSON value, and a function that removes control characters from a text.
"""
_CHECKS: dict[str, _Check] = {
    "float": _number,
    "float | None": _measured,
    "int": _whole,
    "int | None": _counted,
    "bool": _flag,
    "str": _text,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _wholes,
    "tuple[DeviceSample, ...]": _devices,
    "tuple[CallSample, ...]": _calls,
    "Mapping[str, float]": _memory_of,
}
"""A dict from the type of a field, as text, to the function that checks such a field."""
_NESTED = ("devices", "calls")
"""The fields of a `NodeSample` that are tuples of other samples."""
_KINDS: tuple[type[NodeSample | DeviceSample | CallSample], ...] = (NodeSample, DeviceSample, CallSample)
_CHECKS_OF: dict[type[Any], dict[str, _Check]] = {
    kind: {
        each.name: _CHECKS.get(str(each.type)) or _CHECKS[str(each.type).removesuffix(" | None")]
        for each in fields(kind)
    }
    for kind in _KINDS
}
"""A dict from class of samples to a dict from field to the function that checks the field.

This and the next tables are made once, because samples come each second.
"""
_LIMITS: dict[str, tuple[float, float]] = {
    each.name: _PLAUSIBLE.get(each.name.rpartition("_")[2], (0, _MOST if "float" in str(each.type) else (1 << 63) - 1))
    for kind in _KINDS
    for each in fields(kind)
}
"""A dict from field to the least and the largest number that can be true."""
_PARTS_OF: dict[type[Any], tuple[tuple[str, str], ...]] = {
    kind: tuple(pair for pair in _PARTS if pair[0] in _CHECKS_OF[kind]) for kind in _KINDS
}
"""A dict from class of samples to those pairs of `_PARTS` whose fields the class has."""
_DEFAULTS: dict[type[Any], tuple[tuple[str, Any], ...]] = {
    kind: tuple((each.name, each.default) for each in fields(kind)) for kind in _KINDS
}
"""A dict from class of samples to the pairs (name, default value) of its fields."""
