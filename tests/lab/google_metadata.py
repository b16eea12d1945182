"""Google's metadata service, for an instance of the lab's Compute Engine or a host of its Cloud TPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler

BASE = "/computeMetadata/v1/instance/"


def handler(told: Callable[[], Mapping[str, str]], token: str) -> type[BaseHTTPRequestHandler]:
    """The class that answers for one machine.

    Args:
        told: what it says now, by paths; token: of its service account, "" where it has none.
    """

    class Handler(_Handler):
        def answer(self, path: str) -> str | None:
            if path == "service-accounts/default/token" and token:
                return json.dumps({"access_token": token, "expires_in": 3599, "token_type": "Bearer"})
            return told().get(path)

    return Handler


class _Handler(BaseHTTPRequestHandler):
    def answer(self, path: str) -> str | None:
        """What is there, None for nothing."""
        raise NotImplementedError

    def do_GET(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._say(403, "Missing Metadata-Flavor:Google header.")
            return
        text = self.answer(self.path.partition("?")[0].removeprefix(BASE))
        self._say(200 if text is not None else 404, text or "")

    def _say(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: questions are not part of the journal."""
