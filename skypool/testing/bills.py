"""`billed`, which computes the bill of a fake cloud from the log of events that the cloud writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

_HOUR = 3600.0


def billed(events: Iterable[str], ids: Sequence[str]) -> float:
    """Return what machines cost in USD, by the lines of the file `events` of the cloud. Live machines are left out.

    Each moment costs the price that was valid then. A machine is billed for at least its minimum time. The setting
    `billing` of the cloud says where that time begins: at the machine's creation, or at the end of its boot. In the
    second case, a machine that never booted costs nothing.
    """
    usd = 0.0
    begins: dict[str, float | None] = {}
    least: dict[str, float] = {}
    prices: dict[str, list[tuple[float, float]]] = {}
    for event in map(json.loads, events):
        name, at = event["machine"], event["at"]
        if name not in ids:
            continue
        if event["event"] == "made":
            begins[name] = at if event["billing"] == "create" else None
            least[name] = event["least"]
            prices[name] = [(at, event["usd_per_hour"])]
        elif event["event"] == "running" and begins[name] is None:
            begins[name] = at
        elif event["event"] == "price":
            prices[name].append((at, event["usd_per_hour"]))
        elif event["event"] == "ended" and (begin := begins[name]) is not None:
            usd += _between(prices[name], begin, max(at, begin + least[name]))
    return usd


def _between(prices: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the cost in USD of one machine between two times. `prices` are (valid since, USD per hour), in order."""
    later = [since for since, _ in prices[1:]] + [end]
    return sum(
        max(0.0, min(until, end) - max(since, begin)) * usd / _HOUR
        for (since, usd), until in zip(prices, later, strict=True)
    )
