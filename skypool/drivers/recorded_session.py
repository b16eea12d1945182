"""A transport adapter for sessions of the package `requests`, which writes requests and replies into the recording.

This module imports `requests`, which takes time. `skypool.drivers.recording.attend` imports this module when needed.
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
    """An adapter that sends requests by another adapter. While a recording is on, it writes what is sent and received.

    Args:
        inner: the adapter that sends.
        provider: name of the driver.
        service: the provider's service; "" if the provider has only one.
        private: what is private at this provider.
        confidential: True if only the fact is recorded that a request was sent.
    """

    def __init__(self, inner: BaseAdapter, provider: str, service: str, private: Private, confidential: bool) -> None:
        super().__init__()
        self._inner = inner
        self._provider = provider
        self._service = service
        self._private = private
        self._confidential = confidential

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send a request by the other adapter, and return the reply."""
        recorder = current()
        if recorder is None:
            return self._inner.send(request, *args, **kwargs)
        sent, began = datetime.now(UTC), time.monotonic()
        reply = body = None
        error = ""
        try:
            reply = self._inner.send(request, *args, **kwargs)
            body = reply.content  # reads all of it
        except Exception as e:
            error = str(e) or type(e).__name__
            raise
        finally:
            path = request.path_url
            recorder.add(
                Exchange(
                    provider=self._provider,
                    service=self._service,
                    operation=_operation(request),
                    method=request.method or "",
                    url=path,
                    request_headers=_texts(request.headers),
                    request=request.body or "",
                    status=-1 if reply is None else reply.status_code,
                    reply_headers={} if reply is None else _texts(reply.headers),
                    reply=body or "",
                    error=error,
                    confidential=self._confidential,
                    time=sent.isoformat(),
                    seconds=round(time.monotonic() - began, 3),
                ),
                self._private,
            )
        return reply

    def close(self) -> None:
        """Close the other adapter."""
        self._inner.close()


def _operation(request: requests.PreparedRequest) -> str:
    """Return the name of a request: "GET /v2/pods", or for GraphQL the name of its operation, such as "query Stock"."""
    body = request.body or b""
    text = body if isinstance(body, str) else body[:200].decode(errors="replace")
    if found := _GRAPHQL.match(text):
        return " ".join(found[1].split())
    return f"{request.method} {request.path_url.partition('?')[0]}"


def _texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value.decode("latin-1") for name, value in headers.items()}
