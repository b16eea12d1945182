"""Reads RunPod's records of pods: whose they are, their state and their address. Writes and reads the names of pods.

Names replace tags, which RunPod does not have. This module sends no requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Literal

from skypool.drivers import tags
from skypool.errors import UsageError
from skypool.model import Instance

_LONGEST_NAME = 191
"""Maximum length of a pod's name, in characters. RunPod does not document its limit."""

_NAME = re.compile(r"skypool/([a-z0-9-]+)/([A-Za-z0-9@._-]+)/([a-z0-9-]{1,64})/(\d+)/([0-9TZ:-]*)")
"""Matches the name of a pod that skypool made."""

_NAME_TAGS = (tags.POOL, tags.OWNER, tags.TOKEN, tags.NODES, tags.UNTIL)
"""The tags that the values in a pod's name stand for, in the order of the values. Other drivers use real tags."""

State = Literal["starting", "running", "ending"]

STATES: Mapping[str, State] = {"PROVISIONING": "starting", "STARTING": "starting", "RUNNING": "running"}
"""skypool's state for each status in which a pod starts or runs. With another status, the pod has stopped or ended."""


def name(pool: str, token: str, node: int, until: datetime | None) -> str:
    """Return the name for a pod of this user, such as "skypool/train/ann@laptop/0123abcd-1/0/2026-11-21T15:28:00Z".

    The parts are pool, owner, token of the order, node number, and `until` (the end of the lease). The last part is
    empty if `until` is None.

    Raises:
        UsageError: the name has more than 191 characters, or a part has a character that is not allowed.
    """
    text = f"skypool/{pool}/{tags.owner()}/{token}/{node}/{tags.stamp(until)}"
    if len(text) > _LONGEST_NAME:
        raise UsageError(
            f"RunPod cannot name a pod {text!r}, because names have at most {_LONGEST_NAME} characters; give the "
            "pool a shorter name="
        )
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"the pod name {text!r} has a character that is not allowed; a pool's name= may have only a-z, 0-9 and '-'"
        )
    return text


def pods(records: Iterable[Mapping[str, Any]], pool: str | None, owners: str) -> list[Instance]:
    """Return the instances in RunPod's records that belong to a pool, or to all pools if `pool` is None.

    Pods with names that skypool did not write, and pods with the status TERMINATED, are left out. A running pod has the
    state "starting" until its ssh port is mapped. A pod that was stopped or outbid (EXITED), or that failed (ERROR),
    has the state "ending". It is returned because it exists until it is deleted.

    Args:
        owners: pattern that the owner in a pod's name must match, such as "ann@*". "*" matches any text.
    """
    made = []
    for record in records:
        found = _NAME.fullmatch(record["name"] or "")
        status = record["status"]
        if found is None or status == "TERMINATED":
            continue
        said: dict[str, str] = dict(zip(_NAME_TAGS, found.groups(), strict=True))
        if pool not in (None, said[tags.POOL]) or not fnmatchcase(said[tags.OWNER], owners):
            continue
        ssh = _ssh(record)
        state = STATES.get(status, "ending")
        if state == "running" and ssh is None:
            state = "starting"
        detail = {"ssh": ssh, "price": record.get("cost") or 0.0, "place": record.get("dataCenterId")}
        made.append(tags.instance("runpod", record["id"], said, 0, state, detail, region="RunPod"))
    return made


def _ssh(record: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the public host and port of a pod's ssh server, never RunPod's proxy; None while port 22 is not mapped."""
    direct = (record.get("ssh") or {}).get("direct")
    return (direct["host"], direct["port"]) if direct else None
