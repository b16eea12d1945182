"""A map of short calls on many nodes of this machine beside the same map on two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import skypool as sky

Row = tuple[str, str, str, str]
COUNT = 100_000
ROUNDS = 5
MANY = (8, 32, 64)


@sky.compute
def same(x: Any) -> Any:
    return x


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    with sky.ComputePool(nodes=2, slots=1, console="off") as few:
        for nodes in MANY:
            with sky.ComputePool(nodes=nodes, slots=1, console="off") as many:
                ours, two = _rates(many, few)
            ratio = f"{ours / two:.2f} (≥ 0.5)"
            yield f"map of {COUNT:,} no-ops, {nodes} nodes", f"{ours:,.0f} calls/s", f"{two:,.0f} on 2 nodes", ratio


def _rates(*pools: sky.ComputePool) -> list[float]:
    """Return the median rate of each pool in calls per second. The pools take turns."""
    for pool in pools:
        list(pool.map(same, range(2000)))
    rates: list[list[float]] = [[] for _ in pools]
    for _ in range(ROUNDS):
        for pool, found in zip(pools, rates, strict=True):
            began = time.perf_counter()
            for _value in pool.map(same, range(COUNT)):
                pass
            found.append(COUNT / (time.perf_counter() - began))
    return [statistics.median(found) for found in rates]
