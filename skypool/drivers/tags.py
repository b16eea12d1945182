"""Writes and reads the tags of rented machines: owner, pool, session, token of the order, node numbers, expiry time.

skypool finds its machines again by these tags alone, even if the client that rented the machines is lost. Tags are
names with values that a provider stores for a machine or another resource; some providers call them labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Literal

from skypool.model import Instance, Leftover, Order
from skypool.processes import host_name, user_name

POOL = "skypool-pool"
"""Tag with the name of the pool."""

OWNER = "skypool-owner"
"""Tag with the user and the host of the client that rented the machine or other resource: user@host."""

SESSION = "skypool-session"
"""Tag with the session (one run of a pool): the part that the tokens of all orders of this run have in common."""

TOKEN = "skypool-token"
"""Tag with the token of the order."""

NODES = "skypool-ranks"
"""Tag with the node numbers that the machines of an order get in their pool, such as "0-7 9"."""

UNTIL = "skypool-until"
"""Tag with the expiry time, until which the resource is needed. skypool postpones this time while the pool runs."""


def tags(order: Order) -> dict[str, str]:
    """Return the tags that every machine and every other resource of an order gets.

    The same order gives the same tags each time on the same computer. There is no tag `UNTIL` if `order.until` is None.
    """
    said = {
        POOL: order.pool,
        OWNER: owner(),
        SESSION: session(order),
        TOKEN: order.token,
        NODES: packed(order.nodes),
    }
    if order.until:
        said[UNTIL] = stamp(order.until)
    return said


def owner() -> str:
    """Return the value of the owner tag for this process: "user@host", from the login name and the host name.

    Several users may share an account at a provider and use the same pool name. The owner tag tells their machines
    apart. Characters other than letters, digits, "@", ".", "_" and "-" are replaced by "-".
    """
    return re.sub(r"[^A-Za-z0-9@._-]", "-", f"{user_name()}@{host_name()}")


def owners(pool: str | None) -> str:
    """Return a shell-style pattern that matches the owner tags (user@host) of resources that belong to this user.

    Args:
        pool: None for resources that this user rented from any host. With the name of any pool: from this host only.
    """
    return owner() if pool is not None else f"{owner().partition('@')[0]}@*"


def ours(said: Mapping[str, str], pool: str | None, longest: int | None = None) -> bool:
    """Return True if the tags say that a resource belongs to a pool of this user.

    Args:
        said: tags of the resource.
        pool: name of a pool. The resource must then belong to this pool and be rented from this host. None accepts
            every pool of this user, rented from any host.
        longest: number of characters to which the provider shortens the values of tags. Only so many characters of the
            owner are then compared. None if the provider does not shorten values.
    """
    named = said.get(POOL, "")
    if not named or pool not in (None, named):
        return False
    return fnmatchcase(said.get(OWNER, ""), owners(pool)[:longest])


def session(order: Order) -> str:
    """Return the session of an order: the order's token up to its last "-", for example "ab-1" for "ab-1-3".

    All orders of one run of a pool have the same session. A token without "-" is returned whole.
    """
    return order.token.rpartition("-")[0] or order.token


def instance(
    provider: str,
    id: str,
    said: Mapping[str, str],
    nth: int,
    state: Literal["starting", "running", "ending", "ended"],
    detail: Mapping[str, object],
    region: str = "",
    instance_type: str = "",
    created_at: float | None = None,
) -> Instance:
    """Return an `Instance` for a machine, with pool, node number, token and expiry time read from the machine's tags.

    If a tag is missing, the pool and the token are "", and the expiry time is None.

    Args:
        provider: name of the driver.
        id: the provider's identifier of the machine.
        said: tags of the machine.
        nth: index of the machine in its order, from 0. The machine's node number is the number at this index in the tag
            `NODES`, or `nth` if the tag has no such number.
        state: state of the machine.
        detail: data that only the driver understands.
        region: the provider's name of the region; "" if the provider has no regions.
        instance_type: the provider's name of the machine type; "" if unknown.
        created_at: time at which the machine was created, in seconds since 1970; None if unknown.
    """
    nodes = unpacked(said.get(NODES, ""))
    node = nodes[nth] if nth < len(nodes) else nth
    return Instance(
        provider=provider,
        id=id,
        pool=said.get(POOL, ""),
        node=node,
        state=state,
        detail=detail,
        token=said.get(TOKEN, ""),
        until=when(said.get(UNTIL, "")),
        region=region,
        instance_type=instance_type,
        created_at=created_at,
    )


def leftover(
    provider: str,
    kind: str,
    id: str,
    said: Mapping[str, str],
    region: str,
    detail: Mapping[str, object],
    tagged_as: str = "",
) -> Leftover:
    """Return a `Leftover` for a resource other than a machine, with pool and expiry time read from the resource's tags.

    If a tag is missing, the pool is "", and the expiry time is None.

    Args:
        provider: name of the driver.
        kind: the provider's word for this kind of resource, such as "disk".
        id: the provider's identifier of the resource.
        said: tags of the resource.
        region: region that the resource is in.
        detail: data that only the driver understands.
        tagged_as: name under which the provider tags the resource, if that is not `id`.
    """
    return Leftover(
        provider=provider,
        kind=kind,
        id=id,
        pool=said.get(POOL, ""),
        region=region,
        until=when(said.get(UNTIL, "")),
        detail=detail,
        tagged_as=tagged_as,
    )


def pairs(said: Mapping[str, str], key: str = "Key", value: str = "Value") -> list[dict[str, str]]:
    """Return tags as a list of dicts with two entries each, the form that many providers' APIs take.

    For example, `{"a": "1"}` becomes `[{"Key": "a", "Value": "1"}]`. The tags keep their order. `key` and `value` are
    the names of the two entries.
    """
    return [{key: name, value: text} for name, text in said.items()]


def read(pairs: Iterable[Mapping[str, str]], key: str = "Key", value: str = "Value") -> dict[str, str]:
    """Return tags as a dict from name to value. This is the inverse of `pairs`.

    `key` and `value` are the names of the entries in each mapping of `pairs`. If a tag occurs twice, the last value
    counts. KeyError is raised for a mapping that lacks one of the two entries.
    """
    return {each[key]: each[value] for each in pairs}


def stamp(time: datetime | None) -> str:
    """Return a time as UTC text for a tag, such as "2026-11-21T15:28:00Z". Returns "" for None.

    Fractions of a second are dropped. A time without a time zone counts as local time.
    """
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time else ""


def when(text: str) -> datetime | None:
    """Return the time in a tag's text, such as "2026-11-21T15:28:00Z", as a datetime in UTC. Other text gives None."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def packed(nodes: Sequence[int]) -> str:
    """Return node numbers as a short text: [0, 1, 2, 5] becomes "0-2 5".

    The numbers keep their order. Only ascending neighbours are joined: [2, 1] becomes "2 1".
    """
    runs: list[list[int]] = []
    for node in nodes:
        if runs and runs[-1][1] == node - 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    return " ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def unpacked(text: str) -> list[int]:
    """Return the node numbers in a text such as "0-2 5", in order: [0, 1, 2, 5]. Other text gives []."""
    if not re.fullmatch(r"\d+(-\d+)?( \d+(-\d+)?)*", text):
        return []
    found: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
