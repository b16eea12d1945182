"""A transport adapter for sessions of the package `requests`, which writes requests and replies into the recording.

The adapter has its own module, because importing `requests` takes time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import requests
from requests.adapters import BaseAdapter

from skypool.drivers.recorder import Exchange, current
from skypool.drivers.scrub import Private

_GRAPHQL = re.compile(r'^\{"query": ?"\s*((?:query|mutation)\s+\w+)')
"""Matches the body of a GraphQL request whose operation has a name."""


class Recorded(BaseAdapter):
    """An adapter that sends requests by the adapter `inner`.

    While a recording is on, the adapter writes what is sent and received. If `confidential` is True, it writes only
    that a request was sent.
    """

    def __init__(self, inner: BaseAdapter, provider: str, service: str, private: Private, confidential: bool) -> None:
        super().__init__()
        self._inner = inner
        self._provider = provider
        self._service = service
        self._private = private
        self._confidential = confidential

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send a request by the adapter `inner`, and return the reply."""
        recorder = current()
        if recorder is None:
            return self._inner.send(request, *args, **kwargs)
        sent, began = datetime.now(UTC), time.monotonic()
        try:
            reply = self._inner.send(request, *args, **kwargs)
            _ = reply.content  # reads all of it
        except Exception as e:
            why = str(e) or type(e).__name__
            recorder.add(lambda: self._exchange(request, None, why, sent, time.monotonic() - began), self._private)
            raise
        recorder.add(lambda: self._exchange(request, reply, "", sent, time.monotonic() - began), self._private)
        return reply

    def _exchange(
        self,
        request: requests.PreparedRequest,
        reply: requests.Response | None,
        error: str,
        sent: datetime,
        took: float,
    ) -> Exchange:
        """Return a request and its reply, or its error, as an exchange that took `took` seconds."""
        return Exchange(
            provider=self._provider,
            service=self._service,
            operation=_operation(request),
            method=request.method or "",
            url=request.path_url,
            request_headers=_texts(request.headers),
            request=request.body or "",
            status=-1 if reply is None else reply.status_code,
            reply_headers={} if reply is None else _texts(reply.headers),
            reply=b"" if reply is None else reply.content or b"",
            error=error,
            confidential=self._confidential,
            time=sent.isoformat(),
            seconds=round(took, 3),
        )

    def close(self) -> None:
        """Close the adapter `inner`."""
        self._inner.close()


def _operation(request: requests.PreparedRequest) -> str:
    """Return the name of a request, such as "GET /v2/pods", or of a GraphQL operation, such as "query Stock"."""
    body = request.body or b""
    text = body if isinstance(body, str) else body[:200].decode(errors="replace")
    if found := _GRAPHQL.match(text):
        return " ".join(found[1].split())
    return f"{request.method} {request.path_url.partition('?')[0]}"


def _texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value.decode("latin-1") for name, value in headers.items()}
