"""Metrics of a pool for monitoring systems, by the conventions of OpenTelemetry.

Names that begin with `hw.` are those of OpenTelemetry's semantic conventions for hardware. All others are skypool's own
and begin with `skypool.`. A value that was not measured is left out, never 0.

- `values`: `Metric` and `Measurement`, the data types of this package.
- `names`: all metrics, with unit, kind and description.
- `devices`: converts samples and health of a node into measurements;
  `calls_and_costs`: calls, nodes, launches and costs.
- `metering`: reads the measurements of a pool for its exporters.
- `exporter`: `Exporter`, the base class of objects that export measurements to a monitoring system.
- `prometheus`: `Prometheus`, which serves measurements to Prometheus; `http_server`: its HTTP server.
- `otlp`: `OTLP`, which sends measurements to an endpoint; `otlp_data`: the data of its requests; `otlp_exporters`:
  OpenTelemetry's exporters over gRPC and HTTP.

A node is a rented machine of a pool. A sample has the values that were measured on a node and its devices at one time.
The attributes of a measurement, such as its pool and node, distinguish it from others of the same metric.
"""

__all__ = [
    "calls_and_costs",
    "devices",
    "exporter",
    "http_server",
    "metering",
    "names",
    "otlp",
    "otlp_data",
    "otlp_exporters",
    "prometheus",
    "values",
]
