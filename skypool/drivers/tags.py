"""Tags on rented machines, written and read: owner, pool, order token, nodes, end of the lease.

By these alone a machine is found again, whatever became of the client that rented it.

By these alone a machine is found again, whatever became of the client that rented it.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Literal

from skypool.model import Instance, Leftover, Order
from skypool.processes import host_name

POOL, OWNER, SESSION, TOKEN, RANKS, UNTIL = (
    f"skypool-{word}" for word in ("pool", "owner", "session", "token", "ranks", "until")
)


def tags(order: Order) -> dict[str, str]:
    """Those of everything that an order makes; the same order has the same ones."""
    said = {POOL: order.pool, OWNER: owner(), SESSION: session(order), TOKEN: order.token, RANKS: packed(order.ranks)}
    return said | ({UNTIL: stamp(order.until)} if order.until else {})


def owner() -> str:
    """Who rents: user@host. A provider's account may be shared, and pools of others may have the same name."""
    return re.sub(r"[^A-Za-z0-9@._-]", "-", f"{getpass.getuser()}@{host_name()}")


def owners(pool: str | None) -> str:
    """Whose machines a pattern finds: those of this user; where one pool is meant, those rented from this very host."""
    return owner() if pool is not None else f"{owner().partition('@')[0]}@*"


def ours(said: Mapping[str, str], pool: str | None, longest: int | None = None) -> bool:
    """Whether what has these tags is of this user's pools, or of that one.

    Args:
        longest: characters of a value, where the provider takes no more.
    """
    named, whose = said.get(POOL, ""), owners(pool)[:longest]
    return bool(named) and pool in (None, named) and fnmatchcase(said.get(OWNER, ""), whose)


def session(order: Order) -> str:
    """What the orders of one run of a pool have in common."""
    return order.token.rpartition("-")[0] or order.token


def instance(
    provider: str,
    id: str,
    said: Mapping[str, str],
    nth: int,
    state: Literal["starting", "running", "ending", "ended"],
    detail: Mapping[str, Any],
    region: str = "",
) -> Instance:
    """Return a machine as its tags tell of it.

    Args:
        nth: which machine of its order it is, from 0.
        region: see `Instance.region`. Without it `detail["region"]` serves, where drivers kept it before.
    """
    ranks = unpacked(said.get(RANKS, ""))
    rank = ranks[nth] if nth < len(ranks) else nth
    pool, token = said.get(POOL, ""), said.get(TOKEN, "")
    region = region or str(detail.get("region", ""))
    return Instance(provider, id, pool, rank, state, None, detail, token, when(said.get(UNTIL, "")), region=region)


def leftover(
    provider: str, kind: str, id: str, said: Mapping[str, str], region: str, detail: Mapping[str, Any]
) -> Leftover:
    """Something else, as its tags tell of it."""
    return Leftover(provider, kind, id, said.get(POOL, ""), region, when(said.get(UNTIL, "")), detail)


def pairs(said: Mapping[str, str], key: str = "Key", value: str = "Value") -> list[dict[str, str]]:
    """Tags as many providers write them."""
    return [{key: name, value: text} for name, text in said.items()]


def read(pairs: Iterable[Mapping[str, str]], key: str = "Key", value: str = "Value") -> dict[str, str]:
    """Tags that are written so."""
    return {each[key]: each[value] for each in pairs}


def stamp(time: datetime | None) -> str:
    """A time in a tag: "2026-11-21T15:28:00Z"; "" for none."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time else ""


def when(text: str) -> datetime | None:
    """The time of a tag; None if it is none."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def packed(ranks: Sequence[int]) -> str:
    """Ranks in a few characters: "0-7 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def unpacked(text: str) -> list[int]:
    """The ranks that `packed` wrote, in the same order; none where it did not."""
    if not re.fullmatch(r"\d+(-\d+)?( \d+(-\d+)?)*", text):
        return []
    ends = [run.partition("-") for run in text.split()]
    return [rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1)]
