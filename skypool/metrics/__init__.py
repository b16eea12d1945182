"""Metrics: the numbers of a pool for monitoring systems, by the conventions of OpenTelemetry.

Names that begin with `hw.` are those of OpenTelemetry's semantic conventions for hardware. All others are skypool's own
and begin with `skypool.`. A value that was not measured is left out, never 0.

- `values`: `Metric` and `Measurement`, the values that everything here is made of.
- `names`: all metrics, with unit, kind and description.
- `devices`: makes measurements of the samples and the health of a node; `pools`: of calls, nodes, launches and costs.
- `exporter`: `Exporter`, the base class of what brings measurements out of this process.
- `prometheus`: `Prometheus`, which Prometheus scrapes (asks regularly); `http_server`: the server for it.
- `otlp`: `OTLP`, which sends measurements to an endpoint; `otlp_encoding`: the requests for it; `otlp_transport`: gRPC
  and HTTP.
"""

__all__ = [
    "devices",
    "exporter",
    "http_server",
    "names",
    "otlp",
    "otlp_encoding",
    "otlp_transport",
    "pools",
    "prometheus",
    "values",
]
