"""Sends requests of OTLP, OpenTelemetry's protocol, over gRPC or HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

_BACK_SOON = 5000
"""The most milliseconds that gRPC waits before it connects again. Its own default is two minutes."""


class NotSent(Exception):
    """A request was not sent, or was refused. The text says why."""


class Transport(Protocol):
    """A connection to an endpoint."""

    def send(self, request: Any, timeout: float) -> str:
        """Send an `ExportMetricsServiceRequest`, and wait for the answer, for `timeout` seconds at most.

        Returns "", or a warning if the endpoint has accepted the request only in part. Raises NotSent if it cannot be
        reached, or refuses the request.
        """
        ...

    def close(self) -> None:
        """Make `send` raise NotSent from now on. A request that waits for its answer may go on, up to its timeout."""
        ...


class Grpc:
    """A connection to an endpoint over gRPC, which "https" in the address encrypts. `headers` go with each request."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        import grpc
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

        parts = urlsplit(endpoint)
        options = [("grpc.max_reconnect_backoff_ms", _BACK_SOON)]
        if parts.scheme == "https":
            self._channel = grpc.secure_channel(parts.netloc, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options)
        self._export = MetricsServiceStub(self._channel).Export
        self._headers = [(name.lower(), value) for name, value in headers.items()]
        self._error = grpc.RpcError

    def send(self, request: Any, timeout: float) -> str:
        """Send a request, and wait for the answer. See `Transport`."""
        try:
            answer = self._export(request, timeout=timeout, metadata=self._headers)
        except self._error as e:
            raise NotSent(f"{e.code().name}: {e.details()}") from e
        except ValueError as e:  # the channel was closed
            raise NotSent(str(e)) from e
        return _complaint(answer)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class Http:
    """A connection to an endpoint over HTTP with protobuf. "/v1/metrics" is added to an address without a path."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        has_path = urlsplit(endpoint).path not in ("", "/")
        self._url = endpoint if has_path else f"{endpoint.rstrip('/')}/v1/metrics"
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._is_closed = False
        self._read: Callable[[bytes], Any] = ExportMetricsServiceResponse.FromString

    def send(self, request: Any, timeout: float) -> str:
        """Send a request, and wait for the answer. See `Transport`."""
        from google.protobuf.message import DecodeError

        if self._is_closed:
            raise NotSent("the pool has ended")
        post = urllib.request.Request(self._url, request.SerializeToString(), self._headers, method="POST")
        try:
            with self._opener.open(post, timeout=timeout) as reply:
                return _complaint(self._read(reply.read(_LONGEST)))
        except urllib.error.HTTPError as e:
            e.close()
            raise NotSent(f"HTTP status {e.code} {e.reason}") from e
        except urllib.error.URLError as e:
            raise NotSent(str(e.reason)) from e
        except (OSError, http.client.HTTPException) as e:
            raise NotSent(str(e) or type(e).__name__) from e
        except DecodeError:
            return "the answer is not that of an OTLP endpoint"

    def close(self) -> None:
        """Make `send` raise NotSent from now on. A request that waits for its answer goes on, up to its timeout."""
        self._is_closed = True


_LONGEST = 1 << 20
"""The most bytes of an answer that are read."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: headers may have secrets, and a POST would become a GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Return None: the redirect is an error."""


def _complaint(answer: Any) -> str:
    """Return a sentence that says how many values the endpoint has dropped and why; "" if it has dropped none."""
    said = answer.partial_success
    if not said.rejected_data_points:
        return ""
    return f"the endpoint dropped {said.rejected_data_points} values: {said.error_message}"
