"""The metadata service of AWS, as far as a spot machine asks it when the machine is taken back."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

from tests.lab.machines import Machine


class Metadata(BaseHTTPRequestHandler):
    """Version 2 of the service that spot machines of one large cloud ask: no answer without a token."""

    token = secrets.token_urlsafe(40)
    taken: ClassVar[dict[str, int]] = {}
    """When machines are taken back, by their names."""
    name = ""

    @staticmethod
    def of(machine: Machine) -> type[BaseHTTPRequestHandler]:
        return type("MetadataOf", (Metadata,), {"name": machine.name})

    def do_PUT(self) -> None:
        lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
        self._say(200 if lives and self.path == "/latest/api/token" else 400, self.token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != self.token:
            self._say(401)
        elif self.name in self.taken and self.path == "/latest/meta-data/spot/instance-action":
            when = datetime.fromtimestamp(self.taken[self.name], UTC)
            self._say(200, json.dumps({"action": "terminate", "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"}))
        else:
            self._say(404)

    def _say(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
