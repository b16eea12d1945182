"""What there is in a project of the lab's Compute Engine: instances, operations, refusals."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from tests.lab.cloud import Refused, Rental

_KEY, _VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")


def refused(status: int, reason: str, message: str) -> Refused:
    """As the API says it."""
    return Refused(status, error(status, reason, message))


def error(status: int, reason: str, message: str) -> dict[str, Any]:
    told = {"message": message, "domain": "global", "reason": reason}
    return {"error": {"code": status, "message": message, "errors": [told]}}


class Failed(Exception):
    """An operation that fails: what its error says."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(f"{code}: {message}")


@dataclass
class Delays:
    """Seconds of the lab's clock in which an instance is made, is deleted, and other operations are through; between
    the notice that a spot machine is taken and its end."""

    insert: float = 0.1
    delete: float = 0.05
    other: float = 0.02
    notice: float = 30.0


@dataclass
class Instance(Rental):
    """One instance; `told` is what was asked for. `living`: it is not stopped. `place` is its zone.

    Attributes:
        began, stopped: when it last began to run, and when it was last stopped; 0 for never.
    """

    told: dict[str, Any] = field(default_factory=dict[str, Any])
    began: float = 0.0
    stopped: float = 0.0
    labels: dict[str, str] = field(default_factory=dict[str, str])
    changes: int = 0
    ip: str = ""
    preempted: bool = False
    token: str = field(default_factory=lambda: f"ya29.vm-{secrets.token_hex(12)}")

    @property
    def disk(self) -> str:
        """The name of its boot disk."""
        return str(self.told["disks"][0].get("initializeParams", {}).get("diskName", self.id))

    @property
    def account(self) -> str:
        """Its service account, "" for none."""
        return str(next((each["email"] for each in self.told.get("serviceAccounts", ())), ""))

    @property
    def metadata(self) -> dict[str, str]:
        return {each["key"]: each["value"] for each in self.told.get("metadata", {}).get("items", ())}

    @property
    def says(self) -> dict[str, str]:
        """What its metadata service says, by paths."""
        return {
            **{f"attributes/{key}": value for key, value in self.metadata.items()},
            "name": self.id,
            "zone": f"projects/1234567890/zones/{self.place}",
            "machine-type": f"projects/1234567890/machineTypes/{self.kind}",
            "preempted": "TRUE" if self.preempted else "FALSE",
            "maintenance-event": "NONE",
        }

    @property
    def started(self) -> str:
        """What its boot does: cloud-init's user data first, and the startup script once sshd is up."""
        config, script = (self.metadata.get(key, "") for key in ("user-data", "startup-script"))
        if not config or not script:
            return config or script
        told = {**yaml.safe_load(config), "runcmd": [["sh", "-c", script]]}
        return f"#cloud-config\n{json.dumps(told)}\n"


@dataclass
class Operation:
    """One operation, of `scope` "zones/us-central1-a", "regions/us-central1" or "global"."""

    name: str
    kind: str
    scope: str
    target: str
    at: float
    status: str = "RUNNING"
    failure: Failed | None = None


def check_labels(told: Mapping[str, Any]) -> None:
    """Refuse labels that Google does not take; names of resources are a part of the schema.

    https://docs.cloud.google.com/compute/docs/labeling-resources
    """
    labels = told.get("labels", {})
    if len(labels) > 64 or not all(_KEY.fullmatch(key) and _VALUE.fullmatch(text) for key, text in labels.items()):
        raise refused(400, "invalid", f"Invalid value for field 'resource.labels': '{labels}'.")


def fingerprint(rental: Instance) -> str:
    """Of its labels: bytes in base64, as the schema has it."""
    return f"{rental.changes:07}="


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
