"""Small bars of a node's measurements: utilisation, memory and power, as text for the live view and `skypool top`.

An unknown value is shown as "?" or "unknown", never as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skypool.devices.sample import DeviceSample, NodeSample

_HEIGHTS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "?"
BAR = 8
"""Number of characters of a horizontal bar. Up to as many devices have a bar each."""
_WATTS_IN_KW = 1000.0
_MIB_IN_GIB = 1024.0
_NAMES = {"cuda": "GPU", "rocm": "GPU", "tpu": "TPU", "neuron": "NC", "hpu": "HPU"}


@dataclass(frozen=True, slots=True)
class Gauge:
    """One measured quantity of a node.

    Attributes:
        name: such as "GPU", "mem" or "power".
        bars: "▇▆▅▂" with one character for each device, or "███░░░░░" for one value. "" if the quantity has no scale,
            or is unknown.
        text: the value as text, such as "61%", "272/640 GiB" or "unknown".
    """

    name: str
    bars: str
    text: str


def gauges(sample: NodeSample | None, most: int = BAR) -> list[Gauge]:
    """Return utilisation, memory and power, in this order: of a node's devices, or of its CPUs if it has no devices.

    `sample` is None if the node was not measured yet. Up to `most` devices have a bar each. More devices share one bar,
    and the text of the utilisation then has the lowest value, the highest and the mean.
    """
    if sample is None:
        return [Gauge(name, "", "unknown") for name in ("busy", "mem", "power")]
    if not sample.devices:
        load = _share(sample.cpu_percent, 100.0)
        memory = _memory([(sample.memory_used_mib, sample.memory_total_mib)], most)
        return [Gauge("CPU", bar(load), _percent(load)), memory, Gauge("power", "", "unknown")]
    kinds = {_NAMES.get(each.kind, each.kind) for each in sample.devices}
    name = kinds.pop() if len(kinds) == 1 else "busy"
    loads = [_share(each.utilization_percent, 100.0) for each in sample.devices]
    memory = _memory([(each.memory_used_mib, each.memory_total_mib) for each in sample.devices], most)
    return [Gauge(name, bars(loads, most), _percents(loads, most)), memory, _power(sample.devices, most)]


def bar(share: float | None, width: int = BAR) -> str:
    """Return a horizontal bar of `width` blocks for a share from 0 to 1, such as "███░░░░░"; "" for None (unknown).

    A share above 0 has at least one full block, and a share below 1 has at least one free block.
    """
    if share is None:
        return ""
    full = min(width, max(0, round(share * width)))
    if 0 < share < 1 and width > 1:
        full = min(width - 1, max(1, full))
    return "█" * full + "░" * (width - full)


def bars(shares: Sequence[float | None], most: int = BAR) -> str:
    """Return one bar for each share, such as "▇▆?▂", in which "?" is an unknown share; "" if all are unknown.

    A single share is drawn as a horizontal bar, such as "███░░░░░", and so is the mean of more than `most` shares.
    """
    known = [each for each in shares if each is not None]
    if not known:
        return ""
    if len(shares) == 1 or len(shares) > most:
        return bar(sum(known) / len(known))
    return "".join(_UNKNOWN if each is None else _height(each) for each in shares)


def _height(share: float) -> str:
    return _HEIGHTS[min(len(_HEIGHTS) - 1, max(0, int(share * len(_HEIGHTS))))]


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"


def _percents(shares: Sequence[float | None], most: int) -> str:
    """Return the mean of shares as text. If there are more than `most`, the lowest and the highest come first."""
    known = [each for each in shares if each is not None]
    if not known:
        return "unknown"
    mean = f"{sum(known) / len(known):.0%}"
    if len(shares) > most:
        mean = f"{min(known):.0%}-{max(known):.0%} mean {mean}"
    return mean + _missing(shares)


def _missing(values: Sequence[object]) -> str:
    """Return " of 7/8" if 1 of 8 values is unknown, as a mark on their sum or mean; "" if all are known."""
    known = sum(each is not None for each in values)
    return "" if known == len(values) else f" of {known}/{len(values)}"


def _memory(pairs: Sequence[tuple[float | None, float | None]], most: int) -> Gauge:
    """Return the gauge of the memory of all devices, from a pair (used MiB, total MiB) for each."""
    known = [(used, whole) for used, whole in pairs if used is not None and whole]
    if not known:
        return Gauge("mem", "", "unknown")
    used, whole = (sum(column) / _MIB_IN_GIB for column in zip(*known, strict=True))
    shares = [_share(each, whole) for each, whole in pairs]
    digits = 0 if whole >= 100 else 1
    return Gauge("mem", bars(shares, most), f"{used:.{digits}f}/{whole:.0f} GiB{_missing(shares)}")


def _power(devices: Sequence[DeviceSample], most: int) -> Gauge:
    drawn = [each.power_watts for each in devices]
    known = [each for each in drawn if each is not None]
    if not known:
        return Gauge("power", "", "unknown")
    shares = [_share(each.power_watts, each.power_limit_watts) for each in devices]
    return Gauge("power", bars(shares, most), f"{_watts(sum(known))}{_missing(drawn)}")


def _watts(watts: float) -> str:
    return f"{watts:.0f} W" if watts < _WATTS_IN_KW else f"{watts / _WATTS_IN_KW:.1f} kW"


def usd(amount: float | None) -> str:
    """Return an amount in US dollars with 2 decimals, or with 4 below 1 dollar. "unknown" for None."""
    if amount is None:
        return "unknown"
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.4f}"
