"""Converts measurements to the data that OpenTelemetry's exporters send."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from skypool.metrics.values import Attributes, Distribution, Measurement, Metric
from skypool.text import encodable

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import export

MOST = 2000
"""The most measurements in one request, so that it stays below the limit of 4 MiB that gRPC servers have."""


def pairs(text: str) -> dict[str, str]:
    """Return the names and values in a text such as "api-key=secret,tenant=7", URL-decoded.

    OpenTelemetry's environment variables have such texts. Parts without "=" are ignored.
    """
    parts = [each.partition("=") for each in text.split(",") if "=" in each]
    return {name.strip(): unquote(value.strip()) for name, _, value in parts}


def resource_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the attributes of this process: OTEL_RESOURCE_ATTRIBUTES and `service.name` (default "skypool")."""
    given = pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    name = environ.get("OTEL_SERVICE_NAME") or given.get("service.name") or "skypool"
    return {**given, "service.name": name}


def requests(
    measurements: Sequence[Measurement], resource: Mapping[str, str], began: float, now: float
) -> Iterator[export.MetricsData]:
    """Yield the data of each request that carries the measurements.

    `resource` has the attributes of this process. The measurements were read at `now`. Counters and sums count from
    `began`. Both are in seconds since 1970.
    """
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    about, scope = Resource(_encodable(resource)), InstrumentationScope("skypool", version("skypool"))
    for first in range(0, len(measurements), MOST):
        found: dict[Metric, list[Any]] = {}
        for each in measurements[first : first + MOST]:
            found.setdefault(each.metric, []).append(_point(each, int(began * 1e9), int(now * 1e9)))
        metrics = [export.Metric(m.name, m.description, m.unit, _data(m, points)) for m, points in found.items()]
        yield export.MetricsData([export.ResourceMetrics(about, [export.ScopeMetrics(scope, metrics, "")], "")])


def _data(metric: Metric, points: Sequence[Any]) -> export.DataT:
    from opentelemetry.sdk.metrics import export

    cumulative = export.AggregationTemporality.CUMULATIVE
    match metric.kind:
        case "gauge":
            return export.Gauge(points)
        case "histogram":
            return export.Histogram(points, cumulative)
        case "counter" | "updown":
            return export.Sum(points, cumulative, is_monotonic=metric.kind == "counter")


def _point(measurement: Measurement, began: int, now: int) -> export.DataPointT:
    from opentelemetry.sdk.metrics import export

    attributes, value = _encodable(measurement.attributes), measurement.value
    if isinstance(value, Distribution):
        unknown: Any = None
        count = sum(value.counts)
        return export.HistogramDataPoint(
            attributes, began, now, count, value.sum, value.counts, value.bounds, min=unknown, max=unknown
        )
    return export.NumberDataPoint(attributes, began, now, value)


def _encodable(attributes: Attributes) -> Attributes:
    return {key: encodable(value) if isinstance(value, str) else value for key, value in attributes.items()}
