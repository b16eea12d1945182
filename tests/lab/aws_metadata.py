"""The metadata service of one instance: version 2 only, so every question needs a token. No credentials are in it."""

from __future__ import annotations

import json
import math
import secrets
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from tests.lab.aws_facts import zone_ids

if TYPE_CHECKING:
    from tests.lab.aws import AWS
    from tests.lab.aws_life import Rental

TOKEN, TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
VERSIONS = ("latest", "2021-07-15", "2024-04-11")


def handler(world: AWS, rental: Rental) -> type[BaseHTTPRequestHandler]:
    """The class that answers for this instance."""

    class Handler(_Handler):
        pass

    Handler.world, Handler.rental, Handler.tokens = world, rental, {}
    return Handler


class _Handler(BaseHTTPRequestHandler):
    world: AWS
    rental: Rental
    tokens: dict[str, float]

    def do_PUT(self) -> None:
        seconds = self.headers.get(TTL, "")
        if self.path != "/latest/api/token":
            self._say(404)
        elif not seconds.isdecimal() or not 1 <= int(seconds) <= 21600:
            self._say(400)
        else:
            token = secrets.token_urlsafe(40)
            self.tokens[token] = time.monotonic() + int(seconds)
            self._say(200, token)

    def do_GET(self) -> None:
        if self.tokens.get(self.headers.get(TOKEN, ""), 0.0) < time.monotonic():
            self._say(401)
            return
        version, _, path = self.path.partition("?")[0].lstrip("/").partition("/")
        found = tree(self.world, self.rental).get(path.rstrip("/")) if version in VERSIONS else None
        self._say(200 if found is not None else 404, found or "")

    def _say(self, status: int, text: str | bytes = "") -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: questions are not part of the journal."""


def tree(world: AWS, rental: Rental) -> dict[str, str | bytes]:
    """Every path there is now, with folders as lists of what is in them."""
    leaves = _leaves(world, rental)
    found: dict[str, str | bytes] = dict(leaves)
    folders: dict[str, set[str]] = {}
    for path in leaves:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            name = parts[depth] + ("/" if depth < len(parts) - 1 else "")
            folders.setdefault("/".join(parts[:depth]), set()).add(name)
    return found | {path: "\n".join(sorted(names)) for path, names in folders.items()}


def _leaves(world: AWS, rental: Rental) -> dict[str, str | bytes]:
    model, meta = rental.model, "meta-data/"
    address = rental.machine.address if rental.machine else ""
    found: dict[str, str | bytes] = {
        meta + "ami-id": rental.image.id(rental.region),
        meta + "ami-launch-index": str(model.ami_launch_index),
        meta + "hostname": model.private_dns_name,
        meta + "instance-action": "none",
        meta + "instance-id": rental.id,
        meta + "instance-life-cycle": rental.market,
        meta + "instance-type": rental.type,
        meta + "local-hostname": model.private_dns_name,
        meta + "local-ipv4": address,
        meta + "placement/availability-zone": rental.zone,
        meta + "placement/availability-zone-id": zone_ids(rental.region).get(rental.zone, ""),
        meta + "placement/region": rental.region,
        meta + "security-groups": "\n".join(group.name for group in model.security_groups),
        meta + "services/domain": "amazonaws.com",
        "dynamic/instance-identity/document": json.dumps(_identity(rental, address), indent=2),
    }
    if model.public_ip:
        found[meta + "public-ipv4"] = model.public_ip
    if rental.group:
        found[meta + "placement/group-name"] = rental.group
    if rental.keys:
        found[meta + "public-keys/0/openssh-key"] = f"{rental.keys[0]}\n"
    if rental.user_data:
        found["user-data"] = rental.user_data
    if rental.notice is not None:
        at = _when(world.clock.real(rental.notice))
        found[meta + "spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        found[meta + "spot/termination-time"] = at
    if rental.warned is not None:
        notice = {"noticeTime": _when(world.clock.real(rental.warned))}
        found[meta + "events/recommendations/rebalance"] = json.dumps(notice)
    return found


def _identity(rental: Rental, address: str) -> dict[str, object]:
    return {
        "accountId": rental.model.owner_id,
        "architecture": rental.image.architecture,
        "availabilityZone": rental.zone,
        "imageId": rental.image.id(rental.region),
        "instanceId": rental.id,
        "instanceType": rental.type,
        "pendingTime": _when(rental.launched),
        "privateIp": address,
        "region": rental.region,
        "version": "2017-09-30",
    }


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
