"""Derives the state of a rented TPU slice from the states of Google's two objects for it."""

from __future__ import annotations

from typing import Literal

State = Literal["starting", "running", "ending"]
"""The state of an instance (a rented machine)."""

QUEUED: dict[str, State] = {
    "CREATING": "starting",
    "ACCEPTED": "starting",
    "WAITING_FOR_RESOURCES": "starting",
    "PROVISIONING": "starting",
    "ACTIVE": "running",
}
"""The state of a slice's hosts, by Google's state of the slice's queued resource (the request for the slice).

If the queued resource is in any other state, the node (the running slice) no longer exists or is ending.
"""

NODE: dict[str, State] = {
    "CREATING": "starting",
    "STARTING": "starting",
    "RESTARTING": "starting",
    "REIMAGING": "starting",
    "READY": "running",
    "REPAIRING": "running",
}
"""The state of a slice's hosts, by Google's state of the slice's node (the running slice).

If the node is in any other state, the hosts are ending.
"""

NEW = frozenset({"STATE_UNSPECIFIED", "CREATING", "ACCEPTED"})
"""States of a queued resource (request for a slice) before Google has accepted or refused the request for good."""

LOST = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"})
"""States of a queued resource (request for a slice) whose running slice is lost, whatever the state of its node."""


def state(queued: str, node: str) -> State:
    """Return the state of all hosts of a slice, from the states of Google's two objects for the slice.

    The result is "ending" if the queued resource has failed, is suspended or is being deleted. Otherwise the state of
    the node decides, or the state of the queued resource if there is no node. Unknown states, and an active queued
    resource without a node, give "ending".

    Args:
        queued: The state of the queued resource; "ACTIVE" if only the node exists.
        node: The state of the node; "" if there is no node.
    """
    if queued in LOST:
        return "ending"
    if node:
        return NODE.get(node, "ending")
    of_queued = QUEUED.get(queued, "ending")
    return "ending" if of_queued == "running" else of_queued  # a running slice whose node is gone
