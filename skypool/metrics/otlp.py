"""`OTLP`: sends the measurements of pools to an endpoint by OTLP, OpenTelemetry's protocol."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from skypool.checks import Duration, seconds
from skypool.errors import UsageError
from skypool.metrics.exporter import MISSING, Exporter, Source
from skypool.metrics.otlp_data import pairs, requests, resource_attributes
from skypool.metrics.otlp_exporters import Answers, grpc, http, unlogged

OtlpProtocol = Literal["grpc", "http"]

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
        answers = Answers()
        try:
            import_module(f"opentelemetry.exporter.otlp.proto.{self.protocol}.metric_exporter")
            with unlogged():
                exporter = (grpc if self.protocol == "grpc" else http)(self.endpoint, headers, answers)
        except ImportError as e:
            raise UsageError(MISSING.format(f"opentelemetry-exporter-otlp-proto-{self.protocol}")) from e
        except Exception as e:
            raise UsageError(
                f"OpenTelemetry's exporter cannot be made for {self!r}: {e}; check the environment variables "
                "OTEL_EXPORTER_OTLP_…"
            ) from e
        sender = _Sender(self.endpoint, exporter, answers, self.every, source)
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

    def __init__(self, endpoint: str, exporter: Any, answers: Answers, every: float, source: Source) -> None:
        super().__init__(name="skypool metrics sender", daemon=True)
        self._endpoint = endpoint
        self._exporter = exporter
        self._answers = answers
        self._every = every
        self._source = source
        self._resource = resource_attributes()
        self._closing = threading.Event()
        self._once = threading.Lock()  # who takes it shuts the exporter down
        self._is_told = False
        answers.on_failure = self._give_up

    def run(self) -> None:
        """Send the measurements regularly, and once more at the end."""
        with unlogged():
            while not self._closing.wait(self._every):
                if not self._send() and self._closing.is_set():
                    return  # it cannot be reached, so another attempt would only make the end longer
            self._send()

    def close(self) -> None:
        """Let the thread send the last values, and wait for that, 5 s at most."""
        self._closing.set()
        if self._answers.failure:
            self._give_up()
        self.join(_LONGEST_END)
        if self.is_alive():
            self._tell(f"no answer came within {_LONGEST_END:g} s at the end of the pool")
        self._shut_down()

    def _give_up(self) -> None:
        """Do not repeat failed requests any more, because that would make the end of the pool longer."""
        if self._closing.is_set():
            self._shut_down()

    def _shut_down(self) -> None:
        """Close the connection. A request that waits for its answer may go on, up to its timeout."""
        if self._once.acquire(blocking=False):
            self._exporter.shutdown()

    def _send(self) -> bool:
        """Read the measurements and send them. Return False if that failed; the first time, tell the user why."""
        answers = self._answers
        try:
            for data in requests(self._source.read(), self._resource, self._source.began, time.time()):
                is_sent = self._exporter.export(data).name == "SUCCESS"
                if answers.failure or not is_sent:
                    self._tell(answers.failure or "OpenTelemetry's exporter failed")
                    return False
                if answers.complaint:
                    self._tell(answers.complaint)
        except Exception as e:  # noqa: BLE001 - the user is told, and the pool does not depend on it
            self._tell(answers.failure or f"{type(e).__name__}: {e}")
            return False
        finally:
            answers.failure = ""
        return True

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._source.notice(
                f"metrics cannot be sent to {self._endpoint}: {why}. The pool goes on without them; this is shown once"
            )
