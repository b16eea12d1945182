"""How Cloud TPU is asked: one client for each address, gRPC unless one of HTTP is named."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from skypool.drivers import retry
from skypool_gcp import _api


@lru_cache(maxsize=16)
def _client(address: str, credentials: Any) -> Any:
    kind = _api.sdk("google.cloud.tpu_v2").TpuClient
    if address.startswith("grpc://"):
        channel = _api.sdk("grpc").insecure_channel(address.removeprefix("grpc://"))
        made = _api.sdk("google.cloud.tpu_v2.services.tpu.transports").TpuGrpcTransport
        return kind(transport=made(channel=channel))
    other = {"transport": "rest", "client_options": {"api_endpoint": address}} if address else {}
    return kind(credentials=credentials, **other)


def ask(verb: str, what: str, **request: Any) -> Any:
    """What a method of the API answers; all pages where it lists.

    Raises:
        ProviderError: also where some places did not answer, as what is there is not known then.
    """

    def do() -> Any:
        client = _client(_api.endpoint("tpu") or "", _api.credentials("tpu"))
        told = getattr(client, verb)(request=request, timeout=60.0)
        return list(told.pages) if hasattr(told, "pages") else told

    if not isinstance(told := _api.asked(what, do), list):
        return told
    if silent := sorted({place for page in told for place in page.unreachable}):
        raise _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
    return [each for page in told for each in getattr(page, verb.removeprefix("list_"))]


def quietly(verb: str, what: str, *codes: str, **request: Any) -> Any:
    """The same; None where what it is about is gone, or where it is refused with one of these codes."""
    return retry.quietly(partial(ask, verb, what, **request), "NotFound", *codes)


def is_over(operation: Any, what: str) -> bool:
    """Whether an operation has ended. Raises ProviderError: it has failed."""
    over: bool = _api.asked(what, operation.done)
    if over and (error := operation.exception()) is not None:
        fail(error, what)
    return over


def fail(error: Any, what: str) -> None:
    """Raise an error of the SDK, or a google.rpc.Status, as ours."""
    named = _api.sdk("google.api_core.exceptions").from_grpc_status
    made = error if isinstance(error, Exception) else named(error.code, error.message)

    def again() -> None:
        raise made

    _api.asked(what, again)
