"""Encodes measurements as requests of OTLP, OpenTelemetry's protocol, with the messages of opentelemetry-proto."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from skypool.metrics.values import Attributes, Distribution, Measurement, Metric
from skypool.text import encodable

MOST = 2000
"""The most measurements in one request, so that it stays below the limit of 4 MiB that gRPC servers have."""


def pairs(text: str) -> dict[str, str]:
    """Return the pairs in an OpenTelemetry variable, such as "api-key=secret,tenant=7". Values are URL-decoded.

    Parts without "=" are ignored.
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
) -> Iterator[Any]:
    """Yield the requests that carry the measurements, each an `ExportMetricsServiceRequest`.

    `resource` has the attributes of this process. The measurements were read at `now`. Counters and sums count from
    `began`. Both are in seconds since 1970.
    """
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics, ScopeMetrics
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    for first in range(0, len(measurements), MOST):
        found: dict[Metric, list[Any]] = {}
        for each in measurements[first : first + MOST]:
            found.setdefault(each.metric, []).append(_point(each, int(began * 1e9), int(now * 1e9)))
        scope = ScopeMetrics(
            scope=InstrumentationScope(name="skypool", version=version("skypool")),
            metrics=[_metric(metric, points) for metric, points in found.items()],
        )
        about = Resource(attributes=_pairs(resource))
        yield ExportMetricsServiceRequest(resource_metrics=[ResourceMetrics(resource=about, scope_metrics=[scope])])


def _metric(metric: Metric, points: list[Any]) -> Any:
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as messages

    said = messages.Metric(name=metric.name, unit=metric.unit, description=metric.description)
    cumulative = messages.AGGREGATION_TEMPORALITY_CUMULATIVE
    match metric.kind:
        case "gauge":
            said.gauge.data_points.extend(points)
        case "histogram":
            said.histogram.aggregation_temporality = cumulative
            said.histogram.data_points.extend(points)
        case "counter" | "updown":
            said.sum.aggregation_temporality = cumulative
            said.sum.is_monotonic = metric.kind == "counter"
            said.sum.data_points.extend(points)
    return said


def _point(measurement: Measurement, began: int, now: int) -> Any:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, NumberDataPoint

    attributes = _pairs(measurement.attributes)
    value = measurement.value
    if isinstance(value, Distribution):
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=began,
            time_unix_nano=now,
            count=sum(value.counts),
            sum=value.sum,
            bucket_counts=value.counts,
            explicit_bounds=value.bounds,
        )
    start = 0 if measurement.metric.kind == "gauge" else began
    number: dict[str, Any] = {"as_int": value} if isinstance(value, int) else {"as_double": value}
    return NumberDataPoint(attributes=attributes, start_time_unix_nano=start, time_unix_nano=now, **number)


def _pairs(attributes: Attributes) -> list[Any]:
    return [_pair(key, value) for key, value in attributes.items()]


@lru_cache(maxsize=8192, typed=True)  # the same pairs come again in most measurements, and messages copy them
def _pair(key: str, value: str | int | bool) -> Any:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    if isinstance(value, bool):
        return KeyValue(key=key, value=AnyValue(bool_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    return KeyValue(key=key, value=AnyValue(string_value=encodable(value)))
