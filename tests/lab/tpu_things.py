"""What there is in the lab's Cloud TPU: queued resources, their nodes, and the hosts of these."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.lab.cloud import Mortal, Rental


@dataclass
class Delays:
    """Seconds of the lab's clock: until a queued resource is looked at, in which its node is made, in which it is
    deleted; between the notice that a spot slice is taken and its end.

    Attributes:
        unseen: not seconds: so many lists do not have a new queued resource yet.
    """

    accepted: float = 0.05
    provisioning: float = 0.1
    deleting: float = 0.05
    notice: float = 30.0
    unseen: int = 0


@dataclass
class Host(Rental):
    """One host of a slice; `number` is its place among them."""

    slice: str = ""
    number: int = 0
    ip: str = ""


@dataclass
class Queued(Mortal):
    """A queued resource, with its node once it has one. `state` and `node_state` are as the API calls them.

    `alone`: it is a node that was made without a queued resource. `number` is the node's id.
    """

    zone: str
    id: str
    told: dict[str, Any]
    created: float
    state: str = "CREATING"
    failure: dict[str, Any] | None = None
    hosts: list[Host] = field(default_factory=list)
    node_state: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    there: bool = True
    unseen: int = 0
    preempted: bool = False
    alone: bool = False
    number: int = field(default_factory=lambda: secrets.randbelow(2**62))
    token: str = field(default_factory=lambda: f"ya29.vm-{secrets.token_hex(12)}")

    @property
    def node(self) -> dict[str, Any]:
        told: dict[str, Any] = self.told["tpu"]["nodeSpec"][0]["node"]
        return told

    @property
    def kind(self) -> str:
        return str(self.node["acceleratorType"])

    @property
    def market(self) -> str:
        return "spot" if "spot" in self.told else "on-demand"

    @property
    def account(self) -> str:
        """The service account whose tokens its hosts are given; "" for none."""
        return str(self.node.get("serviceAccount", {}).get("email", ""))

    @property
    def until(self) -> float | None:
        """When it is no longer wanted, if it still waits."""
        text = self.told.get("queueingPolicy", {}).get("validUntilTime")
        return datetime.fromisoformat(text).timestamp() if text else None
