"""Recorded replies of Google's APIs, as the labs of Compute Engine and Cloud TPU give them back."""

from __future__ import annotations

import json

from skypool.drivers.recording import Exchange
from tests.lab.cloud import Answer, Refused
from tests.lab.tpu_wire import CODES

THINGS = (
    *(f"GET /compute/v1/projects/*/aggregated/{each}" for each in ("instances", "disks", "resourcePolicies")),
    *(f"GET /compute/v1/projects/*/zones/*/{each}*" for each in ("instances", "disks", "operations")),
    *(f"GET /compute/v1/projects/*/{each}*" for each in ("regions/*/resourcePolicies", "regions/*/operations")),
    *(f"GET /compute/v1/projects/*/global/{each}*" for each in ("firewalls", "operations", "instanceTemplates")),
    "GET /compute/v1/projects/*instanceGroupManagers*",
    *(f"GET /v2/projects/*/locations/*/{each}*" for each in ("nodes", "queuedResources", "operations")),
)
"""Reads of what was made; see `Replay`."""


def told(found: Exchange) -> Answer:
    """A recorded answer of gRPC, as REST gives it."""
    if found.status == 0:
        return Answer(json.loads(found.reply or "{}"))
    status, (code, _) = next(each for each in CODES.items() if each[1][1] == found.status)
    return Answer({"error": {"code": code, "message": found.error, "status": status, "details": []}}, code)


def unrecorded(text: str) -> Refused:
    """The refusal of a read that the recording lacks."""
    reasons = [{"reason": "notRecorded", "message": text, "domain": "global"}]
    return Refused(400, {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT", "errors": reasons}})
