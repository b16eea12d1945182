"""Tags on rented machines, written and read: owner, pool, order token, nodes, end of the lease.

By these alone a machine is found again, whatever became of the client that rented it.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Literal

from skypool.checks import warn_renamed
from skypool.model import Instance, Leftover, Order
from skypool.processes import host_name

POOL = "skypool-pool"
"""Tag with the name of the pool."""

OWNER = "skypool-owner"
"""Tag with the user and the host that rented the thing: user@host."""

SESSION = "skypool-session"
"""Tag with what the orders of one run of a pool have in common."""

TOKEN = "skypool-token"
"""Tag with the token of the order."""

NODES = "skypool-ranks"
"""Tag with the nodes that the machines of an order become: "0-7 9"."""

UNTIL = "skypool-until"
"""Tag with the time when nobody needs the thing any more unless it is renewed."""


def tags(order: Order) -> dict[str, str]:
    """Return the tags of everything that an order makes. The same order has the same tags."""
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
    """Return who rents: user@host. An account may be shared, and pools of other users may have the same name."""
    return re.sub(r"[^A-Za-z0-9@._-]", "-", f"{getpass.getuser()}@{host_name()}")


def owners(pool: str | None) -> str:
    """Return a pattern of owners: this user on any host, or, for one pool, this user on this host."""
    return owner() if pool is not None else f"{owner().partition('@')[0]}@*"


def ours(said: Mapping[str, str], pool: str | None, longest: int | None = None) -> bool:
    """Return True if a thing with these tags is of this user's pools, or of one pool.

    Args:
        longest: characters of a value, if the provider limits them.
    """
    named = said.get(POOL, "")
    if not named or pool not in (None, named):
        return False
    return fnmatchcase(said.get(OWNER, ""), owners(pool)[:longest])


def session(order: Order) -> str:
    """Return what the orders of one run of a pool have in common."""
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
    """Return a machine as its tags describe it.

    Args:
        nth: its place in its order, from 0.
        detail: what only the driver understands.
        region, instance_type, created_at: as `Instance` has them.
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
    """Return something other than a machine, as its tags describe it.

    Args:
        tagged_as: as `Leftover` has it.
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
    """Return tags as a list of pairs, the form that many providers take."""
    return [{key: name, value: text} for name, text in said.items()]


def read(pairs: Iterable[Mapping[str, str]], key: str = "Key", value: str = "Value") -> dict[str, str]:
    """Read tags that are a list of pairs."""
    return {each[key]: each[value] for each in pairs}


def stamp(time: datetime | None) -> str:
    """Return a time as a tag has it: "2026-11-21T15:28:00Z"; "" for none."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time else ""


def when(text: str) -> datetime | None:
    """Read the time of a tag. Returns None if the text is no time."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def packed(nodes: Sequence[int]) -> str:
    """Return numbers of nodes in a few characters: "0-7 9"."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and runs[-1][1] == node - 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    return " ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def unpacked(text: str) -> list[int]:
    """Return the numbers that `packed` wrote, in the same order. Returns [] for another text."""
    if not re.fullmatch(r"\d+(-\d+)?( \d+(-\d+)?)*", text):
        return []
    found: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def __getattr__(name: str) -> str:
    if name != "RANKS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    warn_renamed("tags.RANKS", "tags.NODES")
    return NODES
