"""Makes gRPC channels of Google's SDK write into recordings. Importing this module imports gRPC."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
import proto  # type: ignore[import-untyped,unused-ignore]
from google.protobuf import json_format

from skypool.drivers import recording
from skypool_gcp import _api


def recorded(create_channel: Callable[..., grpc.Channel], service: str) -> Callable[..., grpc.Channel]:
    """Return a function that makes gRPC channels which write their requests and replies into recordings.

    The function is for the argument `channel` of a transport, which is the part of Google's SDK that sends requests.

    Args:
        create_channel: The transport's own function that makes channels.
        service: The name of the API, such as "tpu".
    """

    def create(*args: Any, **kwargs: Any) -> grpc.Channel:
        return grpc.intercept_channel(create_channel(*args, **kwargs), _Recorded(service))

    return create


class _Recorded(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc,unused-ignore]  # gRPC has no types
    """An object through which a gRPC channel sends each request. It writes request and reply into a recording."""

    def __init__(self, service: str) -> None:
        self._service = service

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        """Send a request, and return gRPC's call object. While a recording is on, wait for the reply, and record it."""
        recorder = recording.current()
        if recorder is None:
            return continuation(client_call_details, request)
        sent, began = datetime.now(UTC), time.monotonic()
        call = continuation(client_call_details, request)
        call.exception()  # waits for the reply
        took = time.monotonic() - began
        method: str = client_call_details.method
        recorder.add(partial(_exchange, self._service, method, request, call, sent, took), _api.PRIVATE)
        return call


def _exchange(service: str, method: str, request: Any, call: Any, sent: datetime, took: float) -> recording.Exchange:
    """Return a gRPC request and its reply as an entry of a recording. The call must have ended."""
    refused = call.exception() is not None
    return recording.Exchange(
        provider=_api.REFUSALS.provider,
        service=service,
        operation=method.rpartition("/")[2],
        method="gRPC",
        url=method,
        request=_text(request),
        status=int(call.code().value[0]),
        reply="" if refused else _text(call.result()),
        error=str(call.details() or "") if refused else "",
        time=sent.isoformat(),
        seconds=round(took, 3),
    )


def _text(message: Any) -> str:
    """Return a message of gRPC as JSON text. If that is impossible, because of a type unknown here: {"text": …}."""
    if isinstance(message, proto.Message):
        message = type(message).pb(message)
    try:
        return json.dumps(json_format.MessageToDict(message))
    except TypeError:  # the SDK does not know the type
        return json.dumps({"text": str(message)})
