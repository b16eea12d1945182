"""What it costs to read results as data only, beside unpickling them."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from skypool.trust.classes import Allowed
from skypool.trust.encoding import write
from skypool.trust.reader import DataReader
from skypool.wire import codec

Row = tuple[str, str, str, str]


@dataclass
class Point:
    x: float
    y: float


VALUES: dict[str, object] = {
    "a number": 3,
    "a dict of two": {"loss": 0.5, "step": 3},
    "an array of 8 MB": np.zeros(1_000_000),
    "100 small arrays": [np.arange(5.0) for _ in range(100)],
    "a million numbers": list(range(10**6)),
    "100,000 dicts": [{"id": n, "name": str(n)} for n in range(100_000)],
    "100,000 tuples as keys": {(n, n): n for n in range(100_000)},
    "10,000 data classes": [Point(n, n) for n in range(10_000)],
}


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    reader = DataReader(0)
    for what, value in VALUES.items():
        buffers = codec.dumps(value)
        written = write(value, Allowed())
        full = _seconds(partial(codec.loads, buffers))
        data = _seconds(partial(reader.value, written, "it"))
        yield (
            f"reading {what} as data",
            f"{data * 1e6:,.1f} us",
            f"{full * 1e6:,.1f} us unpickled",
            f"{data / full:.1f}",
        )


def _seconds(run: Callable[[], object]) -> float:
    """The best of some."""
    timer = timeit.Timer(run)
    number = max(1, timer.autorange()[0] // 5)
    return min(timer.repeat(5, number)) / number
