"""Judges devices by their samples. All functions are pure: they use no clock, no file and no network.

The states are "unhealthy" (the node gets no more calls), "degraded" (it works, with a defect), "unknown" (a check could
not be made) and "ok" (every check was made, and found nothing). A check that cannot be made is never "ok".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from skypool.devices import xid
from skypool.devices.sample import DeviceSample, NodeSample

State = Literal["ok", "unknown", "degraded", "unhealthy"]
_WORST: tuple[State, ...] = ("unhealthy", "degraded", "unknown", "ok")
"""The states from the worst to the best. The worst state of its findings is the state of a device or a node."""
_DRAIN_P2P = 3
"""NVML's recovery action "drain P2P": the GPU works, but its connections to other GPUs must not be used."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The health of one device. `reasons` says which defects were found and which checks could not be made."""

    kind: str
    index: int
    state: State
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """The health of a node, whose state is that of its worst device.

    `claimed` is True if the node is not trusted, so that its owner may have invented the values of its samples.
    """

    node: int
    state: State
    devices: tuple[DeviceHealth, ...] = ()
    claimed: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of those devices whose state is that of the node, each as "KIND INDEX: REASON"."""
        return tuple(
            f"{each.kind} {each.index}: {reason}"
            for each in self.devices
            if each.state == self.state
            for reason in each.reasons
        )


@dataclass(frozen=True, slots=True)
class _Past:
    """What earlier samples of a device showed.

    Attributes:
        ecc_uncorrected: the number of uncorrected memory errors in the first sample that reported it; None if none did.
        nvlinks: the largest number of active NVLinks in a sample so far.
        found: findings that count in all later samples, as pairs (state, reason), such as those of XID codes.
    """

    ecc_uncorrected: int | None = None
    nvlinks: int = 0
    found: tuple[tuple[State, str], ...] = ()


_MOST_DEVICES = 64
"""The most devices of a node that are remembered. The limit saves memory: an untrusted node may claim any number."""
_LOST: tuple[State, str] = ("unhealthy", "the device is lost: its driver cannot reach it any more")


class HealthOfNode:
    """The health of one node, judged again with each of its samples. Some findings count in all later samples, too."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, int], _Past] = {}
        self._judged: dict[tuple[str, int], tuple[tuple[object, ...], DeviceHealth]] = {}

    def judge(self, sample: NodeSample) -> NodeHealth:
        """Return the health of the node after a sample. The samples must come in the order of their times.

        Some findings count in all later samples, too: XID codes, memory errors that have increased, lost devices and
        lost NVLinks. Only a reset of the GPU can mend these, and the pool never resets one.
        """
        devices = []
        for each in sample.devices:
            key = (each.kind, each.index)
            seen = _relevant(each)
            known = self._judged.get(key)
            # nothing has changed, as in most samples
            if known is not None and known[0] == seen and _NOT_HARMLESS.isdisjoint(each.xids):
                devices.append(known[1])
                continue
            past = _remembered(self._past.get(key, _Past()), each)
            found = judge(each, past.found)
            devices.append(found)
            if key in self._past or len(self._past) < _MOST_DEVICES:
                self._past[key] = past
                self._judged[key] = seen, found
        return NodeHealth(sample.node, worst([each.state for each in devices]), tuple(devices), sample.claimed)


_relevant = attrgetter(
    "unknown", "lost", "recovery", "remap_failed", "remap_pending", "ecc_uncorrected", "pcie_width", "pcie_width_max",
    "nvlinks", "nvlinks_all", "xids_watched",
)  # fmt: skip
"""Returns the values of a `DeviceSample` that decide about the device's health, except for the XID codes."""


_NOT_HARMLESS = {*xid.FATAL, *xid.SERIOUS, xid.ACTION_CHANGED}
"""The XID codes for which `_state_of` may return a state."""


def worst(states: Sequence[State]) -> State:
    """Return the worst of the states; "unknown" if there are none."""
    for state in _WORST:
        if state in states:
            return state
    return "unknown"


def _remembered(past: _Past, seen: DeviceSample) -> _Past:
    found = dict.fromkeys(past.found)
    for code in seen.xids:
        if state := _state_of(code, seen):
            found[state, f"XID {code}: {xid.meaning(code)}"] = None
    if seen.lost:
        found[_LOST] = None
    before = past.ecc_uncorrected
    now = seen.ecc_uncorrected
    if before is not None and now is not None and now > before:
        found["unhealthy", "memory errors that could not be corrected have increased while the pool ran"] = None
    if seen.nvlinks is not None and seen.nvlinks < past.nvlinks:
        found["unhealthy", "an NVLink that was active is down"] = None
    return replace(
        past,
        ecc_uncorrected=before if before is not None else now,
        nvlinks=max(past.nvlinks, seen.nvlinks or 0),
        found=tuple(found),
    )


def _state_of(code: int, seen: DeviceSample) -> State | None:
    """Return the state that an XID code causes; None for a harmless one. 154 is harmless if `seen` has `recovery`."""
    if code in xid.FATAL:
        return "unhealthy"
    if code in xid.SERIOUS:
        return "degraded"
    if code == xid.ACTION_CHANGED and seen.recovery is None:
        return "unhealthy"
    return None


def judge(seen: DeviceSample, found: Sequence[tuple[State, str]] = ()) -> DeviceHealth:
    """Return a device's health after the sample `seen`.

    `found` has the findings of earlier samples that still count, as pairs (state, reason).
    """
    findings = [*found]
    if seen.lost:
        findings += [_LOST] if _LOST not in findings else []
    elif seen.unknown:
        findings.append(("unknown", seen.unknown))
    else:
        findings += _findings(seen)
    state = worst([state for state, _ in findings] or ["ok"])
    order: Mapping[str, int] = {each: place for place, each in enumerate(_WORST)}
    reasons = [reason for _, reason in sorted(findings, key=lambda each: order[each[0]])]
    return DeviceHealth(seen.kind, seen.index, state, tuple(reasons))


def _findings(seen: DeviceSample) -> list[tuple[State, str]]:
    """Return pairs (state, reason): what a sample shows about a device that is not lost and could be read."""
    found: list[tuple[State, str]] = []
    if seen.recovery is not None and seen.recovery != 0:
        state: State = "degraded" if seen.recovery == _DRAIN_P2P else "unhealthy"
        found.append((state, f"the driver recommends {_ACTIONS.get(seen.recovery, 'an action')}"))
    if seen.remap_failed:
        found.append(("unhealthy", "a faulty row of memory could not be replaced"))
    if seen.remap_pending:
        found.append(("degraded", "a faulty row of memory will be replaced at the next reset"))
    if seen.ecc_uncorrected:
        text = f"{seen.ecc_uncorrected} memory errors could not be corrected since the driver was loaded"
        found.append(("degraded", text))
    if seen.pcie_width is not None and seen.pcie_width_max is not None and seen.pcie_width < seen.pcie_width_max:
        found.append(("degraded", f"PCIe has {seen.pcie_width} lanes of {seen.pcie_width_max}"))
    if seen.nvlinks is not None and seen.nvlinks_all is not None and 0 < seen.nvlinks < seen.nvlinks_all:
        found.append(("degraded", f"{seen.nvlinks} of {seen.nvlinks_all} NVLinks are active"))
    if seen.nvlinks == 0 and seen.nvlinks_all:
        found.append(("unknown", f"none of {seen.nvlinks_all} NVLinks is active: they are down, or have no bridge"))
    unmade = [name for name, value in _checks(seen).items() if value is None]
    if unmade:
        found.append(("unknown", f"not reported by the device or its driver: {', '.join(unmade)}"))
    return found


_ACTIONS = {
    1: "a reset of the GPU",
    2: "a restart of the machine",
    3: "not to use its connections to other GPUs",
    4: "to end all work and reset the GPU",
    5: "to recover the IMEX domain",
    6: "a reset of the bus",
    7: "a restart of the system",
}


def _checks(seen: DeviceSample) -> dict[str, object]:
    """Return a dict from the name of a check to the value that it needs. None: the check cannot be made."""
    return {
        "XID codes": seen.xids_watched or None,
        "memory errors (ECC)": seen.ecc_uncorrected,
        "row remapping": seen.remap_failed,
        "PCIe width": seen.pcie_width if seen.pcie_width_max is not None else None,
        "NVLink": seen.nvlinks,
    }
