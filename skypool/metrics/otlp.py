"""`OTLP`: sends the measurements of pools to an endpoint by OTLP, OpenTelemetry's protocol."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from skypool.checks import Duration, seconds
from skypool.errors import UsageError
from skypool.metrics.exporter import MISSING, Exporter, Source
from skypool.metrics.otlp_encoding import pairs, requests, resource_attributes
from skypool.metrics.otlp_transport import Grpc, Http, NotSent, Transport

OtlpProtocol = Literal["grpc", "http"]

_TIMEOUT = 10.0
"""Seconds to wait for the answer to a request."""
_LAST = 3.0
"""Seconds to wait for the answer to the last request."""
_LONGEST_END = 5.0
"""The most seconds for which the end of a pool waits for the last request."""


class OTLP(Exporter):
    """An endpoint that the metrics of a pool are sent to, such as an OpenTelemetry Collector.

        with ComputePool(AWS(), accelerator="H100", metrics=OTLP("http://localhost:4317")) as pool:
            ...

    The values are read and sent every 10 s, and once more at the pool's end. If the endpoint cannot be reached, the
    user is told once, and the pool goes on. See docs/guides/metrics.md.

    Args:
        endpoint: the address of the endpoint. "https" encrypts the connection. For `protocol="http"`, "/v1/metrics" is
            added if the address has no path.
        protocol: "grpc" (the usual port is 4317) or "http" (4318).
        every: the time between two requests, in seconds or as text such as "1m". Default "10s".
        headers: further headers of each request, such as an API key. Default None: the headers in the environment
            variable OTEL_EXPORTER_OTLP_HEADERS, in the form "api-key=secret,tenant=7".

    Raises:
        UsageError: an argument is not valid.
    """

    def __init__(
        self,
        endpoint: str,
        protocol: OtlpProtocol = "grpc",
        *,
        every: Duration = "10s",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if protocol not in ("grpc", "http"):
            raise UsageError(f"protocol must be 'grpc' or 'http', not {protocol!r}")
        if not isinstance(endpoint, str) or not _is_address(endpoint):
            raise UsageError(f"endpoint must be an address such as 'http://localhost:4317', not {endpoint!r}")
        if protocol == "grpc" and urlsplit(endpoint).path not in ("", "/"):
            raise UsageError(f"the endpoint {endpoint!r} has a path, which gRPC does not have; pass protocol='http'")
        self.endpoint = endpoint
        self.protocol: OtlpProtocol = protocol
        self.every = seconds("every", every)
        self._headers = headers

    def __repr__(self) -> str:
        return f"OTLP({self.endpoint!r}, protocol={self.protocol!r}, every={self.every:g})"

    def _begin(self, source: Source) -> Callable[[], None]:
        headers = pairs(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")) if self._headers is None else self._headers
        try:
            transport = Grpc(self.endpoint, headers) if self.protocol == "grpc" else Http(self.endpoint, headers)
        except ImportError as e:
            raise UsageError(MISSING.format("opentelemetry-proto" if self.protocol == "http" else "grpcio")) from e
        sender = _Sender(self.endpoint, transport, self.every, source)
        sender.start()
        return sender.close


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


class _Sender(threading.Thread):
    """A thread that sends the measurements of one pool every `every` seconds, until it is closed."""

    def __init__(self, endpoint: str, transport: Transport, every: float, source: Source) -> None:
        super().__init__(name="skypool metrics sender", daemon=True)
        self._endpoint = endpoint
        self._transport = transport
        self._every = every
        self._source = source
        self._resource = resource_attributes()
        self._closing = threading.Event()
        self._is_told = False

    def run(self) -> None:
        """Send the measurements regularly, and once more at the end."""
        while not self._closing.wait(self._every):
            if not self._send(_TIMEOUT) and self._closing.is_set():
                return  # it cannot be reached, so another attempt would only make the end longer
        self._send(_LAST)

    def close(self) -> None:
        """Let the thread send the last values, and wait for that, 5 s at most."""
        self._closing.set()
        self.join(_LONGEST_END)
        if self.is_alive():
            self._tell(f"no answer came within {_LONGEST_END:g} s at the end of the pool")
        self._transport.close()

    def _send(self, timeout: float) -> bool:
        """Read the measurements and send them. Return False if that failed; the first time, the user is told why."""
        until = time.monotonic() + timeout
        try:
            now = time.time()
            for request in requests(self._source.read(), self._resource, self._source.began, now):
                if complaint := self._transport.send(request, max(0.1, until - time.monotonic())):
                    self._tell(complaint)
        except NotSent as e:
            self._tell(str(e))
            return False
        except Exception as e:  # noqa: BLE001 - the user is told, and the pool does not depend on it
            self._tell(f"{type(e).__name__}: {e}")
            return False
        return True

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._source.notice(
                f"metrics cannot be sent to {self._endpoint}: {why}. The pool goes on without them; this is shown once"
            )
