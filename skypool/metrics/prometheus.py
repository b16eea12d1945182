"""`Prometheus`: serves the measurements of pools over HTTP, in the text formats that Prometheus reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from skypool.checks import whole
from skypool.errors import UsageError
from skypool.metrics.exporter import MISSING, Exporter, Source
from skypool.metrics.values import Distribution, Measurement, Metric
from skypool.text import encodable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from skypool.metrics.http_server import Server

_UNITS = {
    "1": "",
    "By": "bytes",
    "s": "seconds",
    "h": "hours",
    "W": "watts",
    "Cel": "celsius",
    "Hz": "hertz",
}
"""Units of the metrics, and their names in Prometheus."""
_KINDS = {"counter": "counter", "updown": "gauge", "gauge": "gauge", "histogram": "histogram"}


class Prometheus(Exporter):
    """A server that Prometheus scrapes: Prometheus asks it for all values regularly.

        with ComputePool(AWS(), accelerator="H100", metrics=Prometheus()) as pool:
            ...

    The server answers at `http://127.0.0.1:9464/metrics` from the pool's start to its end. Values are read when
    Prometheus asks, and at no other time. If several pools get the same object, the server answers for all of them, and
    the label `skypool_pool` tells them apart. See docs/guides/metrics.md.

    Args:
        port: the port. 0 chooses a free one, which the attribute `port` has then.
        address: the address to listen on. Everybody who can connect to it can read the values. Default: only programs
            of this computer.

    Raises:
        UsageError: an argument is not valid.
    """

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        whole("port", port, "a port", least=0)
        if port > 65535:
            raise UsageError(f"port must be at most 65535, not {port}")
        if not isinstance(address, str) or not address:
            raise UsageError(f"address must be an address of this computer, such as '127.0.0.1', not {address!r}")
        self.address = address
        self._port = port
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._told: set[Source] = set()
        self._server: Server | None = None
        self._process = os.getpid()

    @property
    def port(self) -> int:
        """The port of the server. If the argument `port` was 0: the port that was chosen, or 0 while no pool runs."""
        server = self._server
        return self._port if server is None else server.port

    @property
    def url(self) -> str:
        """The address of the values while a pool runs, such as "http://127.0.0.1:9464/metrics"."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"Prometheus(port={self._port}, address={self.address!r})"

    def _begin(self, source: Source) -> Callable[[], None]:
        with self._lock:
            if self._process != os.getpid():  # the server is that of the process that this one was forked from
                self._sources, self._server, self._process = [], None, os.getpid()
            if self._server is None:
                self._serve()
            self._sources.append(source)
        return lambda: self._end(source)

    def _serve(self) -> None:
        """Start the server. Raise UsageError if prometheus-client is missing, or the server cannot listen there."""
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as e:
            raise UsageError(MISSING.format("prometheus-client")) from e
        from skypool.metrics.http_server import Server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._measurements))
        try:
            self._server = Server(make_wsgi_app(registry), self.address, self._port)
        except OSError as e:
            raise UsageError(
                f"metrics cannot be served at {self.address} port {self._port}: {e.strerror or e}; pass another "
                "port, or Prometheus(port=0) for a free one"
            ) from e

    def _end(self, source: Source) -> None:
        with self._lock:
            if self._process != os.getpid() or source not in self._sources:
                return
            self._sources.remove(source)
            self._told.discard(source)
            if self._sources:
                return
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _measurements(self) -> list[Measurement]:
        return [one for source in list(self._sources) for one in self._read(source)]

    def _read(self, source: Source) -> list[Measurement]:
        """Return the measurements of a pool. If that fails, return []; the first time, also tell the user."""
        try:
            return source.read()
        except Exception as e:  # noqa: BLE001 - the user is told, and other pools are served all the same
            if source not in self._told:
                self._told.add(source)
                source.notice(f"metrics cannot be read: {type(e).__name__}: {e}")
            return []


class _Collector:
    """A collector for prometheus-client, which reads the measurements whenever Prometheus asks."""

    def __init__(self, read: Callable[[], list[Measurement]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        yield from families(self._read())


def families(measurements: Iterable[Measurement]) -> list[Family]:
    """Return the measurements as metric families of prometheus-client, one for each metric."""
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.utils import floatToGoString

    found: dict[str, Family] = {}
    for each in measurements:
        metric = each.metric
        name = name_of(metric).removesuffix("_total")
        if name not in found:
            found[name] = Family(name, metric.description, _KINDS[metric.kind])
        family = found[name]
        labels = {label_of(key): _text_of(value) for key, value in each.attributes.items()}
        if isinstance(each.value, Distribution):
            below = 0
            for bound, count in zip((*each.value.bounds, float("inf")), each.value.counts, strict=True):
                below += count
                family.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, below)
            family.add_sample(f"{name}_count", labels, below)
            family.add_sample(f"{name}_sum", labels, each.value.sum)
        else:
            family.add_sample(f"{name}_total" if metric.kind == "counter" else name, labels, each.value)
    return list(found.values())


def name_of(metric: Metric) -> str:
    """Return the name of a metric in Prometheus, such as "hw_gpu_memory_usage_bytes", by OpenTelemetry's rules.

    The name ends in the unit, such as "_bytes". For a gauge with the unit "1" that is "_ratio". The name of a counter
    also ends in "_total". The rules are at
    https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/ (read 2026-11-25).
    """
    name = label_of(metric.name)
    above, _, below = metric.unit.partition("/")
    units = [] if above.startswith("{") else [_UNITS[above]]
    if below:
        units.append(f"per_{_UNITS[below].removesuffix('s')}")
    if metric.unit == "1" and metric.kind == "gauge":
        units = ["ratio"]
    unit = "_".join(filter(None, units))
    if unit and not name.endswith(f"_{unit}"):
        name += f"_{unit}"
    return f"{name}_total" if metric.kind == "counter" else name


def label_of(attribute: str) -> str:
    """Return the name of the label in Prometheus for an attribute: "hw_id" for "hw.id"."""
    return attribute.replace(".", "_")


def _text_of(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else encodable(str(value))
