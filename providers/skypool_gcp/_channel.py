"""Makes gRPC channels of Google's SDK write into recordings. Importing this module imports gRPC."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import grpc
import proto  # type: ignore[import-untyped,unused-ignore]
from google.protobuf import json_format

from skypool.drivers import recording
from skypool_gcp import _api


def recorded(create_channel: Callable[..., grpc.Channel], service: str) -> Callable[..., grpc.Channel]:
    """Return a function that makes the channels of a client of Google's SDK, for the argument `channel` of a transport.

    Args:
        create_channel: The transport's own function for this.
        service: The name of the API, such as "tpu".
    """

    def create(*args: Any, **kwargs: Any) -> grpc.Channel:
        return grpc.intercept_channel(create_channel(*args, **kwargs), _Recorded(service))

    return create


class _Recorded(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc,unused-ignore]  # gRPC has no types
    """An interceptor that writes each request and its reply into the recording, if one is on.

    Args:
        service: The name of the API, such as "tpu".
    """

    def __init__(self, service: str) -> None:
        self._service = service

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send a request, and return the call. While a recording is on, this waits for the reply."""
        recorder = recording.current()
        if recorder is None:
            return continuation(client_call_details, request)
        sent, began = datetime.now(UTC), time.monotonic()
        call = continuation(client_call_details, request)
        error = call.exception()
        method = client_call_details.method
        recorder.add(
            recording.Exchange(
                provider=_api.REFUSALS.provider,
                service=self._service,
                operation=(method if isinstance(method, str) else method.decode()).rpartition("/")[2],
                method="gRPC",
                url=method if isinstance(method, str) else method.decode(),
                request=_text(request),
                status=int(call.code().value[0]),
                reply="" if error is not None else _text(call.result()),
                error=str(call.details() or "") if error is not None else "",
                time=sent.isoformat(),
                seconds=round(time.monotonic() - began, 3),
            ),
            _api.PRIVATE,
        )
        return call


def _text(message: Any) -> str:
    """Return a message of gRPC as JSON."""
    if isinstance(message, proto.Message):
        message = type(message).pb(message)
    return json.dumps(json_format.MessageToDict(message))
