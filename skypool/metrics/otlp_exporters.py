"""OpenTelemetry's exporters, which send data by OTLP over gRPC and HTTP. They also note what an endpoint answers.

The exporters repeat a request after a failure that may pass, for 10 s. They write failures to Python's log only, and do
not read what an endpoint says of values that it dropped.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT = 10.0
"""Seconds for a request, with all its repetitions."""
_BACK_SOON = 5000
"""The most milliseconds that gRPC waits before it connects again. Its own default is two minutes."""
_LONGEST = 1 << 20
"""The most bytes of an answer over HTTP that are read."""
_ITS_OWN = frozenset(
    ("accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "user-agent")
)
"""The headers of a request over HTTP that the exporter itself sets."""


class Answers:
    """The last answers of an endpoint.

    Attributes:
        failure: why the last attempt to send the present request failed; "" if it did not.
        complaint: what the endpoint said of values that it dropped; "" if it dropped none.
        on_failure: called after each failed attempt, in the thread that made it.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.complaint = ""
        self.on_failure: Callable[[], object] = lambda: None

    def failed(self, why: str) -> None:
        """Note that an attempt failed, and why, and call `on_failure`."""
        self.failure = why
        self.on_failure()

    def accepted(self, answer: Any) -> None:
        """Note the endpoint's answer to a request that it accepted, an `ExportMetricsServiceResponse`."""
        said = answer.partial_success
        dropped = said.rejected_data_points
        self.failure = ""
        self.complaint = f"the endpoint dropped {dropped} values: {said.error_message}" if dropped else ""


def grpc(endpoint: str, headers: Mapping[str, str], answers: Answers) -> Any:
    """Return an exporter that sends data over gRPC. An address that begins with "https" encrypts the connection.

    `headers` are sent with each request, and `answers` notes how the endpoint answers.

    Raises ImportError if a package is not installed.
    """
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    options: Any = (("grpc.max_reconnect_backoff_ms", _BACK_SOON),)  # the package says that values are texts
    metadata = tuple((name.lower(), value) for name, value in headers.items())

    class Listened:
        """The endpoint's service. It passes requests on, and notes each answer in `answers`."""

        def __init__(self, service: Any) -> None:
            self._service = service

        def Export(self, request: Any, timeout: float, **_: Any) -> Any:
            try:
                answer = self._service.Export(request, timeout=timeout, metadata=metadata)
            except grpc.RpcError as e:
                answers.failed(f"{e.code().name}: {e.details()}")
                raise
            answers.accepted(answer)
            return answer

    class Exporter(OTLPMetricExporter):  # type: ignore[misc] # mypy does not look into the package
        """OpenTelemetry's exporter. Each channel that it makes, also after failures, gets a service with notes."""

        _client: Any

        def _initialize_channel_and_stub(self) -> None:
            super()._initialize_channel_and_stub()
            self._client = Listened(self._client)

    return Exporter(
        endpoint,
        insecure=urlsplit(endpoint).scheme == "http",
        headers=metadata,
        timeout=_TIMEOUT,
        channel_options=options,
    )


def http(endpoint: str, headers: Mapping[str, str], answers: Answers) -> Any:
    """Return an exporter that sends data over HTTP with protobuf. An address without a path gets "/v1/metrics".

    `headers` are sent with each request, and `answers` notes how the endpoint answers.

    Raises ImportError if a package is not installed.
    """
    import requests
    from google.protobuf.message import DecodeError
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from requests.adapters import HTTPAdapter

    class System(HTTPAdapter):
        """Connections that also trust the certificates that the system trusts."""

        def init_poolmanager(self, *args: Any, **more: Any) -> None:
            super().init_poolmanager(*args, ssl_context=ssl.create_default_context(), **more)

    class Session(requests.Session):
        """Connections to the endpoint. Each answer is noted in `answers`.

        It follows no redirect: headers may have secrets, and a POST would become a GET.
        """

        def send(self, request: requests.PreparedRequest, **more: Any) -> requests.Response:
            for name in [each for each in request.headers if each.lower() not in _ITS_OWN]:
                del request.headers[name]
            request.headers.update({name: headers[name] for name in headers if name.lower() != "content-type"})
            try:
                answer = super().send(request, **{**more, "stream": True, "allow_redirects": False})
                body = answer.raw.read(_LONGEST, decode_content=True)
                if len(body) == _LONGEST:
                    answer.close()
            except Exception as e:
                answers.failed(_cause(e))
                raise
            if answer.status_code >= 300:
                answers.failed(f"HTTP status {answer.status_code} {answer.reason}")
                return answer
            try:
                answers.accepted(ExportMetricsServiceResponse.FromString(body))
            except DecodeError:
                answers.failure, answers.complaint = "", "the answer is not that of an OTLP endpoint"
            return answer

    session = Session()
    session.mount("https://", System())
    has_path = urlsplit(endpoint).path not in ("", "/")
    url = endpoint if has_path else f"{endpoint.rstrip('/')}/v1/metrics"
    return OTLPMetricExporter(url, timeout=_TIMEOUT, session=session)


def _cause(error: BaseException) -> str:
    """Return the words of the first error of a chain, such as "[Errno 111] Connection refused"."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return str(error) or type(error).__name__


_ours = contextvars.ContextVar("skypool_otlp", default=False)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep what the exporters say in this block out of the log. What they say elsewhere in the program is logged."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry.") and _not_ours not in (filters := logging.getLogger(name).filters):
            filters.insert(0, _not_ours)  # before the one that drops what was said a moment ago
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _not_ours(record: logging.LogRecord) -> bool:
    return not _ours.get()
