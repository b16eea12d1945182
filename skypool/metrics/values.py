"""The values of metrics: `Metric` says what is measured, and `Measurement` is one measured value of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "updown", "gauge", "histogram"]
"""The kind of a metric, as OpenTelemetry has them.

A "counter" only grows. An "updown" (UpDownCounter) is a sum that may also shrink. A "gauge" is a value that it makes no
sense to add up, such as a temperature. A "histogram" counts values by their size.
"""
Attributes = Mapping[str, str | int | bool]
"""The attributes of a measurement, such as its pool and node. Prometheus calls them labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Something that is measured.

    Attributes:
        name: the name in OpenTelemetry's spelling, such as "hw.gpu.utilization".
        unit: the unit in UCUM, the code of units that OpenTelemetry uses, such as "By", "s" or "1". Text in braces,
            such as "{call}", says what is counted, and is no unit.
        kind: "counter", "updown", "gauge" or "histogram".
        description: what is measured, as a sentence without its full stop.
    """

    name: str
    unit: str
    kind: Kind
    description: str


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram.

    Attributes:
        bounds: the upper bounds of the buckets, ascending. A value equal to a bound counts in the lower bucket.
        counts: the number of values in each bucket. An additional last bucket has the values above all bounds.
        sum: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value of a metric, with attributes such as the node. The value of a histogram is a `Distribution`."""

    metric: Metric
    value: float | Distribution
    attributes: Attributes
