"""Reads Vast.ai's records of instances: whose they are, their state and its reason, and their address. Writes labels.

This module sends no requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from skypool.drivers import tags
from skypool.model import Instance, Order

_STARTING = (None, "", "created", "loading", "rebooting", "unknown")
"""Values of the field `actual_status` of an instance that is starting."""

_LONGEST_OWNER = 80
"""Maximum length of the owner in the label of an instance, in characters."""

_LABEL = re.compile(r"skypool pool=(\S+) owner=(\S+) token=([a-z0-9-]+) rank=(\d+) until=(\S*)")
"""Pattern of the label of an instance that a pool created."""

_LABEL_TAGS = (tags.POOL, tags.OWNER, tags.TOKEN, tags.NODES, tags.UNTIL)
"""The tags that the values in a label stand for, in the order of the values. Vast.ai itself has no tags."""

_BROKEN = re.compile("Error response from daemon|OCI runtime")
"""Matches a text in the field `status_msg` of an instance if Docker failed on the machine."""


def label(order: Order) -> str:
    """Return the label of the instance that an order creates.

    The label contains the pool, the owner, the order's token, the number of the order's first node, and the end of the
    lease. The owner is cut to `_LONGEST_OWNER` (80) characters.
    """
    owner = tags.owner()[:_LONGEST_OWNER]
    words = f"pool={order.pool} owner={owner} token={order.token} rank={order.nodes[0]}"
    return f"skypool {words} until={tags.stamp(order.until)}"


def ours(records: Iterable[Mapping[str, Any]], pool: str | None) -> Iterator[Instance]:
    """Yield the instances of this user's pools, or of one pool, from Vast.ai's records of instances.

    Instances are found by their labels.

    Args:
        pool: name of a pool, for only the instances of this pool that were rented from this computer. None means all
            pools, from any computer.
    """
    for record in records:
        found = _LABEL.fullmatch(str(record.get("label") or ""))
        if found is None:
            continue
        said: dict[str, str] = dict(zip(_LABEL_TAGS, found.groups(), strict=True))
        if tags.ours(said, pool, _LONGEST_OWNER):
            detail = {
                "machine": record["machine_id"],
                "label": found[0],
                "proxied": "ssh" in str(record.get("image_runtype")),
            }
            yield tags.instance(
                "vastai",
                str(record["id"]),
                said,
                0,
                state(record),
                detail,
                region=str(record.get("geolocation") or ""),
                created_at=float(record["start_date"]) if record.get("start_date") else None,
            )


def state(record: Mapping[str, Any]) -> Literal["starting", "running", "ending"]:
    """Return the state of an instance: "starting", "running" or "ending".

    An instance that neither starts nor runs is "ending", such as one that was outbid or has exited. It cannot be used
    any more, and is billed until it is destroyed.
    """
    if record.get("intended_status") == "stopped":
        return "ending"
    status = record.get("actual_status")
    if status in _STARTING:
        return "starting"
    return "running" if status == "running" else "ending"


def trouble(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason why an instance has no address yet or any more, as an error code and a text.

    The codes are "broken" (Docker failed), "outbid", "pending" (the instance still starts) and "unmapped" (the instance
    runs, but has no port). For any other reason, the code is Vast.ai's status of the instance. An empty record gives
    "pending".
    """
    words = str(record.get("status_msg") or "").strip()
    if _BROKEN.search(words):
        return "broken", words
    if record.get("intended_status") == "stopped":
        return "outbid", "the instance was stopped"
    status = str(record.get("actual_status"))
    if state(record) == "starting":
        return "pending", "the instance's image is not pulled yet"
    if status == "running":
        return "unmapped", "the instance runs, but none of its machine's ports is mapped to it"
    return status, words or f"the instance is {status}"


def address(record: Mapping[str, Any], proxied: bool) -> tuple[str, int] | None:
    """Return the pair (host, port) of an instance's SSH server.

    Returns None if the instance does not run, or if the host or the port is not known yet.

    Args:
        proxied: True for the address of Vast.ai's proxy, False for the machine's own.
    """
    if trouble(record)[0] != "unmapped":
        return None
    if proxied:
        host = record.get("ssh_host")
        port = record.get("ssh_port")
    else:
        host = str(record.get("public_ipaddr") or "").strip()
        mapped = (record.get("ports") or {}).get("22/tcp")
        port = mapped[0]["HostPort"] if mapped else None
    return (str(host), int(port)) if host and port else None
